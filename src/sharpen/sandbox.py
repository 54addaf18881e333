"""Run code that nobody trusts: a bubblewrap container, resource limits and a wall clock around one
Python process a snippet.

Workers are started ahead of time and wait for a job; each serves one snippet and dies, so that none
can poison the next. That a snippet hangs, floods or crashes is data in its `SandboxResult`. An exit
code is the snippet's own word: who must not be lied to compares values on this side of `talk`.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import queue
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sharpen.config import Config
from sharpen.types import SharpenError

WORKER = Path(__file__).with_name("sandbox_worker.py").read_text("utf-8")
START_S, TICK_S = 60.0, 0.1
MAX_MESSAGE = 8 << 20  # a job, or one line of a conversation
FLOOD = 64  # a snippet that writes so many times its output limit is stopped
UIDS = range(61184, 65520)  # systemd's range for users that exist only while something runs


class Limits(Config):
    """What a snippet may use. Memory is one process's; all together may hold twice as much."""

    wall_s: float = Field(5.0, gt=0, le=3600)
    memory_mb: int = Field(512, ge=64)
    output_kb: int = Field(64, ge=1)  # of stdout and of stderr; what follows is dropped
    disk_mb: int = Field(64, ge=1)  # of /tmp and of /dev/shm, and of one file
    processes: int = Field(32, ge=1)  # and threads


@dataclass(frozen=True, slots=True)
class SandboxResult:
    exit_code: int  # -n when signal n ended it
    stdout: str
    stderr: str
    stopped: str = ""  # what we stopped it for: wall, memory or flood
    truncated: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.stopped

    @property
    def timed_out(self) -> bool:
        return self.stopped == "wall"


class Worker:
    """One container that waits for its snippet or runs it, seen from outside."""

    def __init__(self, program: Sequence[str], folder: str, env: Mapping[str, str], uid: int = 0):
        self.folder, pipe = folder, subprocess.PIPE
        self.remove = weakref.finalize(self, shutil.rmtree, folder or "/nonexistent", True)
        self.channel, theirs = socket.socketpair()
        filters, end = os.pipe()  # bwrap reads its filter from a file
        os.write(end, FILTER)
        os.close(end)
        with theirs, open(filters, "rb"):
            python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
            line = [*program, "--seccomp", str(filters)] if program else []
            line += [python, "-S", "-P", "-c", WORKER, str(uid), str(theirs.fileno())]
            settings = {"pass_fds": (theirs.fileno(), filters), "env": env, "cwd": folder or "/"}
            settings |= {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
            self.process = subprocess.Popen(line, start_new_session=bool(folder), **settings)
        self.files = [self.process.stdout, self.process.stderr, self.channel]
        self.kept = {file.fileno(): bytearray() for file in self.files if file}
        self.inbox, self.poll = self.kept[self.channel.fileno()], select.poll()
        for file in self.kept:
            self.poll.register(file, select.POLLIN)
        self.stopped, self.dropped, self.gone = "", 0, False

    def start_clock(self, limits: Limits) -> None:
        self.limits, self.started = limits, time.monotonic()
        self.checked, self.deadline = self.started, self.started + limits.wall_s

    def begin(self, limits: Limits, code: str, talks: bool, **job: Any) -> None:
        """Hand over the job when Python is up."""
        rlimits = {"AS": limits.memory_mb << 20, "FSIZE": limits.disk_mb << 20, "NOFILE": 256}
        rlimits |= {"CPU": math.ceil(limits.wall_s) + 1, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0}
        rlimits |= {} if self.folder else {"NPROC": limits.processes}  # else all the user's count
        line = ascii({"code": code, "talks": talks, "rlimits": rlimits, **job}).encode()
        if len(line) > MAX_MESSAGE:
            raise SharpenError(f"sandbox: a job of {len(line)} bytes, at most {MAX_MESSAGE}")
        self.start_clock(Limits(wall_s=START_S))
        if self.receive() is None:
            reason = " ".join(self.finish().stderr.split())[-300:]
            raise SharpenError(f"sandbox: {reason or f'no start within {START_S:g} s'}")
        self.start_clock(limits)
        self.send(b"%08d" % (len(line) + 1) + line)

    def send(self, line: bytes) -> None:
        """A line for the channel. Whether it was read is found out by the next `receive`."""
        self.channel.settimeout(max(0.001, self.deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self.channel.sendall(line + b"\n")

    def receive(self) -> bytes | None:
        """The next line of the channel, or None when none will come within the limits."""
        while b"\n" not in self.inbox:
            now = time.monotonic()
            if now >= self.deadline:
                self.stopped = self.stopped or "wall"
            elif now > self.checked + TICK_S:
                self.checked = now
                if resident_bytes(self.process.pid) > 2 * self.limits.memory_mb << 20:
                    self.stopped = "memory"
            if self.gone or self.stopped:
                return None
            self.read(min(TICK_S, max(0.0, self.deadline - now)))
        line, _, rest = self.inbox.partition(b"\n")
        self.inbox[:] = rest
        return bytes(line)

    def read(self, patience_s: float) -> bool:
        """Take what has come, keep what is within limits; False when nothing has come."""
        ready = self.poll.poll(1000 * patience_s)
        for file, _ in ready:
            try:
                data = os.read(file, 1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                self.poll.unregister(file)
                self.gone |= file == self.channel.fileno()
            kept, cap = self.kept[file], self.limits.output_kb << 10
            room = (MAX_MESSAGE if kept is self.inbox else cap) - len(kept)
            kept += data[:room]
            self.dropped += max(0, len(data) - room)
            self.stopped = "flood" if self.dropped > FLOOD * cap else self.stopped
        return bool(ready)

    def finish(self) -> SandboxResult:
        """Let it end, or reach its limits, and collect. Its guard's last line is its exit code."""
        line = self.receive() or b""
        while not self.stopped and self.read(0):  # what it wrote before it ended
            pass
        code = int(line) if line.lstrip(b"-").isdigit() and not self.stopped else -signal.SIGKILL
        stdout, stderr, _ = (bytes(kept).decode("utf-8", "replace") for kept in self.kept.values())
        seconds = time.monotonic() - self.started
        return SandboxResult(code, stdout, stderr, self.stopped, self.dropped > 0, seconds)

    def end(self) -> None:
        """Kill all of it. The container dies with its first process, which bwrap then reaps; to
        kill bwrap instead would leave a zombie to whoever adopts it."""
        inner = descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            for pid in inner:
                os.kill(pid, signal.SIGKILL)
            if self.folder:
                os.killpg(self.process.pid, signal.SIGKILL)
        if not inner:
            self.process.kill()
        self.process.wait()
        for file in self.files:
            if file:
                file.close()
        self.remove()


def plain_worker(paths: Sequence[str]) -> Worker:
    """A worker with resource limits and no container."""
    folder = tempfile.mkdtemp()
    return Worker([], folder, environment(folder, paths))


class Sandbox(contextlib.AbstractContextManager):
    """A pool of workers: `with Sandbox() as sandbox: sandbox.run("print(1)").stdout`.

    A snippet sees `/usr` and the Python installation, read-only, and `paths`, from which it can
    import; its own `/tmp`; no network, no other process, no environment.
    `mode="subprocess"` has the resource limits only: it keeps accidents in, not attacks."""

    def __init__(
        self,
        workers: int = 2,
        limits: Limits | None = None,
        mode: Literal["bubblewrap", "subprocess"] = "bubblewrap",
        paths: Sequence[str | Path] = (),
    ):
        if workers < 1 or mode not in ("bubblewrap", "subprocess"):
            raise SharpenError(f"sandbox: {workers} workers in mode {mode!r}")
        if mode == "subprocess":
            weak = "sandbox: subprocess mode does not keep code from files or network"
            warnings.warn(weak, stacklevel=2)
        elif not shutil.which("bwrap"):
            fix = "as root: make system, or apt-get install bubblewrap; mode='subprocess' is weaker"
            raise SharpenError(f"sandbox: bubblewrap is not here; {fix}")
        self.workers, self.limits, self.mode = workers, limits or Limits(), mode
        self.paths, self.closed = [os.path.realpath(path) for path in paths], False
        self.slots = threading.BoundedSemaphore(workers)
        self.ready: queue.Queue[Worker | OSError] = queue.Queue(2 * workers)
        self.ending = ThreadPoolExecutor(workers, "sandbox-end")
        # One thread starts every worker, for a worker dies with the thread that started it.
        self.starter = threading.Thread(target=self.refill, daemon=True, name="sandbox")
        self.starter.start()

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run a snippet to its end or to its limits. `files` lie in its working directory."""
        with self.slots, self.worker() as worker:
            worker.begin(limits or self.limits, code, False, stdin=stdin, files=dict(files or {}))
            return worker.finish()

    def run_many(self, snippets: Sequence[str | Mapping[str, Any]]) -> list[SandboxResult]:
        """Run snippets, or arguments of `run`, in parallel; results in their order."""
        calls = [{"code": each} if isinstance(each, str) else each for each in snippets]
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda call: self.run(**call), calls))

    @contextlib.contextmanager
    def talk(self, code: str, limits: Limits | None = None) -> Iterator[Worker]:
        """A snippet to exchange lines with, on its file descriptor 3; killed after the block."""
        with self.worker() as worker:
            worker.begin(limits or self.limits, code, True)
            yield worker

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        if self.closed:
            raise SharpenError("sandbox: it is closed")
        worker = self.ready.get()
        if isinstance(worker, OSError):
            raise SharpenError(f"sandbox: no worker can be started: {worker}")
        try:
            yield worker
        finally:
            self.ending.submit(worker.end)  # the kernel takes its time over a container

    def refill(self) -> None:
        while not self.closed:
            try:
                started = self.start()
            except OSError as error:
                started = error
            self.ready.put(started)

    def start(self) -> Worker:
        if self.mode == "subprocess":
            return plain_worker(self.paths)
        uid = random.choice(UIDS) if os.geteuid() == 0 else 0
        program = [shutil.which("bwrap") or "bwrap"]
        program += container(self.paths, self.limits.disk_mb << 20, uid)
        return Worker(program, "", {}, uid)

    def close(self) -> None:
        self.closed = True
        while self.starter.is_alive() or not self.ready.empty():
            with contextlib.suppress(queue.Empty):
                worker = self.ready.get(timeout=TICK_S)
                if isinstance(worker, Worker):
                    worker.end()
        self.ending.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


# The container -----------------------------------------------------------------------------------


def container(paths: Sequence[str], disk_bytes: int, uid: int) -> list[str]:
    """Arguments of bwrap. Root keeps the right to become `uid`; others get a user namespace."""
    line = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
    line += " --die-with-parent --as-pid-1 --new-session --hostname sandbox --clearenv"
    rights = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID" if uid else "--unshare-user"
    line += f" {rights}"
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(top):
            line += f" --symlink {os.readlink(top)} {top}"
        elif os.path.isdir(top):
            line += f" --ro-bind {top} {top}"
    scratch = f"--perms 1777 --size {disk_bytes} --tmpfs"
    line += f" --proc /proc --dev /dev {scratch} /dev/shm {scratch} /tmp --chdir /tmp"
    arguments = line.split()
    for path in dict.fromkeys(("/usr", os.path.realpath(sys.base_prefix), *paths)):
        if not path.startswith("/usr/"):
            for parent in reversed(Path(path).parents[:-1]):
                arguments += ["--perms", "0755", "--dir", str(parent)]
            arguments += ["--ro-bind", path, path]
    for name, value in environment("/tmp", paths).items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]


def environment(home: str, paths: Sequence[str]) -> dict[str, str]:
    """The same for every snippet: hashes do not vary, threads do not reserve memory."""
    single = ("PYTHONDONTWRITEBYTECODE", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS")
    found = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}
    found |= {"PYTHONHASHSEED": "0", "PYTHONPATH": ":".join(paths)}
    return found | dict.fromkeys(single, "1")


# What a snippet could do without any privilege and does not need, as name:x86_64:aarch64: other
# processes' memory, namespaces, keys, and memory that no limit counts.
REFUSED = """ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272
pidfd_getfd:438:438 mount:165:40 unshare:272:97 setns:308:268 keyctl:250:219 add_key:248:217
request_key:249:218 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425
memfd_create:319:279 memfd_secret:447:447 shmget:29:194 msgget:68:186 semget:64:190 syslog:103:116
name_to_handle_at:303:264 personality:135:92"""
CLONE_NAMESPACES = 0x7E020000


def system_call_filter() -> bytes:
    """A seccomp program: the calls above fail, sockets are Unix ones (others, such as vsock, have
    no namespace), no clone makes a namespace; clone3 is unknown, for its flags cannot be read."""
    arm = platform.machine() == "aarch64"
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x50000 | EPERM, 0x50000 | ENOSYS
    architecture = 0xC00000B7 if arm else 0xC000003E
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 1 << 30), (end, 0, 0, refuse)]  # x32 calls
    program += [(equal, 0, 1, 435), (end, 0, 0, unknown)]
    for entry in REFUSED.split():
        program += [(equal, 0, 1, int(entry.split(":")[1 + arm])), (end, 0, 0, refuse)]
    first_argument = (load, 0, 0, 16)
    program += [(equal, 0, 4, 198 if arm else 41), first_argument]
    program += [(equal, 0, 1, socket.AF_UNIX), (end, 0, 0, allow), (end, 0, 0, refuse)]
    program += [(equal, 0, 3, 220 if arm else 56), first_argument]
    program += [(any_bit, 0, 1, CLONE_NAMESPACES), (end, 0, 0, refuse), (end, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in program)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows as it is read
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def resident_bytes(pid: int) -> int:
    pages = 0
    for inner in descendants(pid):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{inner}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


FILTER = system_call_filter()
