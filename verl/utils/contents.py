"""Digests of files and model directories, which say whether a run reads the same inputs as another run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: files up to this size are hashed as a whole, larger ones by their size and by evenly spaced samples
WHOLE_BYTES = 64 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10
_CHUNK = 1 << 20
_READERS = 16

#: what a model and its tokenizer are made of; everything else in the directory (README, logs) plays no part
_MODEL_SUFFIXES = frozenset(
    {".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt", ".jinja", ".py", ".tiktoken"}
    | {".distcp", ".metadata"}
)
#: written beside a model by the program that trained it; says nothing about what the model computes
PROVENANCE_FILE = "training.json"


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's content.

    A file above :data:`WHOLE_BYTES` is represented by its size, its first and last bytes, and 256 samples of 64 KiB
    between them, so that it takes well under a second.
    """
    digest = hashlib.sha256()
    with Path(path).open("rb", buffering=0) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size <= WHOLE_BYTES:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
            return digest.hexdigest()
        digest.update(f"sampled {size} ".encode())
        for index in range(_SAMPLES):
            handle.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_digests(path: str) -> dict[str, str]:
    """Digest of each file of a model directory, by name.

    A hub name gives the commit of the cached snapshot, or only the name where nothing is cached.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        files = list(_model_files(directory))
        with ThreadPoolExecutor(_READERS) as readers:  # a shared file system answers each sample late
            return {file.name: digest for file, digest in zip(files, readers.map(file_digest, files), strict=True)}
    return {"hub": f"{path}@{_cached_commit(path) or 'unknown'}"}


def _model_files(directory: Path) -> Iterator[Path]:
    for file in sorted(directory.iterdir()):
        known = file.suffix in _MODEL_SUFFIXES or file.name in _MODEL_SUFFIXES
        if known and file.name != PROVENANCE_FILE and file.is_file():
            yield file


def _cached_commit(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None


def code_digests(spec: str) -> dict[str, str]:
    """Digest of the code or settings that a key names.

    Args:
        spec: a file, ``file.py:name``, ``pkg://package.module``, ``package.module.name``, or modules separated by
            commas. A module without a source file gives nothing.
    """
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        file = _code_file(part)
        if file is not None:
            found[file.name] = file_digest(file)
    return found


def _code_file(spec: str) -> Path | None:
    for candidate in (spec, spec.rpartition(":")[0]):
        path = Path(candidate).expanduser()
        if candidate and path.is_file():
            return path
    name = spec.removeprefix("pkg://").partition(":")[0]
    while name:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            found = None
        if found is not None:
            return Path(found.origin) if found.origin and Path(found.origin).is_file() else None
        name = name.rpartition(".")[0]
    return None
