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
