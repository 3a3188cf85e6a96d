"""Checksums of the files of a checkpoint, in the format of ``sha256sum``, so that ``sha256sum -c`` checks them too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl.errors import CheckpointError

CHECKSUM_FILE = "checksums.sha256"
_NOTE = ".written."
_THREADS = 8  # hashing and reading both release the interpreter lock
_CHUNK = 1 << 20


def write_checksums(root: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write :data:`CHECKSUM_FILE` over every file below ``root``, except the top-level names in ``leave_out``.

    What :func:`record_checksums` noted is taken over and the notes go; the other files are read.

    Raises:
        OSError: a file cannot be read, or one that was noted is not there.
    """
    known = {}
    for note in root.rglob(f"{_NOTE}*"):
        for name, digest in _parse(note).items():
            path = note.parent / name
            path.stat()
            known[os.path.relpath(path, root)] = digest
        note.unlink()
    names = sorted(set(_files(root)) - {CHECKSUM_FILE, *leave_out})
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(lambda name: known.get(name) or _digest(root / name), names))
    (root / CHECKSUM_FILE).write_text(_format(dict(zip(names, digests, strict=True))), "utf-8")


def record_checksums(directory: Path, writer: str, digests: Mapping[str, str]) -> None:
    """Note checksums that were computed while the files were written, so that nobody needs to read them again.

    Args:
        directory: of the notes; part of what :func:`write_checksums` will be called for.
        writer: who notes; a name of its own for each process.
        digests: by file name, seen from ``directory``.
    """
    (directory / f"{_NOTE}{writer}").write_text(_format(digests), "utf-8")


def forget_recorded(directory: Path) -> None:
    """Remove notes of :func:`record_checksums` that belong to an earlier save."""
    for note in directory.glob(f"{_NOTE}*"):
        note.unlink()


def verify_checksums(root: Path, *, leave_out: Collection[str] = ()) -> None:
    """Compare the files below ``root`` with :data:`CHECKSUM_FILE`, which must name all but those in ``leave_out``.

    Raises:
        CheckpointError: a file is missing, cannot be read, has changed or is not named; or there are no checksums.
    """
    path = root / CHECKSUM_FILE
    try:
        expected = _parse(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read, so the checkpoint cannot be verified: {error}. Copy the "
            "checkpoint again, or use it unchecked with trainer.verify_checkpoint=False"
        ) from error
    unnamed = sorted(set(_files(root)) - expected.keys() - {CHECKSUM_FILE, *leave_out})
    if unnamed:
        raise CheckpointError(
            f"checkpoint {str(root)!r} is damaged, or files were added: {CHECKSUM_FILE} does not name "
            f"{', '.join(unnamed[:3])}{f' and {len(unnamed) - 3} more' if len(unnamed) > 3 else ''}; copy it again, "
            "remove what was added, or use it unchecked with trainer.verify_checkpoint=False"
        )

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


def _format(digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def _parse(path: Path) -> dict[str, str]:
    """Digests by name."""
    lines = path.read_bytes().decode("utf-8").split("\n")
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines if line)}


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
