"""Hostile programs are stopped by the means of each kernel, as root and as another user, while others are scored."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rewards import hostile
from verl.errors import ConfigError, RewardError
from verl.rewards import code
from verl.rewards.outcome import OutcomeKind
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.pool import SandboxPool
from verl.rewards.sandbox.spec import Isolation, Limits, ProgramResult, Status
from verl.rewards.scoring import call_function

LIMITS = Limits(cpu_s=1, wall_s=2.5, memory_mb=400, file_mb=4, folder_mb=8, processes=8, output_kb=64)
PYTHON = [sys.executable, "-I"]
ROOT = Path(__file__).parents[2]
SQUARE = {"inputs": ["2\n"], "outputs": ["4"]}


@pytest.fixture(scope="module", params=list(Isolation), ids=str)
def box(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    try:
        with LocalSandbox(LIMITS, request.param.value) as sandbox:
            yield sandbox
    except ConfigError as error:
        pytest.skip(f"this kernel: {error}")


def run(box: LocalSandbox, source: str, stdin: str = "") -> ProgramResult:
    return box.run([*PYTHON, "main.py"], files={"main.py": source}, stdin=stdin)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_input_and_output(box: LocalSandbox) -> None:
    result = run(box, "import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)\nsys.exit(3)\n", "héllo\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (Status.ERROR, 3, "olléh\n", "oops\n")
    assert run(box, "print('x' * 70000)").status is Status.OUTPUT
    assert run(box, "print('x' * 60000)").stdout == "x" * 60000 + "\n"
    assert run(box, "import os; os.abort()").exit_code == -6


def test_endless_loop(box: LocalSandbox) -> None:
    started = time.monotonic()
    assert run(box, hostile.ENDLESS).status is Status.TIMEOUT
    assert run(box, "import time; time.sleep(60)").status is Status.TIMEOUT
    assert time.monotonic() - started < 15


def test_allocation_of_10_gb(box: LocalSandbox) -> None:
    result = run(box, hostile.MEMORY)
    assert result.status is Status.MEMORY
    assert result.stdout == ""


def test_fork_bomb(box: LocalSandbox) -> None:
    name = f"bomb-{secrets.token_hex(6)}.py"
    most = 0
    done = threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, len(processes_with(name)))

    counter = threading.Thread(target=count)
    counter.start()
    started = time.monotonic()
    result = box.run([*PYTHON, name], files={name: hostile.FORK_BOMB})
    done.set()
    counter.join()
    assert result.status in (Status.TIMEOUT, Status.ERROR)
    assert time.monotonic() - started < 10
    # the sandbox's own processes do not have the program's name; the guard lets it have no child at all
    assert most <= LIMITS.processes
    assert processes_with(name) == []
    assert run(box, "print(1)").stdout == "1\n"


def test_memory_of_all_processes_together(box: LocalSandbox) -> None:
    if box.isolation is Isolation.GUARD:
        pytest.skip("the guard lets a program have no other process")
    started = time.monotonic()
    assert run(box, hostile.SHARED_MEMORY).status is Status.MEMORY
    assert time.monotonic() - started < 4


def test_writing_outside_the_folder(box: LocalSandbox, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    os.chmod(victim, 0o666)
    home = Path.home() / f"verl-test-{secrets.token_hex(4)}"
    targets = [
        victim,
        tmp_path / "new",
        home,
        Path("/usr/verl-test"),
        Path("/etc/verl-test"),
        Path("/dev/shm/verl-test"),
    ]
    result = run(box, hostile.WRITE, "\n".join(map(str, targets)))
    assert result.stdout == "mine\n"
    assert victim.read_text() == "untouched"
    assert not any(target.exists() for target in targets[1:])


def test_every_program_starts_in_an_empty_folder(box: LocalSandbox) -> None:
    assert run(box, "open('left-over', 'w').write('x')").ok
    assert run(box, "import os; print(sorted(os.listdir('.')))").stdout == "['main.py']\n"


def test_file_sizes(box: LocalSandbox) -> None:
    result = run(box, "with open('big', 'wb') as f:\n    f.write(bytes(6 << 20))\nprint('WROTE')")
    assert result.status is Status.ERROR
    assert "WROTE" not in result.stdout
    if box.isolation is Isolation.NAMESPACES:
        many = "for i in range(4):\n    open(f'f{i}', 'wb').write(bytes(3 << 20))\nprint('WROTE')"
        assert "No space left" in run(box, many).stderr


def test_network_call(box: LocalSandbox, listener: socket.socket) -> None:
    result = run(box, hostile.NETWORK, str(listener.getsockname()[1]))
    assert result.stdout in ("refused\nrefused\n", "refused\n", "")
    with pytest.raises(TimeoutError):
        listener.accept()


def test_calls_past_the_interpreter(box: LocalSandbox, listener: socket.socket, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    port = listener.getsockname()[1]
    result = run(box, hostile.NATIVE, f"{tmp_path / 'native'} {port}")
    if box.isolation is Isolation.GUARD:  # it refuses the C library as a whole, which is all that it can do
        assert "PermissionError" in result.stderr
    else:
        assert result.stdout == "refused\n" * 5
    assert not (tmp_path / "native").exists()
    with pytest.raises(TimeoutError):
        listener.accept()


def test_signals_to_other_processes(box: LocalSandbox) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            result = run(box, hostile.KILL, f"{other.pid} {os.getpid()} {os.getppid()}")
            assert "SIGNALLED" not in result.stdout
            assert other.poll() is None
        finally:
            other.kill()


def test_environment_and_files_of_the_machine_are_hidden(box: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(box, "import os; print(sorted(k for k in os.environ if 'TOKEN' in k), os.getppid() < 2)")
    assert result.stdout.startswith("[]")
    if box.isolation is not Isolation.GUARD:
        secret = Path(__file__)
        assert run(box, f"print(open({str(secret)!r}).read())").status is Status.ERROR


def test_libraries_of_this_python_can_be_used(box: LocalSandbox) -> None:
    assert run(box, "import numpy, json; print(numpy.arange(4).sum())").stdout == "6\n"


def test_good_programs_are_scored_while_hostile_ones_run() -> None:
    tests = {"inputs": ["2\n"], "outputs": ["4"]}
    good = "```python\nprint(int(input()) ** 2)\n```"
    bad = [hostile.ENDLESS, hostile.MEMORY, hostile.FORK_BOMB, hostile.NETWORK.replace("sys.stdin.read()", "'9'")]
    verdicts: dict[str, str] = {}

    def score(key: str, text: str) -> None:
        options = {"timeout_s": 2.0, "memory_limit_mb": 400, "max_concurrent": 6}
        verdicts[key] = code.compute_score(text, tests, **options)["code_status"]

    started = time.monotonic()
    threads = [threading.Thread(target=score, args=(f"bad {i}", f"```python\n{b}\n```")) for i, b in enumerate(bad)]
    threads += [threading.Thread(target=score, args=(f"good {i}", good)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - started < 45
    assert [verdicts[f"good {i}"] for i in range(8)] == ["passed"] * 8
    assert verdicts["bad 0"] == "timeout"
    assert verdicts["bad 1"] == "memory"
    assert verdicts["bad 2"] in ("timeout", "error", "wrong")
    assert verdicts["bad 3"] == "wrong"


def test_pool_keeps_sandboxes_and_drops_failed_ones() -> None:
    pool = SandboxPool(size=1)
    try:
        with pool.lend() as first:
            assert first.run([*PYTHON, "-c", "print(1)"]).stdout == "1\n"
        with pool.lend() as second:
            assert second is first
        with pytest.raises(KeyError), pool.lend():
            raise KeyError
        with pool.lend() as third:
            assert third is not first
            assert third.run([*PYTHON, "-c", "print(2)"]).stdout == "2\n"
    finally:
        pool.close()


def test_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LocalSandbox(LIMITS) as sandbox:
        assert run(sandbox, "open('a', 'w').write('x')").ok
    assert list(tmp_path.iterdir()) == []


CONTROLLER = """
import sys
import tempfile
sys.path.insert(0, sys.argv[1])
from verl.rewards.outcome import OutcomeKind
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.spec import Limits
with LocalSandbox(Limits(wall_s=3.0), sys.argv[3]) as box:
    print("ready", flush=True)
    box.run([sys.executable, "-I", sys.argv[2]], files={sys.argv[2]: "import time; time.sleep(60)"})
"""


def test_nothing_outlives_a_controller_that_is_killed(box: LocalSandbox, tmp_path: Path) -> None:
    name = f"orphan-{secrets.token_hex(6)}.py"
    arguments = [sys.executable, "-c", CONTROLLER, str(ROOT), name, str(box.isolation)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    os.chmod(tmp_path, 0o711)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while len(processes_with(name)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)  # the controller has the name in its arguments too
        controller.kill()
    deadline = time.monotonic() + 10
    while (processes_with(name) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(name) == []
    assert list(tmp_path.iterdir()) == []


def test_isolation_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="choose one of auto, namespaces, landlock, guard"):
        LocalSandbox(isolation="jail")


AS_ANOTHER_USER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from verl.errors import ConfigError, RewardError
from verl.rewards.outcome import OutcomeKind
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.spec import Limits
from tests.rewards import hostile
limits = Limits(cpu_s=1, wall_s=2.5, memory_mb=400, processes=8)
try:
    with LocalSandbox(limits, sys.argv[2]) as box:
        def run(source, stdin=""):
            result = box.run([sys.executable, "-I", "main.py"], files={"main.py": source}, stdin=stdin)
            return [result.status, result.stdout]
        print(json.dumps({
            "good": run("print(input())", "hi"),
            "loop": run(hostile.ENDLESS),
            "memory": run(hostile.MEMORY),
            "bomb": run(hostile.FORK_BOMB),
            "write": run(hostile.WRITE, sys.argv[3]),
            "network": run(hostile.NETWORK, sys.argv[4]),
            "kill": run(hostile.KILL, sys.argv[5]),
        }))
except ConfigError as error:
    print(json.dumps({"not here": str(error)}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="starts programs as another user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs an interpreter that every user may read")
@pytest.mark.parametrize("isolation", ["namespaces", "landlock", "guard"])
def test_as_another_user_than_root(isolation: str, listener: socket.socket, tmp_path: Path) -> None:
    target = Path(f"/var/tmp/verl-test-{secrets.token_hex(4)}")
    with subprocess.Popen(["sleep", "60"], user=54321, group=54321, extra_groups=[]) as other:
        try:
            done = subprocess.run(
                ["/usr/bin/python3", "-c", AS_ANOTHER_USER, str(ROOT), isolation, str(target),
                 str(listener.getsockname()[1]), str(other.pid)],
                user=54321, group=54321, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=100,
                env={"PATH": "/usr/bin:/bin"},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            results = json.loads(done.stdout)
            if "not here" in results:
                pytest.skip(results["not here"])
            assert results["good"] == ["ok", "hi\n"]
            assert results["loop"][0] == "timeout"
            assert results["memory"] == ["memory", ""]
            assert results["bomb"][0] in ("timeout", "error")
            assert results["write"] == ["ok", "mine\n"]
            assert not target.exists()
            assert "CONNECTED" not in results["network"][1]
            assert "SIGNALLED" not in results["kill"][1]
            assert other.poll() is None
        finally:
            other.kill()
    with pytest.raises(TimeoutError):
        listener.accept()


# --- folders, and failures of the sandbox itself ----------------------------------------------------------------------


def build_resisting_tree(root: Path) -> None:
    deep = os.open(root, os.O_RDONLY)
    for _ in range(10_000):
        os.mkdir("d" * 100, dir_fd=deep)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    for name in (b"\xff\xfe", b"\n", b"-rf"):
        os.mkdir(os.path.join(os.fsencode(root), name), 0)
    (root / "link").symlink_to("/usr")
    os.mkfifo(root / "pipe")
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    for path in (inner, inner.parent, root):
        path.chmod(0)


@pytest.mark.parametrize("user", [None, 54321])
def test_any_tree_is_removed(user: int | None, tmp_path: Path) -> None:
    from verl.rewards.sandbox.folders import remove_tree

    if user is None:
        build_resisting_tree(tmp_path)
        assert remove_tree(str(tmp_path))
        assert not tmp_path.exists()
        assert Path("/usr/bin").is_dir()
        return
    if os.geteuid() != 0:
        pytest.skip("starts a program as another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chmod(tmp_path, 0o777)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            root = Path(tempfile.mkdtemp(dir="/var/tmp"))
            build_resisting_tree(root)
            os.write(writer, f"{remove_tree(str(root))} {root.exists()}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"True False"
    os.close(reader)


def test_usage_is_bounded(tmp_path: Path) -> None:
    from verl.rewards.sandbox.folders import usage

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(8192))
    assert usage(str(tmp_path), 10) == (8192, 2)
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert usage(str(tmp_path), 10)[1] == 11
    place = tmp_path / "deep"
    for _ in range(120):
        place.mkdir()
        place = place / "d"
    assert usage(str(tmp_path / "deep"), 1000)[1] == 1001


def test_memory_that_no_limit_counts_is_refused(box: LocalSandbox) -> None:
    result = run(box, hostile.PROGRAMS["memfd"], "1 / 1")
    assert result.status is Status.ERROR
    assert "Function not implemented" in result.stderr


def test_shared_memory_of_a_program_counts_once(box: LocalSandbox) -> None:
    if box.isolation is Isolation.GUARD:
        pytest.skip("the guard lets a program have no other process")
    source = """
import mmap, os, time
block = mmap.mmap(-1, 100 << 20)
block.write(bytes(100 << 20))
for _ in range(4):
    if os.fork() == 0:
        assert sum(block[::4096]) == 0
        time.sleep(0.5)
        os._exit(0)
for _ in range(4):
    os.wait()
print("done")
"""
    assert run(box, source).stdout == "done\n"


def test_files_that_are_kept(box: LocalSandbox) -> None:
    if box.isolation is Isolation.GUARD:
        pytest.skip("only Python programs")
    make = "import os, shutil; shutil.copy('/bin/echo', 'main'); os.symlink('/etc/passwd', 'link'); os.mkdir('folder')"
    names = ["main", "link", "folder", "absent"]
    assert box.run([*PYTHON, "make.py"], files={"make.py": make}, keep=names).ok
    for _ in range(2):
        assert box.run(["./main", "hi"], use_kept=True).stdout == "hi\n"
        # what one run does to its files is no matter of the next
        spoil = "import os; print(sorted(os.listdir('.'))); os.remove('main'); os.chmod('.', 0)"
        result = box.run([*PYTHON, "spoil.py"], files={"spoil.py": spoil}, use_kept=True)
        assert result.stdout == "['main', 'spoil.py']\n"
    assert box.run(["./main"]).status is Status.ERROR  # not kept: the program's own fault, and no failure


def test_a_program_that_cannot_be_started_is_a_failure_of_the_sandbox(box: LocalSandbox) -> None:
    if box.isolation is Isolation.GUARD:
        pytest.skip("only Python programs")
    with pytest.raises(RewardError, match=r"could not be started: not executed: FileNotFoundError"):
        box.run(["no-such-compiler", "x.c"])
    assert run(box, "print(1)").stdout == "1\n"


def wait_until_gone(name: str, place: Path) -> None:
    deadline = time.monotonic() + 10
    while (processes_with(name) or list(place.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(name) == []
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("victim", ["launcher", "supervisor", "both"])
@pytest.mark.parametrize("isolation", list(Isolation), ids=str)
def test_a_sandbox_that_is_killed_is_an_error_and_leaves_nothing(
    isolation: Isolation, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if victim == "both" and isolation is not Isolation.NAMESPACES:
        pytest.skip("somebody has to be left to clean up")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    name = f"victim-{secrets.token_hex(6)}.py"
    try:
        sandbox = LocalSandbox(Limits(wall_s=20.0), str(isolation))
    except ConfigError as error:
        pytest.skip(f"this kernel: {error}")
    raised: list[BaseException] = []

    def use() -> None:
        try:
            fork = "" if isolation is Isolation.GUARD else "import os; os.fork()\n"
            sandbox.run([*PYTHON, name], files={name: f"{fork}import time; time.sleep(60)"})
        except RewardError as error:
            raised.append(error)

    user = threading.Thread(target=use)
    user.start()
    deadline = time.monotonic() + 20
    while len(processes_with(name)) < (1 if isolation is Isolation.GUARD else 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher = sandbox._process.pid
    below = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in {"launcher": [launcher], "supervisor": below, "both": [launcher, *below]}[victim]:
        os.kill(int(pid), 9)
    user.join(15)
    assert [type(error) for error in raised] == [RewardError]
    assert "the sandbox gave no answer" in str(raised[0])
    sandbox.close()
    wait_until_gone(name, tmp_path)


def test_folders_without_an_owner_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.rewards.sandbox import folders

    monkeypatch.setattr(folders, "_STALE_S", -1.0)
    for name in ("verl-sandbox-dead", "verl-sandbox-live", "other"):
        (tmp_path / name / "run-1").mkdir(parents=True)
    held = folders.hold(str(tmp_path / "verl-sandbox-live"))
    folders.remove_stale(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "verl-sandbox-live"]
    os.close(held)
    folders.remove_stale(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_sandbox_without_a_place_is_an_error_and_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    outcome = call_function(code.compute_score, {"solution_str": "```python\nprint(4)\n```", "ground_truth": SQUARE})
    assert outcome.kind is OutcomeKind.ERROR
    assert outcome.score is None
    assert "the sandbox has no folder for programs" in outcome.message
