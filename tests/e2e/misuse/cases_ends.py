"""Environments in which Ray cannot start, places in use, damaged checkpoints, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.misuse.case import Case, Outcome, Place
from verl.utils.run_lock import LOCK_FILE

RAY = ["trainer.controller=ray", "ray_kwargs.ray_init.num_cpus=1"]

HOLDER = """
import sys
from verl.utils.run_lock import DirectoryLock
lock = DirectoryLock.take(sys.argv[1], "trainer.default_local_dir")
print("held", flush=True)
sys.stdin.read()
"""


def hold(directory: Path) -> None:
    """Another live process works in a directory, until the test process ends or a minute is over."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        ["timeout", "60", sys.executable, "-c", HOLDER, str(directory)], stdin=reading, stdout=subprocess.PIPE
    )
    os.close(reading)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    _HOLDERS.append((writing, process))


_HOLDERS: list[tuple[int, subprocess.Popen[bytes]]] = []


def let_go(place: Place, done: Outcome) -> None:
    """End the holders."""
    for writing, process in _HOLDERS:
        os.close(writing)
        process.wait(timeout=30)
    _HOLDERS.clear()


def hold_output(place: Place) -> None:
    """A live run in the output directory."""
    hold(place.out)


def hold_samples(place: Place) -> None:
    """A live run in the directory of samples."""
    hold(place.tmp / "samples")


def hold_parts(place: Place) -> None:
    """A live generation with the same output."""
    place.out.mkdir()
    hold(place.out / ".answers.parts")


def lock_of_another_machine(place: Place) -> None:
    """A lock that a live run elsewhere has just touched."""
    place.out.mkdir()
    holder = {
        "host": "node7",
        "boot": "another",
        "pid": 17,
        "owner": "1.h.5",
        "since": "today",
        "program": "verl train",
    }
    (place.out / LOCK_FILE).write_text(json.dumps(holder))


def folder_as_lock(place: Place) -> None:
    """A folder where the lock should be."""
    (place.out / LOCK_FILE).mkdir(parents=True)


def silent_port(place: Place) -> None:
    """RAY_ADDRESS names a port of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place.env["RAY_ADDRESS"] = f"127.0.0.1:{server.getsockname()[1]}"


def read_only_home(place: Place) -> None:
    """A home directory that does not exist and cannot be made, for root too."""
    (place.tmp / "file").write_text("")
    place.env["HOME"] = str(place.tmp / "file" / "home")


def trained(place: Place, done: Outcome) -> None:
    """The run works all the same."""
    assert "step 2/2" in done.stdout, done.stdout


def checkpoint(place: Place) -> Path:
    """A step directory with a marker and a state file that torch wrote, and nothing else."""
    step = place.out / "global_step_1"
    (step / "actor").mkdir(parents=True)
    (place.out / "latest_checkpointed_iteration.txt").write_text("1\n")
    (step / "complete.json").write_text(json.dumps({"step": 1, "parts": ["actor"]}))
    return step


def marker_with_a_number(place: Place) -> None:
    """The marker's list of parts is a number."""
    (checkpoint(place) / "complete.json").write_text('{"step": 1, "parts": 5}')


def no_checksums(place: Place) -> None:
    """The file of checksums is missing."""
    checkpoint(place)


def marker_is_a_folder(place: Place) -> None:
    """A folder in the place of the marker."""
    marker = checkpoint(place) / "complete.json"
    marker.unlink()
    marker.mkdir()


def pointer_is_no_number(place: Place) -> None:
    """A pointer file without a number, and no step directory."""
    place.out.mkdir()
    (place.out / "latest_checkpointed_iteration.txt").write_text("the last one")


def state_is_junk(place: Place) -> None:
    """A state file that is no file of torch's, in a checkpoint that is used unchecked."""
    (checkpoint(place) / "trainer_state.pt").write_bytes(b"junk" * 100)


def slow_reward(place: Place) -> None:
    """A reward function that says that it runs, and waits."""
    (place.tmp / "reward.py").write_text(
        "import time\nfrom pathlib import Path\n\n\n"
        "def compute_score(**kwargs):\n"
        f"    Path({str(place.tmp / 'running')!r}).touch()\n    time.sleep(60)\n    return 1.0\n"
    )


def send(number: signal.Signals) -> Callable[[int, Place], None]:
    """Send a signal once the reward function runs."""

    def during(pid: int, place: Place) -> None:
        deadline = time.monotonic() + 100
        while not (place.tmp / "running").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, number)

    return during


SLOW = ["custom_reward_function.path={tmp}/reward.py"]

CASES = [
    Case(
        "RAY_ADDRESS of a dead cluster",
        "train",
        RAY,
        prepare=silent_port,
        words=["environment variable RAY_ADDRESS=", "no Ray cluster answers there"],
    ),
    Case(
        "RAY_ADDRESS that is no address",
        "train",
        RAY,
        environment={"RAY_ADDRESS": "cluster"},
        words=["environment variable RAY_ADDRESS='cluster'", "HOST:PORT"],
    ),
    Case(
        "address of a dead Ray client server",
        "train",
        [*RAY, "ray_kwargs.ray_init.address=ray://127.0.0.1:1"],
        words=["ray_kwargs.ray_init.address='ray://127.0.0.1:1'"],
    ),
    Case(
        "address=auto without a cluster",
        "train",
        [*RAY, "ray_kwargs.ray_init.address=auto"],
        environment={"RAY_TMPDIR": "{tmp}"},
        words=["ray_kwargs.ray_init.address='auto'", "no running Ray cluster was found"],
    ),
    Case(
        "TMPDIR too long for sockets",
        "train",
        RAY,
        environment={"TMPDIR": "/tmp/a-directory-with-a-name-that-is-much-too-long-for-the-sockets-of-ray"},
        words=["environment variable TMPDIR=", "too long for Ray", "RAY_TMPDIR"],
    ),
    Case(
        "RAY_TMPDIR that does not exist",
        "generate",
        RAY,
        environment={"RAY_TMPDIR": "/tmp/verl-no-dir"},
        words=["environment variable RAY_TMPDIR='/tmp/verl-no-dir'"],
        leaves=["**/settings.json"],
    ),
    Case(
        "unknown argument of ray.init",
        "train",
        [*RAY, "ray_kwargs.ray_init.nodes=3"],
        words=["ray_kwargs.ray_init=", "nodes"],
    ),
    Case(
        "HOME that cannot be written",
        "train",
        RAY,
        prepare=read_only_home,
        words=["Ray cannot start", "HOME is '{tmp}/file/home'"],
    ),
    Case(
        "HOME that cannot be written, without Ray",
        "train",
        prepare=read_only_home,
        code=0,
        messages=0,
        check=trained,
        leaves=["**/*"],
        fresh=True,
        limit_s=60,
    ),
    Case(
        "a live run in the same place",
        "train",
        prepare=hold_output,
        words=["trainer.default_local_dir='{tmp}/out'", "another run works there: process", "choose another directory"],
        leaves=[LOCK_FILE],
        check=let_go,
    ),
    Case(
        "a live run in the same place",
        "sft",
        prepare=hold_output,
        words=["trainer.default_local_dir='{tmp}/out'", "another run works there: process"],
        leaves=[LOCK_FILE],
        check=let_go,
    ),
    Case(
        "a live run in the same place",
        "preference",
        prepare=hold_output,
        words=["trainer.default_local_dir='{tmp}/out'", "another run works there: process"],
        leaves=[LOCK_FILE],
        check=let_go,
    ),
    Case(
        "a live run with the same directory of samples",
        "train",
        ["trainer.rollout_data_dir={tmp}/samples"],
        prepare=hold_samples,
        words=["trainer.rollout_data_dir='{tmp}/samples'", "another run works there: process"],
        check=let_go,
    ),
    Case(
        "a live generation with the same output",
        "generate",
        prepare=hold_parts,
        words=["data.output_path=", "another run works there: process"],
        leaves=[".answers.parts/*"],
        check=let_go,
    ),
    Case(
        "a live run on another machine",
        "train",
        prepare=lock_of_another_machine,
        words=["process 17 (verl train) on node7", "120 s after its last sign of life", LOCK_FILE],
        leaves=[LOCK_FILE],
    ),
    Case("a folder in the place of the lock", "train", prepare=folder_as_lock, code=1, words=[LOCK_FILE]),
    Case(
        "a marker with parts=5",
        "train",
        prepare=marker_with_a_number,
        code=1,
        words=["complete.json has parts=5", "trainer.resume_mode=disable"],
        leaves=["**/*"],
    ),
    Case(
        "a checkpoint without checksums",
        "train",
        prepare=no_checksums,
        code=1,
        words=["checksums.sha256 cannot be read", "trainer.verify_checkpoint=False"],
        leaves=["**/*"],
    ),
    Case(
        "a folder in the place of the marker",
        "sft",
        prepare=marker_is_a_folder,
        code=1,
        words=["no readable complete.json"],
        leaves=["**/*"],
    ),
    Case(
        "a pointer file without a number",
        "sft",
        prepare=pointer_is_no_number,
        code=1,
        words=["'the last one' instead of a step number"],
        leaves=["**/*"],
    ),
    Case(
        "a state file that torch cannot read",
        "train",
        ["trainer.verify_checkpoint=False"],
        prepare=state_is_junk,
        code=1,
        words=["trainer_state.pt' cannot be read: "],
        absent=["weights_only"],
        leaves=["**/*"],
    ),
    Case(
        "Ctrl-C in the first step",
        "train",
        [*SLOW, "trainer.save_freq=1"],
        prepare=slow_reward,
        during=send(signal.SIGINT),
        code=130,
        messages=0,
        words=["interrupted: step 1 was not finished and nothing is saved", "the same command begins anew"],
        leaves=["*.json", "*.yaml", "*.txt"],
        limit_s=60,
    ),
    Case(
        "SIGTERM in the first step of a run that saves",
        "train",
        [*SLOW, "trainer.save_freq=1"],
        prepare=slow_reward,
        during=send(signal.SIGTERM),
        code=75,
        messages=0,
        words=["SIGTERM: the run ends now", "ending in the middle of step 1: SIGTERM"],
        leaves=["*.json", "*.yaml", "*.txt"],
        limit_s=60,
    ),
    Case(
        "SIGTERM in a run that never saves",
        "train",
        SLOW,
        prepare=slow_reward,
        during=send(signal.SIGTERM),
        code=1,
        words=["TrainingError: the run ended before its last step and saved nothing", "trainer.save_freq"],
        leaves=["*.json", "*.yaml", "*.txt"],
        limit_s=60,
    ),
    Case(
        "SIGTERM in an evaluation",
        "eval",
        SLOW,
        prepare=slow_reward,
        during=send(signal.SIGTERM),
        code=143,
        messages=0,
        words=["ended by SIGTERM: "],
        limit_s=60,
    ),
]
