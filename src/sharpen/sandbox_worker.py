"""Runs inside the sandbox as its first process: forks, and the child says that Python is up, reads
one job from its channel and runs it, while the parent reaps orphans and ends with the child. No
secret is here. A bare interpreter gets it as text, and it imports little: the start is what costs.
"""

import builtins
import os
import resource
import sys

CHANNEL = 3  # where a snippet that talks finds its channel


def reap_until(child: int) -> None:
    """Report the child's end at once; the container, which dies with this process, takes longer."""
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(CHANNEL, b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def set_dumpable(value: int) -> None:
    """Whether others of its user may read a process's memory and /proc entries."""
    import ctypes

    ctypes.CDLL(None).prctl(4, value)


def take(size: int) -> bytes:
    """So many bytes of the channel and no more: what follows is the snippet's."""
    received = b""
    while len(received) < size:
        received += os.read(CHANNEL, size - len(received)) or os._exit(0)  # the pool closed
    return received


def prepare(job: dict) -> None:
    """Files, standard input, and the limits last, for from there on they bind us too."""
    for name, text in {**job.get("files", {}), ".stdin": job.get("stdin", "")}.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    with open(".stdin") as file:
        os.dup2(file.fileno(), 0)
    os.unlink(".stdin")
    if not job["talks"]:
        os.close(CHANNEL)
    for name, value in job["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def run(source: str) -> None:
    """As `python snippet.py` would: the traceback of an error begins in the snippet."""
    module = type(sys)("__main__")
    sys.modules["__main__"], sys.argv, module.__file__ = module, ["snippet.py"], "snippet.py"
    sys.path.insert(0, os.getcwd())
    builtins.exit = builtins.quit = sys.exit  # what `site` adds, which is not loaded
    try:
        exec(compile(source, "snippet.py", "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        sys.__excepthook__(type(error), error.with_traceback(trace and trace.tb_next), None)
        sys.exit(1)


def main(uid: int, channel: int) -> None:
    os.dup2(channel, CHANNEL)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this goes first
    if child := os.fork():
        if not uid:
            set_dumpable(0)  # the snippet has the same user, and must not get at its guard
        reap_until(child)
    if uid:  # from root to a user that nobody else is
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        set_dumpable(1)  # lost by the change of user, and /dev/stdin with it
    os.closerange(CHANNEL + 1, 64)
    os.write(CHANNEL, b"\n")
    job = eval(take(int(take(8))))  # a literal, written by the pool
    prepare(job)
    run(job["code"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
