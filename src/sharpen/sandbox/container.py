"""What a snippet may see and do: the arguments of bubblewrap and the system call filter.

`pool.py` starts every worker with `bwrap_arguments`; `worker.py` adds the filter.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence
from errno import ENOSYS, EPERM
from pathlib import Path

# System calls that a snippet could make without any privilege and does not need: access to other
# processes' memory, namespaces, keys, and memory that no limit counts. Each entry is
# name:number on x86_64:number on aarch64.
_REFUSED_CALLS = """
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272
pidfd_getfd:438:438 mount:165:40 unshare:272:97 setns:308:268 keyctl:250:219 add_key:248:217
request_key:249:218 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425
memfd_create:319:279 memfd_secret:447:447 shmget:29:194 msgget:68:186 semget:64:190 syslog:103:116
name_to_handle_at:303:264 personality:135:92
"""

# Operations of the classic BPF machine that runs seccomp filters.
_LOAD = 0x20  # load 32 bits of the system call's record
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_JUMP_IF_ANY_BIT = 0x45
_RETURN = 0x06

# Verdicts of a filter.
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_FAIL_NOT_PERMITTED = 0x50000 | EPERM
_FAIL_UNKNOWN_CALL = 0x50000 | ENOSYS

# Offsets in the system call's record.
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_FIRST_ARGUMENT_OFFSET = 16

_ARCHITECTURE_X86_64 = 0xC000003E
_ARCHITECTURE_AARCH64 = 0xC00000B7
_X32_BIT = 1 << 30  # marks calls of the x32 interface
_CLONE3 = 435  # on both architectures
_CLONE_NAMESPACE_FLAGS = 0x7E020000

# operation, instructions to skip if true, instructions to skip if false, value
_Instruction = tuple[int, int, int, int]


def bwrap_arguments(paths: Sequence[str], disk_bytes: int, uid: int) -> list[str]:
    """Returns the arguments of bwrap for a container that sees `paths`, read-only.

    Root (`uid` is not 0) keeps the right to become `uid`; others get a user namespace.
    """
    line = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
    line += " --die-with-parent --as-pid-1 --new-session --hostname sandbox --clearenv"
    if uid:
        line += " --cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
    else:
        line += " --unshare-user"
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
    for name, value in snippet_environment("/tmp", paths).items():
        arguments += ["--setenv", name, value]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return arguments


def snippet_environment(home: str, paths: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables of a snippet, the same for all of them.

    Hashes do not vary between runs, and threads do not reserve memory.
    """
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }


def _system_call_filter() -> bytes:
    """Returns a seccomp program that makes dangerous system calls fail.

    The calls of `_REFUSED_CALLS` fail. Sockets can only be Unix sockets: other kinds, such as
    vsock, have no namespace. `clone` makes no namespace. `clone3` is reported as unknown, because a
    filter cannot read its flags; callers then fall back to `clone`.
    """
    arm = platform.machine() == "aarch64"
    architecture = _ARCHITECTURE_AARCH64 if arm else _ARCHITECTURE_X86_64
    socket_call = 198 if arm else 41
    clone_call = 220 if arm else 56

    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _FAIL_NOT_PERMITTED),
        (_JUMP_IF_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL_UNKNOWN_CALL),
    ]
    for entry in _REFUSED_CALLS.split():
        _, number_x86_64, number_aarch64 = entry.split(":")
        number = int(number_aarch64 if arm else number_x86_64)
        program += [
            (_JUMP_IF_EQUAL, 0, 1, number),
            (_RETURN, 0, 0, _FAIL_NOT_PERMITTED),
        ]
    program += [
        (_JUMP_IF_EQUAL, 0, 4, socket_call),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_IF_EQUAL, 0, 1, socket.AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL_NOT_PERMITTED),
        (_JUMP_IF_EQUAL, 0, 3, clone_call),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_IF_ANY_BIT, 0, 1, _CLONE_NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _FAIL_NOT_PERMITTED),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


SYSTEM_CALL_FILTER = _system_call_filter()
