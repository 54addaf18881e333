"""One sandbox worker seen from outside: a process that waits for one snippet, runs it and dies.

The pool in `pool.py` uses workers in containers; the math reward uses `plain_worker`. What a worker
writes is read here within limits, and what it does wrong becomes a `SandboxResult`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from sharpen.config import Config
from sharpen.sandbox.container import SYSTEM_CALL_FILTER, snippet_environment
from sharpen.types import SharpenError

_WORKER_SOURCE = Path(__file__).parents[1].joinpath("sandbox_worker.py").read_text("utf-8")
START_S = 60.0  # time for a worker's Python to start
TICK_S = 0.1  # seconds between two looks at the clock or the memory
_MAX_MESSAGE_BYTES = 8 << 20  # of a job, or of one line of a conversation
_READ_BYTES = 1 << 16
FLOOD_FACTOR = 64  # a snippet that writes this many times its output limit is stopped


class Limits(Config):
    """What a snippet may use.

    The memory limit holds per process; all processes of a snippet may hold twice as much together.
    """

    wall_s: float = Field(5.0, gt=0, le=3600)
    memory_mb: int = Field(512, ge=64)
    output_kb: int = Field(64, ge=1)  # of stdout and of stderr; the rest is dropped
    disk_mb: int = Field(64, ge=1)  # of /tmp, of /dev/shm, and of one file
    processes: int = Field(32, ge=1)  # including threads


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a snippet ended and what it wrote.

    The exit code is the snippet's own claim. A caller that must not be lied to compares values on
    its own side of `Sandbox.talk`.
    """

    exit_code: int  # -n when signal n ended it
    stdout: str
    stderr: str
    stopped: str = ""  # the limit that it was stopped for: wall, memory or flood
    truncated: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the snippet ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.stopped

    @property
    def timed_out(self) -> bool:
        """Whether the snippet was stopped by the wall clock."""
        return self.stopped == "wall"


class Worker:
    """A process that waits for its snippet or runs it.

    `begin` hands over the snippet. Then either `send` and `receive` exchange lines with it, or
    `finish` waits for its result. `end` kills it.
    """

    def __init__(self, program: Sequence[str], folder: str, env: Mapping[str, str], uid: int = 0):
        """Start `program`, a container, or without one a plain process in `folder`."""
        self._folder = folder
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder or "/nonexistent", True)
        self._channel, worker_channel = socket.socketpair()
        # bwrap reads its filter from a file
        filter_file, filter_input = os.pipe()
        os.write(filter_input, SYSTEM_CALL_FILTER)
        os.close(filter_input)
        with worker_channel, open(filter_file, "rb"):
            python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
            command = [*program, "--seccomp", str(filter_file)] if program else []
            command += [python, "-S", "-P", "-c", _WORKER_SOURCE]
            command += [str(uid), str(worker_channel.fileno())]
            self.process = subprocess.Popen(
                command,
                start_new_session=bool(folder),
                pass_fds=(worker_channel.fileno(), filter_file),
                env=env,
                cwd=folder or "/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        assert self.process.stdout and self.process.stderr
        self._files = [self.process.stdout, self.process.stderr, self._channel]
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._inbox = bytearray()  # what came over the channel and was not yet received
        self._buffers = {
            self.process.stdout.fileno(): self._stdout,
            self.process.stderr.fileno(): self._stderr,
            self._channel.fileno(): self._inbox,
        }
        self._poll = select.poll()
        for file in self._buffers:
            self._poll.register(file, select.POLLIN)
        self.stopped = ""  # the limit that it was stopped for
        self._dropped = 0  # bytes over the output limit
        self._channel_closed = False

    def start_clock(self, limits: Limits) -> None:
        """Apply these limits from now on."""
        self.limits = limits
        self._started = time.monotonic()
        self._memory_checked = self._started
        self._deadline = self._started + limits.wall_s

    def begin(self, limits: Limits, code: str, talks: bool, **job: Any) -> None:
        """Wait until Python is up, then hand over the job."""
        rlimits = {
            "AS": limits.memory_mb << 20,
            "FSIZE": limits.disk_mb << 20,
            "NOFILE": 256,
            "CPU": math.ceil(limits.wall_s) + 1,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }
        if not self._folder:  # without a container all processes of the user would count
            rlimits["NPROC"] = limits.processes
        line = ascii({"code": code, "talks": talks, "rlimits": rlimits, **job}).encode()
        if len(line) > _MAX_MESSAGE_BYTES:
            raise SharpenError(f"sandbox: a job of {len(line)} bytes, at most {_MAX_MESSAGE_BYTES}")
        self.start_clock(Limits(wall_s=START_S))
        if self.receive() is None:
            reason = " ".join(self.finish().stderr.split())[-300:]
            raise SharpenError(f"sandbox: {reason or f'no start within {START_S:g} s'}")
        self.start_clock(limits)
        self.send(b"%08d" % (len(line) + 1) + line)

    def send(self, line: bytes) -> None:
        """Write a line to the channel. The next `receive` shows whether it was read."""
        self._channel.settimeout(max(0.001, self._deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._channel.sendall(line + b"\n")

    def receive(self) -> bytes | None:
        """Returns the next line of the channel, or None when none will come within the limits."""
        while b"\n" not in self._inbox:
            now = time.monotonic()
            if now >= self._deadline:
                self.stopped = self.stopped or "wall"
            elif now > self._memory_checked + TICK_S:
                self._memory_checked = now
                if _resident_bytes(self.process.pid) > 2 * self.limits.memory_mb << 20:
                    self.stopped = "memory"
            if self._channel_closed or self.stopped:
                return None
            self._read_ready(min(TICK_S, max(0.0, self._deadline - now)))
        line, _, rest = self._inbox.partition(b"\n")
        self._inbox[:] = rest
        return bytes(line)

    def _read_ready(self, timeout_s: float) -> bool:
        """Read what has come and keep what is within the limits. False if nothing has come."""
        output_limit = self.limits.output_kb << 10
        ready = self._poll.poll(1000 * timeout_s)
        for file, _ in ready:
            try:
                data = os.read(file, _READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                self._poll.unregister(file)
                if file == self._channel.fileno():
                    self._channel_closed = True
            buffer = self._buffers[file]
            limit = _MAX_MESSAGE_BYTES if buffer is self._inbox else output_limit
            room = limit - len(buffer)
            buffer += data[:room]
            self._dropped += max(0, len(data) - room)
            if self._dropped > FLOOD_FACTOR * output_limit:
                self.stopped = "flood"
        return bool(ready)

    def finish(self) -> SandboxResult:
        """Wait until the snippet ends or reaches its limits, and collect what it wrote.

        The last line of the channel is the exit code, written by the guard process.
        """
        line = self.receive() or b""
        while not self.stopped and self._read_ready(0):
            pass  # what the snippet wrote before it ended
        exit_code = -signal.SIGKILL
        if line.lstrip(b"-").isdigit() and not self.stopped:
            exit_code = int(line)
        return SandboxResult(
            exit_code=exit_code,
            stdout=self._stdout.decode("utf-8", "replace"),
            stderr=self._stderr.decode("utf-8", "replace"),
            stopped=self.stopped,
            truncated=self._dropped > 0,
            seconds=time.monotonic() - self._started,
        )

    def end(self) -> None:
        """Kill all processes of the worker.

        The container dies with its first process, which bwrap then reaps. Killing bwrap itself
        would leave a zombie to whichever process adopts it.
        """
        inner = descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            for pid in inner:
                os.kill(pid, signal.SIGKILL)
            if self._folder:
                os.killpg(self.process.pid, signal.SIGKILL)
        if not inner:
            self.process.kill()
        self.process.wait()
        for file in self._files:
            file.close()
        self._remove_folder()


def plain_worker(paths: Sequence[str]) -> Worker:
    """Start a worker with resource limits but without a container."""
    folder = tempfile.mkdtemp()
    return Worker([], folder, snippet_environment(folder, paths))


def descendants(pid: int) -> list[int]:
    """Returns the ids of all processes below a process, parents before their children."""
    pids = [pid]
    for parent in pids:  # the list grows while it is read
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
    return pids[1:]


def _resident_bytes(pid: int) -> int:
    """Returns the memory of all processes below a process."""
    pages = 0
    for inner in descendants(pid):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{inner}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
