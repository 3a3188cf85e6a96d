"""Tasks beside the caller."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from verl.utils.background import BackgroundTask


def test_what_goes_wrong_is_told_once() -> None:
    def fails() -> None:
        raise ValueError("no")

    task = BackgroundTask(fails)
    with pytest.raises(ValueError, match="no"):
        task.wait()
    assert task.done()


def test_running_says_only_whether_it_is_at_work() -> None:
    may_end = threading.Event()

    def fails() -> None:
        assert may_end.wait(60)
        raise ValueError("no")

    task = BackgroundTask(fails)
    assert task.running
    assert not task.done()
    may_end.set()
    with pytest.raises(ValueError, match="no"):
        task.wait()
    assert not task.running
    assert not BackgroundTask().running


@pytest.mark.skipif(sys.platform != "linux", reason="a thread of its own niceness needs Linux")
def test_only_the_thread_steps_back() -> None:
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), []
    wanted = min(before + 3, 19)
    task = BackgroundTask(
        lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), niceness=wanted
    )
    task.wait()
    assert seen == [wanted]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
