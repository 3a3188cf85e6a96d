"""Starting Ray: on a machine that is busy, with an environment that cannot work, and beside other clusters."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from verl.errors import ConfigError, WorkerError
from verl.single_controller.ray import session
from verl.single_controller.ray.session import ray_cluster, start_ray

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No cluster is named, and Ray's folder is the usual one."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def failing(monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> list[Any]:
    """Let ``ray.init`` raise the errors, one after the other, then work; returns what was called."""
    calls: list[Any] = []

    def init(**settings: Any) -> None:
        calls.append(settings)
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_start_that_took_too_long_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = failing(monkeypatch, Exception(SLOW))
    folder = start_ray(num_cpus=2)
    settings = {"num_cpus": 2, "address": "local", "_temp_dir": str(folder)}
    assert calls == [settings, "shutdown", settings]
    assert "trying once more" in caplog.text
    session._remove(folder)


def test_a_start_that_takes_long_says_so_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_TELL_AFTER_S", 0.05)
    monkeypatch.setattr(ray, "init", lambda **_: time.sleep(0.5))
    folder = start_ray(num_cpus=2)
    assert caplog.text.count("Ray has not come up") == 1
    assert "it is tried for at most 90 s" in caplog.text
    session._remove(folder)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Exception(SLOW), WorkerError, "timed out"),
        (PermissionError(13, "Permission denied", "/home/user/.cache"), ConfigError, r"HOME is .*/dev/shm"),
        (ValueError("bad value\nmore"), ConfigError, r"ray_kwargs.ray_init=.*bad value$"),
    ],
)
def test_what_ray_raises_becomes_one_line_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type[Exception], text: str
) -> None:
    calls = failing(monkeypatch, *[error] * 9)
    with pytest.raises(kind, match=text):
        start_ray()
    assert not Path(calls[0]["_temp_dir"]).exists()


def test_an_own_cluster_starts_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls = failing(monkeypatch)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"gcs_address": "10.0.0.1:6379"}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert start_ray() is None
        assert f"environment variable RAY_ADDRESS={address!r}" in caplog.text
        assert start_ray(address=f"ray://{address}") is None  # the key counts before the variable
    assert start_ray(address="auto") is None
    assert "ray_kwargs.ray_init.address='auto'" in caplog.text
    folder = start_ray(address="local")
    assert [call["address"] for call in calls] == [address, f"ray://{address}", "auto", "local"]
    assert folder is not None
    session._remove(folder)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere", "127.0.0.1:99999", "127.0.0.1:x"])
def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    failing(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="environment variable RAY_ADDRESS="):
        start_ray()
    with pytest.raises(ConfigError, match=r"ray_kwargs.ray_init.address="):
        start_ray(address=address)
    assert time.monotonic() - started < 12


def test_a_folder_that_cannot_hold_sockets_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 60)
    with pytest.raises(ConfigError, match=r"TMPDIR=.*too long for Ray.*RAY_TMPDIR"):
        start_ray()
    (Path("/tmp") / "verl-no-dir").unlink(missing_ok=True)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/verl-no-dir")
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR='/tmp/verl-no-dir'"):
        start_ray()


def test_a_small_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    failing(monkeypatch)
    monkeypatch.setattr(session, "free_bytes", lambda path: 64 << 20)
    session._remove(start_ray(object_store_memory=100 << 20) or Path("/nonexistent"))
    assert "/dev/shm has 64.0 MiB free" in caplog.text


def test_a_running_ray_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with ray_cluster({}):
        pass
    assert calls == []
