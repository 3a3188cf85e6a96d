"""Programs that nobody should have to run, each told to say so when it got through."""

ENDLESS = "while True:\n    pass\n"

MEMORY = "block = bytearray(10 * 2**30)\nprint('GOT IT')\n"

# forks that leave their session, and keep forking
FORK_BOMB = """
import os, time
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
"""

# what the limit of one process does not stop
SHARED_MEMORY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(150 * 2**20)
        for place in range(0, len(block), 4096):
            block[place] = 1
        time.sleep(30)
time.sleep(30)
"""

WRITE = """
import os, sys
for path in sys.stdin.read().split():
    try:
        with open(path, "w") as file:
            file.write("x")
        print("WROTE", path)
    except OSError:
        pass
    try:
        os.symlink(path, "link")
        with open("link", "w") as file:
            file.write("x")
        print("WROTE THROUGH A LINK", path)
    except OSError:
        pass
    try:
        os.unlink("link")
    except OSError:
        pass
    try:
        os.remove(path)
        print("REMOVED", path)
    except OSError:
        pass
open("mine", "w").write("mine")
print(open("mine").read())
"""

NETWORK = """
import socket, sys
port = int(sys.stdin.read())
try:
    socket.create_connection(("127.0.0.1", port), timeout=2).sendall(b"hello")
    print("CONNECTED")
except OSError as error:
    print("refused")
try:
    socket.getaddrinfo("example.com", 80)
    print("RESOLVED")
except OSError:
    print("refused")
"""

# past the interpreter, by the C library
NATIVE = """
import ctypes, sys
path, port = sys.stdin.read().split()
libc = ctypes.CDLL(None, use_errno=True)
file = libc.open(path.encode(), 0o2 | 0o100, 0o666)
print("OPENED" if file >= 0 else "refused")
handle = libc.socket(2, 1, 0)
address = (2).to_bytes(2, "little") + int(port).to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
print("CONNECTED" if handle >= 0 and libc.connect(handle, address, 16) == 0 else "refused")
print("UNSHARED" if libc.unshare(0x10000000) == 0 else "refused")
print("MOUNTED" if libc.mount(b"none", b"/", b"tmpfs", 0, None) == 0 else "refused")
print("BECAME ROOT" if libc.setuid(0) == 0 and libc.open(b"/etc/shadow", 2) >= 0 else "refused")
"""

KILL = """
import os, signal, sys
for pid in map(int, sys.stdin.read().split()):
    try:
        os.kill(pid, signal.SIGTERM)
        print("SIGNALLED")
    except OSError:
        print("refused")
"""

# --- programs that try to spoil the next one --------------------------------------------------------------------------
# their input: the process id of the trainer, a directory with a file "victim" that is not theirs, a port that listens

_START = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, subprocess, sys, threading, time
trainer, outside, port = input().split()
trainer, port, victim = int(trainer), int(port), outside + "/victim"

def attempt(action, *arguments, **named):
    try:
        return action(*arguments, **named)
    except (OSError, ValueError, MemoryError, RuntimeError, AttributeError, ImportError, subprocess.SubprocessError):
        return None

def native(name, *arguments):
    return getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)

def syscall(number, *arguments):
    return native("syscall", ctypes.c_long(number), *arguments)

def fork():
    try:
        return os.fork()
    except OSError:
        return -1
"""

FOLDER = {
    "mode_of_the_folder": "os.chmod('.', 0)",
    "mode_by_the_c_library": "native('chmod', os.getcwd().encode(), 0)",
    "mode_by_descriptor": "os.fchmod(os.open('.', os.O_RDONLY), 0)",
    "mode_through_proc": "attempt(os.chmod, '/proc/self/cwd', 0)",
    "modes_of_everything": """
for root in ("a", "a/b", "a/b/c"):
    os.mkdir(root)
    open(root + "/file", "w").write("x")
for root in ("a/b/c/file", "a/b/c", "a/b/file", "a/b", "a", "main.py", "."):
    os.chmod(root, 0)
""",
    "made_without_modes": """
os.mkdir("closed", 0)
os.close(os.open("file", os.O_CREAT, 0))
os.umask(0o777)
os.mkdir("also")
os.mkdir("also2")
""",
    "nested_10000_deep": """
for _ in range(10000):
    os.mkdir("d" * 20)
    os.chdir("d" * 20)
""",
    "nested_and_closed": """
for _ in range(90):
    os.mkdir("d")
    os.chdir("d")
for _ in range(90):
    os.chdir("..")
    os.chmod("d", 0)
""",
    "odd_names": r"""
for name in (b"\n", b"\xff\xfe", b" ", b"-rf", b"*", b"a" * 255, b"'\"", "\u2028".encode(), b"\x01\x1b[2J", b"run-1"):
    os.mkdir(b"d" + name[:254])
    open(os.path.join(b"d" + name[:254], name), "w").write("x")
""",
    "files_without_end": """
for number in range(10**6):
    open(str(number), "w").close()
""",
    "hard_links_without_end": """
open("a", "w").write("x")
for number in range(10**6):
    attempt(os.link, "a", str(number)) or None
""",
    "hard_link_to_others": "attempt(os.link, victim, 'mine'); attempt(os.truncate, 'mine', 0)",
    "links_in_place_of_files": """
for name, target in (("x", "/"), ("y", outside), ("z", victim), ("loop", "loop"), ("up", "..")):
    os.symlink(target, name)
os.remove("main.py")
os.symlink(victim, "main.py")
attempt(os.chmod, "z", 0)
attempt(os.truncate, "main.py", 0)
""",
    "links_that_change": """
os.mkdir("d")
end = time.monotonic() + 1
while time.monotonic() < end:
    os.rename("d", "e")
    os.symlink("/", "d")
    os.unlink("d")
    os.rename("e", "d")
""",
    "folder_renamed": """
here = os.getcwd()
for target in ("/tmp/verl-hostile", os.path.dirname(here) + "/verl-hostile", outside + "/verl-hostile", here + "/x"):
    attempt(os.rename, here, target)
    attempt(native, "rename", here.encode(), target.encode())
""",
    "folder_removed": """
import shutil
here = os.getcwd()
shutil.rmtree(here, ignore_errors=True)
attempt(os.rmdir, here)
attempt(native, "rmdir", here.encode())
""",
    "folders_around": """
for path in ("..", "../..", "/", "/tmp", outside, os.path.dirname(sys.executable)):
    attempt(os.chmod, path, 0)
    attempt(os.listdir, path)
    attempt(open, path + "/verl-hostile", "w")
    attempt(os.mkdir, path + "/verl-hostile")
""",
    "mounts": """
attempt(native, "mount", b"none", b".", b"tmpfs", 0, None)
attempt(native, "mount", b"/", b".", None, 4096, None)
attempt(native, "mount", b"none", b"/proc", b"proc", 0, None)
attempt(native, "umount2", os.getcwd().encode(), 2)
""",
    "attributes": """
attempt(os.setxattr, ".", "user.x", b"1")
attempt(os.setxattr, "main.py", "system.posix_acl_access", b"\\2\\0\\0\\0" + b"\\1\\0\\0\\0\\xff\\xff\\xff\\xff")
handle = os.open(".", os.O_RDONLY)
attempt(fcntl.ioctl, handle, 0x40086602, (0x30).to_bytes(8, "little"))
attempt(fcntl.ioctl, os.open("main.py", os.O_RDWR), 0x40086602, (0x30).to_bytes(8, "little"))
""",
    "named_pipes": """
os.remove("main.py")
attempt(lambda: os.mkfifo("main.py"))
attempt(lambda: os.mkfifo(outside + "/verl-hostile"))
attempt(lambda: os.mknod("/tmp/verl-hostile", 0o10644))
""",
    "locks": """
for path in (".", "..", "main.py", victim):
    handle = attempt(os.open, path, os.O_RDONLY)
    if handle is not None:
        attempt(fcntl.flock, handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.read(0, 1)
time.sleep(60)
""",
    "open_files_of_an_orphan": """
for number in range(20):
    open("f", "w").write("x" * 1000)
    os.open("f", os.O_RDWR)
    os.unlink("f")
if fork() == 0:
    os.setsid()
    if fork() == 0:
        while True:
            time.sleep(0.1)
            attempt(os.mkdir, "again")
""",
    "full_folder": """
for number in range(1000):
    with open(str(number), "wb") as file:
        file.write(bytes(15 << 20))
""",
    "full_of_unlinked_files": """
kept = []
for number in range(100):
    file = open("x", "wb", buffering=0)
    os.unlink("x")
    kept.append(file)
    file.write(bytes(15 << 20))
time.sleep(60)
""",
    "unlinked_and_mapped": """
kept = []
for number in range(100):
    with open("x", "w+b", buffering=0) as file:
        os.unlink("x")
        file.write(bytes(15 << 20))
        kept.append(mmap.mmap(file.fileno(), 0))
        if len(kept) % 10 == 0 and fork() == 0:
            kept.clear()
time.sleep(60)
""",
    "sparse_file": "attempt(os.truncate, os.open('x', os.O_CREAT | os.O_RDWR), 2**45)",
    "database_elsewhere": """
import sqlite3
for path in (outside + "/verl-hostile", "/tmp/verl-hostile", "/dev/shm/verl-hostile"):
    attempt(lambda: sqlite3.connect(path).execute("create table t (x)"))
""",
}

HELD = {
    "memfd": """
kept = []
while True:
    handle = os.memfd_create("x")
    kept.append(handle)
    for _ in range(15):
        os.write(handle, bytes(1 << 20))
""",
    "memfd_by_the_c_library": """
numbers = {"x86_64": 319, "aarch64": 279}
while (handle := syscall(numbers[os.uname().machine], b"x", 0)) >= 0:
    os.write(handle, bytes(15 << 20))
sys.exit(1)
""",
    "secret_memory": "print('GOT IT' if syscall(447, 0) >= 0 else 'refused')",
    "file_in_shared_memory": """
for number in range(100):
    attempt(lambda: open(f"/dev/shm/verl-hostile-{number}", "wb").write(bytes(15 << 20)))
""",
    "shared_memory_by_name": """
from multiprocessing import shared_memory
kept = [shared_memory.SharedMemory(f"verl-hostile-{number}", create=True, size=1 << 20) for number in range(8)]
os._exit(1)
""",
    "semaphores_by_name": """
import _multiprocessing
for number in range(8):
    _multiprocessing.SemLock(1, 1, 1, f"/verl-hostile-{number}", False)
os._exit(1)
""",
    "system_v_memory": "print('GOT IT' if native('shmget', 0, 1 << 26, 0o1600) >= 0 else 'refused')",
    "system_v_queues": "print(native('msgget', 0, 0o1600), native('semget', 0, 9, 0o1600))",
    "message_queue": "print('GOT IT' if native('mq_open', b'/verl-hostile', 0o102, 0o600, None) >= 0 else 'refused')",
    "keyring": "print(syscall(248, b'user', b'verl-hostile', b'x' * 9999, 9999, -3))",
    "pipes": """
for _ in range(6):
    fork()
while True:
    for end in attempt(os.pipe) or (time.sleep(0.1),):
        if end:
            os.set_blocking(end, False)
            while attempt(os.write, end, bytes(1 << 16)):
                pass
""",
    "large_pipes": """
kept = []
for _ in range(60):
    kept.append(os.pipe())
    fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
""",
    "pages_in_pipes": """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
for _ in range(50):
    block = ctypes.create_string_buffer(b"x" * (1 << 16))
    vector = Vector(ctypes.addressof(block), 1 << 16)
    if libc.vmsplice(os.pipe()[1], ctypes.byref(vector), 1, 0) < 0:
        sys.exit("refused")
""",
    "sockets": """
for _ in range(5):
    fork()
kept = []
while True:
    pair = attempt(socket.socketpair)
    if pair is None:
        time.sleep(0.1)
        continue
    kept.append(pair)
    for end in pair:
        end.setblocking(False)
        attempt(end.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        while attempt(end.send, bytes(1 << 16)):
            pass
""",
    "files_in_messages": """
left, right = socket.socketpair()
for number in range(100):
    with open("x", "wb", buffering=0) as file:
        os.unlink("x")
        file.write(bytes(15 << 20))
        socket.send_fds(left, [b"x"], [file.fileno()])
""",
    "anonymous_shared_memory": """
kept = []
for _ in range(100):
    kept.append(mmap.mmap(-1, 50 << 20))
    kept[-1].write(bytes(50 << 20))
""",
    "each_within_its_limit": SHARED_MEMORY,
    "ten_gigabytes": MEMORY,
    "memory_errors_ignored": """
kept = []
while True:
    try:
        kept.append(bytearray(1 << 20))
    except MemoryError:
        pass
""",
    "stacks": """
threading.stack_size(64 << 20)
while attempt(threading.Thread(target=time.sleep, args=(60,), daemon=True).start) is None:
    if threading.active_count() > 1000:
        break
""",
    "spoken_to_by_temporary_files": """
import tempfile
kept = []
while True:
    kept.append(tempfile.TemporaryFile())
    kept[-1].write(bytes(15 << 20))
""",
    "own_input": """
while os.write(0, bytes(1 << 20)):
    pass
""",
}

PROCESSES = {
    "endless": ENDLESS,
    "fork_bomb": FORK_BOMB,
    "thread_bomb": """
while True:
    attempt(threading.Thread(target=time.sleep, args=(60,)).start)
""",
    "daemon": """
if fork() == 0:
    os.setsid()
    for number in range(1, 64):
        attempt(signal.signal, number, signal.SIG_IGN)
    if fork() == 0:
        os.closerange(0, 100)
        time.sleep(600)
""",
    "held_output": """
if fork() == 0:
    time.sleep(600)
os._exit(0)
""",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "stopped_group": "fork(); os.kill(0, signal.SIGSTOP); time.sleep(60)",
    "kills_itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "kills_its_parent": "attempt(os.kill, os.getppid(), signal.SIGKILL); attempt(native, 'kill', os.getppid(), 9)",
    "kills_the_trainer": "attempt(os.kill, trainer, signal.SIGKILL); attempt(native, 'kill', trainer, 9)",
    "kills_everything": "attempt(os.kill, -1, signal.SIGKILL); attempt(native, 'kill', -1, 9)",
    "kills_by_other_calls": """
attempt(native, "syscall", 234, trainer, trainer, 9)
attempt(native, "sigqueue", trainer, 9, 0)
handle = attempt(os.pidfd_open, trainer)
if handle is not None:
    attempt(signal.pidfd_send_signal, handle, signal.SIGKILL)
""",
    "traces_its_parent": "for pid in (os.getppid(), trainer): attempt(native, 'ptrace', 16, pid, None, None)",
    "reads_other_processes": """
for pid in (trainer, os.getppid(), 1):
    for name in ("environ", "mem", "maps", "fd/0", "root/etc/shadow"):
        attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(64))
    attempt(lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000"))
    attempt(lambda: open(f"/proc/{pid}/mem", "r+b").write(b"x"))
""",
    "limits_of_others": """
for pid in (trainer, os.getppid()):
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        attempt(resource.prlimit, pid, kind, (1, 1))
        attempt(native, "prlimit", pid, int(kind), (ctypes.c_ulong * 2)(1, 1), None)
""",
    "priority_of_others": """
for pid in (trainer, os.getppid()):
    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(os.sched_setaffinity, pid, {0})
    attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
    attempt(native, "syscall", 251, 1, pid, 3 << 13)
""",
    "reaps_its_own": """
attempt(native, "prctl", 36, 1, 0, 0, 0)
for _ in range(4):
    if fork() == 0:
        if fork() == 0:
            time.sleep(600)
        os._exit(0)
time.sleep(60)
""",
    "hides_from_looks": "attempt(native, 'prctl', 4, 0, 0, 0, 0); kept = [bytearray(1 << 20)]; time.sleep(60)",
    "ignores_the_cpu_limit": "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "raises_its_limits": """
for kind in range(16):
    attempt(resource.setrlimit, kind, (-1, -1))
while True:
    pass
""",
    "aborts": "os.abort()",
    "crashes": "ctypes.string_at(0)",
    "leaves_namespaces": "attempt(native, 'unshare', 0x10000000 | 0x20000); attempt(native, 'setns', 0, 0)",
    "becomes_root": "attempt(os.setuid, 0); attempt(native, 'setresuid', 0, 0, 0); attempt(os.chown, '.', 0, 0)",
    "rings": "syscall(425, 8, ctypes.create_string_buffer(120)); syscall(321, 0, None, 0); syscall(323, 0)",
    "connects": NETWORK.replace("sys.stdin.read()", "str(port)"),
}

STREAMS = {
    "output_without_end": "while True:\n    print('x' * 1000)",
    "errors_without_end": "while True:\n    print('x' * 1000, file=sys.stderr)",
    "closed_streams": "os.closerange(0, 100); time.sleep(60)",
    "bytes_that_are_no_text": "os.write(1, bytes(range(256)) * 100)",
    "streams_of_other_kinds": """
for number in (0, 1, 2):
    attempt(os.set_blocking, number, False)
    attempt(os.ftruncate, number, 1 << 40)
    attempt(fcntl.fcntl, number, fcntl.F_SETOWN, trainer)
    attempt(fcntl.fcntl, number, 1031, 4096)
""",
    "surrogates": "print('\ud83d')",
    "null_bytes": "print('\0')",
    "nested_source": "x = " + "(" * 50_000 + ")" * 50_000,
    "large_source": "x = '" + "y" * 2_000_000 + "'",
    "fences": "print('''```''')",
}

PROGRAMS = {name: _START + source for group in (FOLDER, HELD, PROCESSES, STREAMS) for name, source in group.items()}
"""Programs by name; none prints the right answer."""

REPRESENTATIVE = (
    "mode_of_the_folder", "nested_10000_deep", "odd_names", "files_without_end", "folder_removed", "full_folder",
    "memfd", "memfd_by_the_c_library", "shared_memory_by_name", "sockets", "daemon", "limits_of_others",
    "hides_from_looks", "surrogates",
)  # fmt: skip
"""Names of those that every run of the tests tries; the others are for slow runs."""
