"""Hostile snippets for the sandbox tests, by name.

A snippet that reaches something forbidden prints `GOT …`. None may print that.

Placeholders: `{host}` is a folder of the host that must stay empty, `{secret}` a text that is in
the file `{secret_file}` and in the environment, `{port}` a port on which the host listens,
`{abstract}` and `{unix}` are listening Unix sockets, and `{pid}` is the process of the pool.
`call(n, …)` makes the system call with number n.
"""

from __future__ import annotations

import re

START = """
import ctypes
def got(value):
    print("GOT", value, flush=True)
def call(number, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *args) >= 0:
        got(f"system call {number}")
    print("errno", ctypes.get_errno())
"""

QUICK = r"""
## write_host
open('{host}/x', 'w').write('x'); got('a host file')

## read_secret_file
got(open('{secret_file}').read())

## read_passwd
got(open('/etc/passwd').read())

## read_home
import os; got(os.listdir('/home'))

## symlink_out
import os; os.symlink('{secret_file}', 'link'); got(open('link').read())

## environment
import os
if '{secret}' in str(dict(os.environ)): got('the secret')

## tcp
import socket; socket.create_connection(('127.0.0.1', {port}), 2); got('a connection')

## dns
import socket; got(socket.getaddrinfo('example.com', 80))

## abstract_socket
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\0{abstract}'); got('an abstract socket')

## kill_pool
import os, signal; os.kill({pid}, signal.SIGKILL); got('the pool')

## kill_all
import os, signal; os.kill(-1, signal.SIGKILL)

## fork_bomb
import os
while True:
    os.fork()

## hang
while True: pass

## flood
while True: print('x' * 4096)

## allocate
x = bytearray(8 << 30); got('8 GiB')
"""

FILES = r"""
## write_usr
open('/usr/bin/x', 'w'); got('/usr')

## write_root
open('/x', 'w'); got('/')

## write_dev
open('/dev/x', 'w'); got('/dev')

## write_python
import os; open(os.path.dirname(os.__file__) + '/x.py', 'w'); got('Python')

## replace_python
import os, sys; os.rename(sys.executable, '/tmp/python'); got('Python')

## hard_link
import os; os.link('/usr/bin/env', '/tmp/env'); got('a link to a host file')

## chmod_usr
import os; os.chmod('/usr/bin/env', 0o4777); got('a mode')

## read_shadow
got(open('/etc/shadow').read())

## read_ssh
import glob; found = glob.glob('/root/.ssh/*') + glob.glob('/home/*/.ssh/*')
if found: got(found)

## read_by_proc_root
got(open('/proc/1/root{secret_file}').read())

## read_by_proc_cwd
got(open('/proc/1/cwd/../{secret_file}').read())

## environment_of_guard
text = open('/proc/1/environ').read()
if '{secret}' in text: got(text)

## environment_of_all
import glob
for path in glob.glob('/proc/*/environ'):
    try:
        text = open(path).read()
    except OSError:
        continue
    if '{secret}' in text: got(path)

## command_line_of_pool
got(open('/proc/{pid}/cmdline').read())

## file_descriptors
import os
for file in range(3, 256):
    try:
        got((file, os.fstat(file)))
    except OSError:
        pass

## write_core_pattern
open('/proc/sys/kernel/core_pattern', 'w').write('|/x'); got('kernel')

## write_sysrq
open('/proc/sysrq-trigger', 'w').write('h'); got('sysrq')

## write_oom
open('/proc/1/oom_score_adj', 'w').write('-1000'); got('the guard')

## read_kcore
got(open('/proc/kcore', 'rb').read(16))

## read_disk
got(open('/dev/vda', 'rb').read(16))

## read_memory
got(open('/dev/mem', 'rb').read(16))

## read_kmsg
got(open('/dev/kmsg', 'rb').read(16))

## terminal
open('/dev/tty', 'w').write('x'); got('a terminal')

## mknod
import os, stat; os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))
got(open('disk', 'rb').read(16))

## fill_disk
with open('x', 'wb') as f:
    for _ in range(4096): f.write(bytes(1 << 20))
got('4 GiB of disk')

## fill_disk_with_files
for n in range(64):
    with open(f'x{n}', 'wb') as f: f.write(bytes(8 << 20))
got('512 MiB of disk')

## fill_shared_memory
for n in range(64):
    with open(f'/dev/shm/x{n}', 'wb') as f: f.write(bytes(8 << 20))
got('512 MiB of shared memory')

## sparse_file
import os; os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40); got('1 TiB')

## import_hook
import sys; sys.path += ['/work', '/home', '/root']
import sharpen; got(sharpen)

## make_home
import os; os.makedirs('/root/x'); got('a home')
"""

NETWORK = r"""
## udp
import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(b'x', ('127.0.0.1', {port})); got('udp')

## tcp6
import socket; socket.create_connection(('::1', {port}), 2); got('a connection')

## raw_socket
import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); got('raw')

## packet_socket
import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); got('packet')

## vsock
import socket; s = socket.socket(socket.AF_VSOCK); s.connect((2, 22)); got('vsock')

## netlink
import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); got('netlink')

## bluetooth
import socket; socket.socket(31, socket.SOCK_RAW, 1); got('bluetooth')

## http
import urllib.request; got(urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2))

## unix_socket
import socket
s = socket.socket(socket.AF_UNIX); s.connect('{unix}'); got('unix')

## docker_socket
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('/var/run/docker.sock'); got('docker')

## ping
import subprocess
if not subprocess.run(['ping', '-c1', '127.0.0.1']).returncode: got(1)

## shell_tcp
import subprocess
if not subprocess.run(['bash', '-c', 'echo >/dev/tcp/127.0.0.1/{port}']).returncode: got(1)
"""

PROCESSES = r"""
## kill_guard
import os, signal, time; os.kill(1, signal.SIGKILL); time.sleep(.2); print('still')

## signal_group
import os, signal; os.killpg(0, signal.SIGKILL)

## stop_itself
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)

## ignore_signals
import signal, time
for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)
time.sleep(600)

## daemon
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

## background
import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)

## zombies
import os, time
for _ in range(20):
    if os.fork() == 0: os._exit(0)
time.sleep(.2)

## threads
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(600,)).start()

## hold_output
import os, time
if os.fork() == 0: time.sleep(600)

## ptrace_guard
call(101, 16, 1, 0, 0)

## read_guard_memory
got(open('/proc/1/mem', 'rb').read(1))

## write_guard_memory
import os; f = os.open('/proc/1/mem', os.O_RDWR); got(f)

## process_vm
b = ctypes.create_string_buffer(64); call(310, 1, b, 1, b, 1, 0)

## steal_descriptor
import os; call(438, os.pidfd_open(1), 3, 0)

## priority
import os; os.nice(-10); got('a priority')

## real_time
import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)); got('rt')

## raise_limit
import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); got(1)

## raise_processes
import resource as r; r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6)); got(1)

## become_root
import os; os.setuid(0); got('root')

## sudo
import subprocess
if not subprocess.run(['su', '-c', 'id']).returncode: got('root')

## setuid_file
import os, shutil; shutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o4755)
os.chown('id', 0, 0); got('a setuid file')

## pids_of_host
import os
found = [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 99]
if found: got(found)
"""

KERNEL = r"""
## mount
call(165, b'none', b'/tmp', b'tmpfs', 0, 0)

## unmount
call(166, b'/usr', 2)

## user_namespace
call(272, 0x10000000)

## clone_namespace
call(56, 0x10000011, 0, 0, 0, 0)

## clone3
call(435, ctypes.create_string_buffer(88), 88)

## unshare_program
import subprocess
if not subprocess.run(['unshare', '-Ur', 'id']).returncode: got('a namespace')

## setns
import os; call(308, os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)

## keyring
call(250, 0, -3, 0)

## add_key
call(248, b'user', b'x', b'y', 1, -3)

## bpf
call(321, 0, ctypes.create_string_buffer(128), 128)

## perf
call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)

## userfault
call(323, 1)

## io_uring
call(425, 8, ctypes.create_string_buffer(120))

## memfd
import os; os.memfd_create('x'); got('memory that no limit counts')

## system_v_memory
call(29, 0, 1 << 30, 0o1666)

## message_queue
call(68, 0, 0o1666)

## kernel_log
call(103, 3, ctypes.create_string_buffer(64), 64)

## reboot
call(169, 0xFEE1DEAD, 672274793, 0x1234567, 0)

## load_module
call(175, b'x', 1, b'')

## set_clock
import time; time.clock_settime(time.CLOCK_REALTIME, 0); got('the clock')

## host_name
import socket; socket.sethostname('x'); got('a name')

## chroot
import os; os.mkdir('x'); os.chroot('x'); got('chroot')

## file_handle
b = ctypes.create_string_buffer(200); call(303, -100, b'/usr', b, b, 0)

## old_system_calls
import ctypes, mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(bytes.fromhex('b814000000cd80c3'))
f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
got(f())

## x32_system_calls
call(0x40000000 + 39)
"""

RESOURCES = r"""
## allocate_in_children
import os, time
for _ in range(16):
    if os.fork() == 0:
        x = bytearray(150 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(600)
time.sleep(600)

## allocate_slowly
x = []
while True: x.append(bytearray(1 << 20))

## map_memory
import mmap; m = [mmap.mmap(-1, 1 << 30) for _ in range(64)]; got('64 GiB')

## flood_errors
import sys
while True: sys.stderr.write('x' * 65536)

## flood_slowly
import time
while True:
    print('x' * 60000, flush=True); time.sleep(.001)

## close_output_and_hang
import os, time; os.close(1); os.close(2); time.sleep(600)

## big_integer
9 ** 9 ** 9

## regex_bomb
import re; re.match('(a+)+$', 'a' * 64 + 'b')

## compress_bomb
import zlib
d = zlib.decompressobj()
x = zlib.compress(bytes(1 << 24))
y = b''.join(zlib.decompress(x) for _ in range(1000)); got('16 GiB')

## recursion
import sys
sys.setrecursionlimit(10**9)
def f(): f()
f()

## nested_source
compile('(' * 100000 + ')' * 100000, 'x', 'eval')

## crash
import ctypes; ctypes.string_at(0)

## abort
import os; os.abort()

## core_dump
import resource, os
try: resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
except (ValueError, OSError): pass
else: got('core dumps')
os.abort()

## unpickle
import pickle
got(pickle.loads(b"cbuiltins\nopen\n(S'{secret_file}'\ntR.").read())

## inode_bomb
import os
n = 0
while True:
    open(str(n), 'w').close(); n += 1

## deep_directories
import os
while True: os.mkdir('d'); os.chdir('d')

## file_bomb
x = []
while True: x.append(open('/dev/null'))

## exit_hook
import atexit, time; atexit.register(time.sleep, 600)

## finaliser
import time
class A:
    def __del__(self): time.sleep(600)
a = A()

## thread_at_exit
import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()

## bad_output
import os; os.write(1, bytes(range(256)) * 100)

## fake_exit_code
import os
for n in range(3, 64):
    try: os.write(n, b'0\n')
    except OSError: pass
os._exit(7)
"""


def split_by_name(text: str) -> dict[str, str]:
    """Cut a text at its `## name` lines; returns the snippets by name."""
    parts = re.split(r"(?m)^## (\w+)\n", text)
    names = parts[1::2]
    snippets = parts[2::2]
    return dict(zip(names, snippets, strict=True))


ALL = split_by_name(QUICK + FILES + NETWORK + PROCESSES + KERNEL + RESOURCES)


def source(name: str, **places: object) -> str:
    """Returns the program of a snippet, with its placeholders filled in."""
    body = ALL[name]
    for place, value in places.items():
        body = body.replace(f"{{{place}}}", str(value))
    return START + body
