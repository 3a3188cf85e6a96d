"""Checksums of the files of a checkpoint, in the format of ``sha256sum``, so that ``sha256sum -c`` checks them too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl.errors import CheckpointError

CHECKSUM_FILE = "checksums.sha256"
_THREADS = 8  # hashing and reading both release the interpreter lock
_CHUNK = 1 << 20


def write_checksums(root: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write :data:`CHECKSUM_FILE` over every file below ``root``, except the top-level names in ``leave_out``."""
    names = sorted(set(_files(root)) - {CHECKSUM_FILE, *leave_out})
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(root / name), names))
    text = "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
    (root / CHECKSUM_FILE).write_text(text, "utf-8")


def verify_checksums(root: Path) -> None:
    """Compare the files below ``root`` with :data:`CHECKSUM_FILE`; without one there is nothing to compare.

    Raises:
        CheckpointError: a file is missing, cannot be read or has changed; names all of them.
    """
    path = root / CHECKSUM_FILE
    if not path.is_file():
        return
    expected: dict[str, str] = {}
    try:
        for line in path.read_text("utf-8").splitlines():
            digest, _, name = line.partition("  ")
            expected[name] = digest
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error

    def check(name: str) -> str | None:
        try:
            return None if _digest(root / name) == expected[name] else f"{name} has changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"

    with ThreadPoolExecutor(_THREADS) as pool:
        wrong = [problem for problem in pool.map(check, expected) if problem]
    if wrong:
        raise CheckpointError(
            f"checkpoint {str(root)!r} is damaged, its files do not match {CHECKSUM_FILE}: {'; '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}"
        )


def _files(root: Path) -> Iterator[str]:
    for folder, _, files in os.walk(root):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), root)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
