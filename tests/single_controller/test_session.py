"""Starting Ray on a machine that is busy."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from verl.single_controller.ray.session import start_ray

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


def failing(monkeypatch: pytest.MonkeyPatch, *messages: str) -> list[Any]:
    """Let ``ray.init`` fail with the messages, one after the other, then work; returns what was called."""
    calls: list[Any] = []

    def init(**settings: Any) -> None:
        calls.append(settings)
        if len(calls) <= len(messages):
            raise Exception(messages[len(calls) - 1])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_start_that_took_too_long_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = failing(monkeypatch, SLOW)
    start_ray(num_cpus=2)
    assert calls == [{"num_cpus": 2}, "shutdown", {"num_cpus": 2}]
    assert "trying once more" in caplog.text


def test_a_second_failure_and_any_other_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch, "no space left on device")
    with pytest.raises(Exception, match="no space left"):
        start_ray()
    assert len(calls) == 1
    calls = failing(monkeypatch, SLOW, "shut down", SLOW)
    with pytest.raises(Exception, match="timed out"):
        start_ray()
