"""Rows from Parquet and JSON files, each with an address that an error message can name."""

from __future__ import annotations

import bisect
import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.values import Convert, arrow_converter, digest, row_values
from verl.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH = 1024
#: how JSON writes halves of surrogate pairs: alone they make no character
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class DataFile(ABC):
    """The rows of one file."""

    path: str
    columns: tuple[str, ...]
    #: whether some row may have text that is no valid Unicode
    doubtful = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """One row as plain Python objects."""

    @abstractmethod
    def column(self, name: str) -> Iterator[Any]:
        """The values of one column, in order; ``None`` where a row has none."""

    @abstractmethod
    def all_rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Every row, in order, with some of its columns or all of them."""

    def may_have_invalid_text(self, index: int) -> bool:
        """Whether a row's text has to be looked at for parts that are no valid Unicode."""
        return False

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path}, row {index}"


class ParquetFile(DataFile):
    """A Parquet file, kept in Arrow's compact form; rows become Python objects when asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            names = pq.read_schema(path).names
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise DataError(f"{path} has several columns of the name {min(twice)!r}; keep one of them")
            self._table = pq.read_table(path).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from error
        self.columns = tuple(self._table.column_names)
        self._check_text()
        self._convert = _converters(self._table.schema)

    def _check_text(self) -> None:
        """Refuse text that is no UTF-8; Arrow looks at all of it at once, and at single rows only to name one."""
        for name in self.columns:
            try:
                self._table[name].validate(full=True)
            except pa.ArrowException:
                bad = [index for index in range(len(self)) if not _is_valid(self._table[name].slice(index, 1))]
                if not bad:
                    raise DataError(
                        f"{self.path}, column {name!r}: the values are damaged; write the file anew"
                    ) from None
                more = f" ({len(bad)} rows have such text)" if len(bad) > 1 else ""
                raise DataError(
                    f"{self.place(bad[0])}, column {name!r}: has text that is no valid UTF-8{more}; write it as UTF-8, "
                    "or as bytes where it is no text"
                ) from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        return _plain(self._table.slice(index, 1).to_pylist()[0], self._convert)

    def all_rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        names = self.columns if columns is None else [name for name in columns if name in self.columns]
        table = self._table.select(names)
        convert = {name: self._convert[name] for name in names if name in self._convert}
        for start in range(0, len(self), _BATCH):
            rows = (
                table.slice(start, _BATCH).to_pylist() if names else [{} for _ in range(min(_BATCH, len(self) - start))]
            )
            for row in rows:
                yield _plain(row, convert)

    def column(self, name: str) -> Iterator[Any]:
        convert = self._convert.get(name)
        for chunk in self._table[name].chunks:
            for start in range(0, len(chunk), _BATCH):
                values = chunk.slice(start, _BATCH).to_pylist()
                yield from values if convert is None else map(convert, values)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_convert"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._convert = _converters(self._table.schema)


def _converters(schema: pa.Schema) -> dict[str, Convert]:
    kinds = {field.name: arrow_converter(field.type) for field in schema}
    return {name: convert for name, convert in kinds.items() if convert is not None}


def _plain(row: Row, convert: Mapping[str, Convert]) -> Row:
    for name, function in convert.items():
        row[name] = function(row[name])
    return row


def _is_valid(values: pa.ChunkedArray) -> bool:
    try:
        # a slice is checked with the whole of its buffers, a copy with its own values
        pa.concat_arrays(values.chunks).take(pa.array(range(len(values)))).validate(full=True)
    except pa.ArrowException:
        return False
    return True


class JSONFile(DataFile):
    """A JSON-lines file, or a JSON file that holds one array of objects."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._lines: list[int] | None = None
        self._escaped: set[int] = set()
        try:
            content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if path.endswith(".json") and content.lstrip().startswith(b"["):
            self._add_array(content)
        else:
            self._add_lines(content)
        self.doubtful = bool(self._escaped)
        # dict.fromkeys keeps the order of first appearance, which reads better in messages than a sorted set
        self.columns = tuple(dict.fromkeys(key for row in self._rows for key in row))

    def _add_array(self, content: bytes) -> None:
        values = _parsed(content, self.path)
        for index, value in enumerate(values):
            self._add(value, f"{self.path}, element {index}", content)

    def _add_lines(self, content: bytes) -> None:
        self._lines = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            place = f"{self.path}, line {number}"
            self._add(_parsed(line, place), place, line)
            self._lines.append(number)

    def _add(self, value: Any, place: str, content: bytes) -> None:
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object, got {type(value).__name__}")
        if _SURROGATE_ESCAPE.search(content):
            self._escaped.add(len(self._rows))
        self._rows.append(row_values(value) if b"null" in content else value)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return dict(self._rows[index])

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def all_rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        if columns is None:
            return map(dict, self._rows)
        return ({name: row[name] for name in columns if name in row} for row in self._rows)

    def may_have_invalid_text(self, index: int) -> bool:
        return index in self._escaped

    def place(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}" if self._lines is not None else super().place(index)


def _parsed(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} is no valid UTF-8; write the file as UTF-8") from error
    except ValueError as error:  # of a number with too many digits too
        raise DataError(f"{place}: not valid JSON: {error}") from error
    except RecursionError:
        raise DataError(f"{place}: the JSON is nested too deeply to be read") from None


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
        self._doubtful = any(file.doubtful for file in self.files)
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

    def several(self, indices: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Rows one after the other, many times as fast as one by one where they are in the order of the files.

        Args:
            indices: of the rows; None for all of them.
            columns: those that the rows are to have at least; None for all of them.
        """
        everything = (row for file in self.files for row in file.all_rows(columns))
        if indices is None:
            yield from everything
            return
        wanted = list(indices)
        if any(first >= second for first, second in pairwise(wanted)) or len(wanted) * 8 < len(self):
            yield from map(self.__getitem__, wanted)
            return
        chosen = set(wanted)
        yield from (row for index, row in enumerate(everything) if index in chosen)

    def may_have_invalid_text(self, index: int) -> bool:
        """Whether a row's text has to be looked at for parts that are no valid Unicode."""
        if not self._doubtful:
            return False
        file, local = self._locate(index)
        return file.may_have_invalid_text(local)

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
