"""A run learns in time that it must end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from verl.errors import ConfigError
from verl.utils.stopping import StopWatch


def test_without_a_deadline_nothing_ends_the_run() -> None:
    assert StopWatch().reason(1e9, 1e9) is None


def test_the_longest_step_the_save_and_the_spare_time_must_fit() -> None:
    watch = StopWatch(100.0, spare_s=30.0)
    assert watch.reason(20.0, 10.0) is None  # 60 of 100
    reason = watch.reason(65.0, 10.0)
    assert reason is not None
    assert "trainer.time_limit_s" in reason
    assert watch.reason(1.0, 10.0) is not None  # the longest step counts


def test_the_earliest_deadline_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 50))
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 5000))
    watch = StopWatch(1000.0)
    assert watch.reason(10.0) is None
    reason = watch.reason(60.0)
    assert reason is not None
    assert "SLURM_JOB_END_TIME" in reason
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ConfigError, match="seconds since 1970"):
        StopWatch()


def test_the_first_signal_asks_and_the_handler_goes_with_the_context() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopWatch() as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.reason() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_ends_the_process() -> None:
    code = (
        "import os, signal, time; from verl.utils.stopping import StopWatch\n"
        "with StopWatch():\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGTERM
