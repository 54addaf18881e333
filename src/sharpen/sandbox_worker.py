"""The program inside the sandbox: receive one job over a channel and run it.

`sandbox/worker.py` hands this file as text to a bare interpreter, as the first process of the
container. It forks. The child reports that Python is up, reads the job and runs it. The parent, the
guard, reaps orphans and ends with the child.

It holds no secret, and it imports little, because the start of the interpreter is what costs time.
"""

import builtins
import os
import resource
import sys

_CHANNEL = 3  # the file descriptor on which a snippet that talks finds its channel
_PR_SET_DUMPABLE = 4


def _reap_until(child: int) -> None:
    """Reap processes until the child ends, then report its exit code and end.

    The exit code is reported at once. The container, which dies with this process, takes longer.
    """
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(_CHANNEL, b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def _set_dumpable(value: int) -> None:
    """Set whether other processes of the user may read this one's memory and /proc entries."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, value)


def take(size: int) -> bytes:
    """Read exactly `size` bytes of the channel; the rest belongs to the snippet."""
    received = b""
    while len(received) < size:
        data = os.read(_CHANNEL, size - len(received))
        if not data:  # the pool closed
            os._exit(0)
        received += data
    return received


def prepare(job: dict) -> None:
    """Write the job's files, set up standard input, and apply the limits.

    The limits come last, because from then on they bind this process too.
    """
    for name, text in {**job.get("files", {}), ".stdin": job.get("stdin", "")}.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    with open(".stdin") as file:
        os.dup2(file.fileno(), 0)
    os.unlink(".stdin")
    if not job["talks"]:
        os.close(_CHANNEL)
    for name, value in job["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def run(source: str) -> None:
    """Run the snippet as `python snippet.py` would; the traceback of an error begins in it."""
    module = type(sys)("__main__")
    module.__file__ = "snippet.py"
    sys.modules["__main__"] = module
    sys.argv = ["snippet.py"]
    sys.path.insert(0, os.getcwd())
    builtins.exit = builtins.quit = sys.exit  # added by the module `site`, which is not loaded
    try:
        exec(compile(source, "snippet.py", "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        snippet_trace = trace.tb_next if trace else None  # without this function's frame
        sys.__excepthook__(type(error), error.with_traceback(snippet_trace), None)
        sys.exit(1)


def main(uid: int, channel: int) -> None:
    """Fork, and run one job in the child, as the user `uid` if it is not 0."""
    os.dup2(channel, _CHANNEL)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this process goes first
    child = os.fork()
    if child:
        if not uid:
            _set_dumpable(0)  # the snippet has the same user and must not get at its guard
        _reap_until(child)
    if uid:  # change from root to a user that nobody else is
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _set_dumpable(1)  # lost by the change of user, and with it /dev/stdin
    os.closerange(_CHANNEL + 1, 64)
    os.write(_CHANNEL, b"\n")
    size = int(take(8))
    job = eval(take(size))  # a Python literal, written by the pool
    prepare(job)
    run(job["code"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
