"""The gate of rows: every row of every program passes here on its way from a file.

A program says which columns it reads and in which form. The gate reads each value in that form, and refuses rows with
a value of another one or with invalid text. A run that keeps values of its own under some names refuses columns of
these names. A message names file, row, column, value and remedy, and several problems are listed together.

Rows are checked when they are read. :func:`look_through` has them read once before a run begins, within a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.files import Row, Rows
from verl.data.forms import invalid_text, short
from verl.errors import DataError
from verl.schema import reserved_for

logger = logging.getLogger(__name__)

CHECK_S = 60.0
"""Seconds that looking through rows may take before a run begins."""

#: problems that a message lists; the others are counted
SHOWN = 10

Form = Callable[[Any], Any]
Look = Callable[[Row], object]


@dataclass(frozen=True)
class Column:
    """A column that a program reads.

    Attributes:
        name: its name in the files.
        form: reads a value.
        required: whether every file must have it, and every row a value.
        into: name of the read value in the row; None: that of the column.
    """

    name: str
    form: Form
    required: bool = False
    into: str | None = None


class RowGate:
    """Rows, each checked and read in the forms of its columns.

    Args:
        rows: from the files.
        columns: what the program reads.
    """

    def __init__(self, rows: Rows, columns: Sequence[Column]) -> None:
        self.rows = rows
        present = set(rows.columns)
        self._columns = [column for column in columns if column.required or column.name in present]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """A row.

        Raises:
            DataError: it has problems; all of them.
        """
        return self._passed(index, self.rows[index], self._columns)

    def passed(
        self,
        indices: Sequence[int],
        problems: Problems,
        *,
        also: Sequence[str] = (),
        only: Sequence[str] | None = None,
    ) -> Iterator[tuple[int, Row | None]]:
        """Numbers of rows, and the rows with the gate's columns; None for one with problems, which are collected.

        Args:
            indices: of the rows.
            problems: where they are collected.
            also: further columns.
            only: the gate's columns that are read, where others have passed already; None for all.
        """
        chosen = [column for column in self._columns if only is None or column.name in only]
        names = [*(column.name for column in chosen), *also]
        for index, row in zip(indices, self.rows.several(indices, names), strict=True):
            checked: Row | None = None
            with problems.collecting():
                checked = self._passed(index, row, chosen)
            yield index, checked

    def check(
        self,
        look: Look | None = None,
        *,
        indices: Sequence[int] | None = None,
        only: Sequence[str] | None = None,
        within_s: float = CHECK_S,
    ) -> int:
        """Check rows once before a run begins; see :func:`look_through`.

        Args:
            look: looks at what the gate read of a row, and raises a :class:`DataError` that begins with the column.
            indices: of the rows; None for all of them.
            only: as for :meth:`passed`.
            within_s: seconds after which the rest waits for its turn.
        """
        chosen, problems = range(len(self.rows)) if indices is None else indices, Problems()
        rows = self.passed(chosen, problems, only=only)
        looks = rows if look is None else self._looked_at(rows, look, problems)
        return look_through(looks, len(chosen), problems, within_s)

    def _looked_at(self, rows: Iterable[tuple[int, Row | None]], look: Look, problems: Problems) -> Iterator[None]:
        for index, row in rows:
            try:
                if row is not None:
                    look(row)
            except DataError as error:
                problems.add(DataError(f"{self.rows.place(index)}, {error}"))
            yield

    def _passed(self, index: int, row: Row, columns: Sequence[Column]) -> Row:
        found: list[str] = []
        if self.rows.may_have_invalid_text(index):
            whole = self.rows[index]
            found += [_invalid(name, path, text) for name in whole for path, text in invalid_text(whole[name])]
        passed = dict(row)
        for column in columns:
            if not column.required and column.name not in row:
                continue
            value = row.get(column.name)
            try:
                if value is None and column.required:
                    raise DataError("is null; give it a value, or remove the row")
                passed[column.into or column.name] = column.form(value)
            except DataError as error:
                found.append(f"column {column.name!r}{_joint(error)}{error}")
        if found:
            place = self.rows.place(index)
            raise RowError([f"{place}, {problem}" for problem in found])
        return passed


class RowError(DataError):
    """What is wrong with rows: a problem, or several."""

    def __init__(self, problems: Sequence[str], count: int | None = None, looked: str = "") -> None:
        super().__init__(list(problems), count, looked)  # args = pickling state
        self.problems = list(problems)
        self.count = len(self.problems) if count is None else count
        self.looked = looked

    def __str__(self) -> str:
        if self.count == 1:
            return self.problems[0]
        head = f"{self.count} problems in rows{self.looked}"
        if self.count > len(self.problems):
            head += f"; the first {len(self.problems)} are"
        return "\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)])


class Problems:
    """Problems of rows, the first ones as text and all of them counted."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, error: DataError) -> None:
        """Keep what an error says."""
        found = error.problems if isinstance(error, RowError) else [str(error)]
        self.count += len(found)
        self.shown += found[: max(0, SHOWN - len(self.shown))]

    def collecting(self) -> _Collecting:
        """A context that keeps a :class:`DataError` instead of raising it."""
        return _Collecting(self)

    def stop(self, looked: str = "") -> None:
        """Raise if there are any.

        Args:
            looked: which rows have been looked at, for the message.
        """
        if self.count:
            raise RowError(self.shown, self.count, looked)


class _Collecting:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, DataError):
            return False
        self._problems.add(error)
        return True


def look_through(looks: Iterable[object], size: int, problems: Problems, within_s: float = CHECK_S) -> int:
    """Look at rows once before a run begins, so that a bad one ends it now and not at its turn, hours later.

    Args:
        looks: looks at a row each time that it is asked, and collects what is wrong.
        size: how many rows there are.
        problems: where it collects.
        within_s: the rest waits for its turn after so many seconds.

    Returns:
        How many were looked at.

    Raises:
        RowError: rows have problems.
    """
    started, count = time.monotonic(), 0
    for _ in looks:
        count += 1
        if time.monotonic() - started > within_s and count < size:
            logger.info("%d of %d rows were checked in %.0f s, the others when they are read", count, size, within_s)
            break
    problems.stop(f" ({count} of {size} rows were checked)" if count < size else "")
    return count


def looks_at(look: Callable[[int], object], indices: Iterable[int], problems: Problems) -> Iterator[None]:
    """Make what a run makes of each row, for :func:`look_through`."""
    for index in indices:
        with problems.collecting():
            look(index)
        yield


def _joint(error: DataError) -> str:
    """What stands between a column and what is wrong with it: some messages are whole sentences."""
    return " " if str(error).startswith(("is ", "has ")) else ": "


def _invalid(column: str, path: str, value: str) -> str:
    return (
        f"column {column!r}{path}: {short(value)} is no valid Unicode: it has half of a surrogate pair; remove it, or "
        "write the whole character"
    )


def check_names(columns: Iterable[str], read: Iterable[str] = ()) -> None:
    """Refuse columns with names under which a run keeps values of its own.

    Args:
        columns: of the data.
        read: those that the run takes out of the row under a configured name.

    Raises:
        DataError: naming all of them.
    """
    taken = {name: reserved_for(name) for name in columns if name not in set(read)}
    clashes = [
        f"column {name!r} has the name of a field that the run makes ({what})"
        for name, what in taken.items()
        if what is not None
    ]
    if clashes:
        which = "it" if len(clashes) == 1 else "them"
        raise DataError(f"{'; '.join(clashes)}; rename {which} in the data files")
