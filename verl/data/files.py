"""Rows from Parquet and JSON files, each with an address that an error message can name."""

from __future__ import annotations

import bisect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.values import arrow_converter, digest, row_values
from verl.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH = 1024


class DataFile(ABC):
    """The rows of one file."""

    path: str
    columns: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """One row as plain Python objects."""

    @abstractmethod
    def column(self, name: str) -> Iterator[Any]:
        """The values of one column, in order; ``None`` where a row has none."""

    def all_rows(self) -> Iterator[Row]:
        """Every row, in order."""
        return map(self.row, range(len(self)))

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path}, row {index}"


class ParquetFile(DataFile):
    """A Parquet file, kept in Arrow's compact form; rows become Python objects when asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._table = pq.read_table(path).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from error
        self.columns = tuple(self._table.column_names)
        kinds = {field.name: arrow_converter(field.type) for field in self._table.schema}
        self._convert = {name: convert for name, convert in kinds.items() if convert is not None}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        return self._plain(self._table.slice(index, 1).to_pylist()[0])

    def _plain(self, row: Row) -> Row:
        for name, convert in self._convert.items():
            row[name] = convert(row[name])
        return row

    def all_rows(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            yield from map(self._plain, self._table.slice(start, _BATCH).to_pylist())

    def column(self, name: str) -> Iterator[Any]:
        convert = self._convert.get(name)
        for chunk in self._table[name].chunks:
            for start in range(0, len(chunk), _BATCH):
                values = chunk.slice(start, _BATCH).to_pylist()
                yield from values if convert is None else map(convert, values)


class JSONFile(DataFile):
    """A JSON-lines file, or a JSON file that holds one array of objects."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._lines: list[int] | None = None
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if path.endswith(".json") and text.lstrip().startswith("["):
            self._add_array(text)
        else:
            self._add_lines(text)
        # dict.fromkeys keeps the order of first appearance, which reads better in messages than a sorted set
        self.columns = tuple(dict.fromkeys(key for row in self._rows for key in row))

    def _add_array(self, text: str) -> None:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.path}: not valid JSON: {error}") from error
        for index, value in enumerate(values):
            self._add(value, f"{self.path}, element {index}")

    def _add_lines(self, text: str) -> None:
        self._lines = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{self.path}, line {number}: not valid JSON: {error}") from error
            self._add(value, f"{self.path}, line {number}", has_nulls="null" in line)
            self._lines.append(number)

    def _add(self, value: Any, place: str, *, has_nulls: bool = True) -> None:
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object, got {type(value).__name__}")
        self._rows.append(row_values(value) if has_nulls else value)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return dict(self._rows[index])

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def place(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}" if self._lines is not None else super().place(index)


class Rows:
    """The rows of several files, one after the other.

    Args:
        paths: a path or a list of paths to ``.parquet``, ``.jsonl`` or ``.json`` files.
        required: columns that every file must have.

    Raises:
        DataError: a file is missing, unreadable, empty, of an unknown kind or lacks a required column.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], required: Sequence[str] = ()) -> None:
        names = [str(p) for p in ([paths] if isinstance(paths, str | Path) else list(paths))]
        if not names:
            raise DataError("no data files given; set data.train_files / data.val_files to a path or a list of paths")
        self.files = [_open(name) for name in names]
        if not any(map(len, self.files)):
            raise DataError(f"no rows in {', '.join(names)}")
        for file in self.files:
            for column in required:
                if len(file) and column not in file.columns:
                    raise DataError(
                        f"{file.path} has no column {column!r}; it has {', '.join(map(repr, file.columns)) or 'none'}"
                    )
        self._ends: list[int] = []
        total = 0
        for file in self.files:
            total += len(file)
            self._ends.append(total)

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[DataFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, index)
        return self.files[which], index - (self._ends[which - 1] if which else 0)

    def __getitem__(self, index: int) -> Row:
        file, local = self._locate(index)
        return file.row(local)

    def place(self, index: int) -> str:
        """File and row number (from 0), or line number for JSON lines, of a row."""
        file, local = self._locate(index)
        return file.place(local)

    def directory(self, index: int) -> Path:
        """Directory of a row's file."""
        return Path(self._locate(index)[0].path).parent

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column over all files; ``None`` for the rows of a file that lacks it."""
        for file in self.files:
            yield from file.column(name) if name in file.columns else repeat(None, len(file))

    def fingerprint(self, indices: Iterable[int] | None = None) -> str:
        """SHA-256 of the rows' values in order: a name for the data, whatever file and format they are in.

        Args:
            indices: the rows that count, in their order; None for all of them.
        """
        return digest(self.several(indices))

    def several(self, indices: Iterable[int] | None = None) -> Iterator[Row]:
        """Rows one after the other, many times as fast as one by one where they are in the order of the files.

        Args:
            indices: of the rows; None for all of them.
        """
        if indices is None:
            yield from self._all_rows()
            return
        wanted = list(indices)
        if any(first >= second for first, second in pairwise(wanted)) or len(wanted) * 8 < len(self):
            yield from map(self.__getitem__, wanted)
            return
        chosen = set(wanted)
        yield from (row for index, row in enumerate(self._all_rows()) if index in chosen)

    def _all_rows(self) -> Iterator[Row]:
        for file in self.files:
            yield from file.all_rows()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all files, in order of first appearance."""
        return tuple(dict.fromkeys(column for file in self.files for column in file.columns))


def _open(name: str) -> DataFile:
    path = Path(name).expanduser()
    if not path.is_file():
        kind = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"data file {name!r} {kind} (looked at {path.absolute()})")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return ParquetFile(str(path))
    if suffix in (".jsonl", ".json"):
        return JSONFile(str(path))
    raise DataError(f"data file {name!r} has the unknown suffix {suffix!r}; use one of {', '.join(SUFFIXES)}")
