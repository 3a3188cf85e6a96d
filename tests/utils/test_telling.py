"""The boundary between a run and its reports: failures are reported once, counted always, and end nothing."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator

import pytest

from verl.errors import DataError
from verl.utils.background import Courier
from verl.utils.telling import BOUNDARY, Boundary, describe, is_failure


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Warnings of the boundary, each once, however many handlers have seen it."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("verl.utils.telling").addHandler(handler)
    yield found
    logging.getLogger("verl.utils.telling").removeHandler(handler)


@pytest.mark.parametrize(
    "error",
    [OSError("full"), SystemExit(1), ValueError("bad"), UnicodeEncodeError("ascii", "π", 0, 1, "no"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_is_reported_once_and_counted(error: BaseException, messages: list[str]) -> None:
    boundary = Boundary()
    for _ in range(3):
        with boundary.guard("traces", "writing to /x") as guard:
            raise error
    assert guard.failed
    assert boundary.metrics() == {"tracking/failures": 3, "tracking/failures/traces": 3}
    assert len(messages) == 1
    assert messages[0].startswith(f"writing to /x failed: {describe(error)}")
    assert "the run continues, and tracking/failures/traces counts such losses" in messages[0]
    assert (__file__ in messages[0]) == (not isinstance(error, OSError))
    boundary.summarize()
    assert messages[1:] == ["traces: 3 records or values of this run are lost"]


def test_without_a_failure_nothing_is_said_and_no_metric_exists(messages: list[str]) -> None:
    boundary = Boundary()
    with boundary.guard("traces", "x") as guard:
        pass
    boundary.summarize()
    assert not guard.failed
    assert boundary.metrics() == {}
    assert messages == []


def test_another_kind_of_failure_and_another_destination_are_reported_too(messages: list[str]) -> None:
    boundary = Boundary()
    for destination, error in [("a", OSError("1")), ("a", ValueError("2")), ("b", OSError("3")), ("b", OSError("4"))]:
        with boundary.guard(destination, "x"):
            raise error
    assert len(messages) == 3
    boundary.start()  # a run of its own
    with boundary.guard("a", "x"):
        raise OSError("1")
    assert len(messages) == 4
    assert boundary.counts == {"a": 1}


def test_the_users_interrupt_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt), Boundary().guard("a", "x"):
        raise KeyboardInterrupt


def test_an_exit_that_a_signal_handler_asks_for_ends_the_run() -> None:
    def leave(*_: object) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit), Boundary().guard("a", "x"):
            signal.raise_signal(signal.SIGTERM)
        with Boundary().guard("a", "x") as guard:
            sys.exit(3)  # of a library
        assert guard.failed
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_what_a_library_raises_in_its_own_thread_is_its_failure(raised: BaseException) -> None:
    def fails() -> None:
        raise raised

    courier = Courier("test")
    with Boundary().guard("a", "x") as guard:
        courier.do(fails, 10.0)
    assert guard.failed
    assert courier.do(lambda: 1, 10.0) == 1  # the thread is alive
    courier.end()


def test_an_exception_whose_text_raises_is_described() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Odd()) == "Odd"
    assert describe(ValueError("a\nb")) == "ValueError: a b"
    assert describe(DataError("row 3")) == "row 3"
    assert describe(OSError()) == "OSError"
    assert is_failure(Odd())


def test_the_process_has_one() -> None:
    assert isinstance(BOUNDARY, Boundary)
