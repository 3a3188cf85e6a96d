"""The one writer of JSON: any value gives strict JSON on one line, and no value is lost without a word."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.json_text import distinct_name, dumps_json, to_plain, valid_text, write_json


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: Any
    y: Any = None


class Mute:
    """Raises in every method that a writer may call."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__

    def tolist(self) -> list[int]:
        raise RuntimeError("no")


def strict(text: str) -> Any:
    """Parse as readers without Python's extensions do."""
    text.encode("utf-8")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.longdouble(1.5), 1.5),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (np.array([1.0, np.nan]), [1.0, "NaN"]),
        (np.array([1, "a", None], dtype=object), [1, "a", None]),
        (torch.tensor(2), 2),
        (torch.tensor([1.5, float("inf")], dtype=torch.bfloat16, requires_grad=True), [1.5, "Infinity"]),
        (float("-inf"), "-Infinity"),
        (decimal.Decimal("0.5"), 0.5),
        (fractions.Fraction(1, 4), 0.25),
        (Level.HIGH, 3),
        (Color.RED, "red"),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (collections.deque([1, 2]), [1, 2]),
        ({"a": 1}.values(), [1]),
        (range(3), [0, 1, 2]),
        ((1, (2,)), [1, [2]]),
        (Point(np.int8(1)), {"x": 1, "y": None}),
        (b"\xff", "data:application/octet-stream;base64,/w=="),
        (Path("a/b"), "a/b"),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        ({1: "a", None: "b", 2.5: "c"}, {"1": "a", "None": "b", "2.5": "c"}),
        ({np.int64(4): "d", Color.RED: "e"}, {"4": "d", "red": "e"}),
        ({(1, 2): "a"}, {"[1, 2]": "a"}),
    ],
)  # fmt: skip
def test_values_keep_what_they_are(value: Any, expected: Any) -> None:
    lost: list[str] = []
    assert strict(dumps_json({"v": value}, lost=lost.append)) == {"v": expected}
    assert lost == []


def test_text_is_valid_and_the_record_one_line() -> None:
    assert strict(dumps_json("\ud83d")) == "\ufffd"
    assert strict(dumps_json("\ud83d\ude00")) == "😀"  # both halves are there
    assert strict(dumps_json({"\udc80": 1})) == {"\ufffd": 1}
    text = "a\x85b\u2028c\u2029d\x0be\x1ef\ng\r"
    line = dumps_json({"t": text})
    assert len(line.splitlines()) == 1
    assert strict(line) == {"t": text}
    assert dumps_json("π") == '"π"'
    assert dumps_json("π", ascii_only=True) == '"\\u03c0"'


def test_valid_text_changes_nothing_else() -> None:
    assert valid_text("a\x00π😀") == "a\x00π😀"
    assert type(valid_text(np.str_("a"))) is str


def loop() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def deep() -> Any:
    value: Any = 0
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: object(), "a: a value of type object, which has no form in JSON"),
        (lambda: Mute(), "a: a value of type Mute, which raises RuntimeError"),
        (lambda: torch.empty(2, device="meta"), "a: a value of type Tensor, which raises"),
        (loop, "a.1: a value of type list, which contains itself"),
        (deep, "which lies more than 100 levels deep"),
        (lambda: 10**5000, "a: a value of type int, of 16610 bits"),
        (lambda: 1j, "a: a value of type complex"),
        (lambda: iter([1]), "a: a value of type list_iterator"),
        (lambda: {1: "x", "1": "y"}, "a: two keys have the text '1', the second one is written as '1 (2)'"),
        (lambda: Point, "a: a value of type type"),
        (lambda: np.ndarray, "a: a value of type type"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_reported_and_replaced(make: Callable[[], Any], why: str) -> None:
    lost: list[str] = []
    found = strict(dumps_json({"a": make(), "b": 1}, lost=lost.append))
    assert found["b"] == 1
    assert len(lost) == 1
    assert why in lost[0]


def test_a_value_that_occurs_twice_is_no_loop() -> None:
    shared = [1]
    lost: list[str] = []
    assert to_plain([shared, shared], lost.append) == [[1], [1]]
    assert lost == []


def test_each_kind_of_loss_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyHere:
        """A type that no other test writes."""

    with caplog.at_level(logging.WARNING, logger="verl"):
        for _ in range(3):
            dumps_json([OnlyHere(), OnlyHere()])
    messages = {id(record): record.message for record in caplog.records if "OnlyHere" in record.message}
    assert len(messages) == 1


def test_numbers_are_written_as_json_writes_them() -> None:
    record = {"a": 0.1, "b": 1e-300, "c": -0.0, "d": 2**60, "e": 1.0, "f": True, "g": None, "h": "x\t\"'"}
    assert dumps_json(record) == json.dumps(record, ensure_ascii=False)
    assert dumps_json(record, indent=2, sort_keys=True) == json.dumps(record, indent=2, sort_keys=True)


def test_files_appear_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": np.int64(1)})
    assert (tmp_path / "a.json").read_text("utf-8") == '{\n "x": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_names_are_told_apart() -> None:
    assert distinct_name("a", {"b"}) == "a"
    assert distinct_name("a", {"a": 1, "a (2)": 2}) == "a (3)"


hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=8)
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.complex_numbers()
    | st.decimals()
    | st.just(object()),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text() | st.none(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(hostile)
@settings(max_examples=100, deadline=None)
def test_any_value_gives_strict_json_on_one_line(value: Any) -> None:
    line = dumps_json(value, lost=lambda _: None)
    assert len(line.splitlines()) == 1
    strict(line)


exact = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(exact)
@settings(max_examples=60, deadline=None)
def test_what_json_can_hold_comes_back_as_it_was(value: Any) -> None:
    assert strict(dumps_json(value)) == value


def test_it_is_cheap() -> None:
    """10,000 numbers of a trace in well under a second."""
    import time

    values = np.arange(10_000, dtype=np.float32)
    started = time.monotonic()
    assert len(strict(dumps_json(values))) == 10_000
    assert time.monotonic() - started < 1.0
    assert math.isfinite(sys.float_info.max)
