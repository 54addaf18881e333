"""A pool of sandbox workers that run untrusted snippets; rewards and environments use it.

Workers are started ahead of time and wait for a job. Each serves one snippet and dies, so that no
snippet can poison the next one. A snippet that hangs, floods or crashes is data in its
`SandboxResult`, not an exception.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from sharpen.sandbox.container import bwrap_arguments
from sharpen.sandbox.worker import TICK_S, Limits, SandboxResult, Worker, plain_worker
from sharpen.types import SharpenError

_USER_IDS = range(61184, 65520)  # systemd's range for users that exist only while something runs


class Sandbox(contextlib.AbstractContextManager):
    """A pool of workers: `with Sandbox() as sandbox: sandbox.run("print(1)").stdout`.

    A snippet sees `/usr` and the Python installation, read-only, the folders `paths`, from which it
    can import, and its own `/tmp`. It sees no network, no other process and no environment.
    `mode="subprocess"` applies the resource limits only: it contains accidents, not attacks.
    """

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
            weakness = "sandbox: subprocess mode does not keep code from files or network"
            warnings.warn(weakness, stacklevel=2)
        elif not shutil.which("bwrap"):
            fix = "as root: make system, or apt-get install bubblewrap; mode='subprocess' is weaker"
            raise SharpenError(f"sandbox: bubblewrap is not here; {fix}")
        self.workers = workers
        self.limits = limits or Limits()
        self.mode = mode
        self._paths = [os.path.realpath(path) for path in paths]
        self._closed = False
        self._running = threading.BoundedSemaphore(workers)
        self._ready: queue.Queue[Worker | OSError] = queue.Queue(2 * workers)
        self._ending = ThreadPoolExecutor(workers, "sandbox-end")
        # One thread starts every worker, because a worker dies with the thread that started it.
        self._starter = threading.Thread(target=self._refill, daemon=True, name="sandbox")
        self._starter.start()

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run a snippet until it ends or reaches its limits.

        `files` are put into its working directory.
        """
        with self._running, self.take_worker() as worker:
            worker.begin(limits or self.limits, code, False, stdin=stdin, files=dict(files or {}))
            return worker.finish()

    def run_many(self, snippets: Sequence[str | Mapping[str, Any]]) -> list[SandboxResult]:
        """Run snippets in parallel; returns the results in the order of the snippets.

        A snippet is its code, or the arguments of `run`.
        """

        def run_snippet(snippet: str | Mapping[str, Any]) -> SandboxResult:
            return self.run(snippet) if isinstance(snippet, str) else self.run(**snippet)

        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(run_snippet, snippets))

    @contextlib.contextmanager
    def talk(self, code: str, limits: Limits | None = None) -> Iterator[Worker]:
        """Run a snippet that exchanges lines on its file descriptor 3; kill it after the block."""
        with self.take_worker() as worker:
            worker.begin(limits or self.limits, code, True)
            yield worker

    @contextlib.contextmanager
    def take_worker(self) -> Iterator[Worker]:
        """Take a waiting worker out of the pool; kill it after the block."""
        if self._closed:
            raise SharpenError("sandbox: it is closed")
        worker = self._ready.get()
        if isinstance(worker, OSError):
            raise SharpenError(f"sandbox: no worker can be started: {worker}")
        try:
            yield worker
        finally:
            self._ending.submit(worker.end)  # the kernel takes its time over a container

    def _refill(self) -> None:
        """Start workers until the pool is closed; a failure to start is queued like a worker."""
        while not self._closed:
            try:
                started = self._start_worker()
            except OSError as error:
                started = error
            self._ready.put(started)

    def _start_worker(self) -> Worker:
        """Start a worker; as root, its snippet runs as a user that nobody else is."""
        if self.mode == "subprocess":
            return plain_worker(self._paths)
        uid = random.choice(_USER_IDS) if os.geteuid() == 0 else 0
        bwrap = shutil.which("bwrap") or "bwrap"
        program = [bwrap, *bwrap_arguments(self._paths, self.limits.disk_mb << 20, uid)]
        return Worker(program, "", {}, uid)

    def close(self) -> None:
        self._closed = True
        while self._starter.is_alive() or not self._ready.empty():
            with contextlib.suppress(queue.Empty):
                worker = self._ready.get(timeout=TICK_S)
                if isinstance(worker, Worker):
                    worker.end()
        self._ending.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()
