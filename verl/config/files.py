"""Checks of the files that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl.errors import ConfigError

#: suffixes of files with weights, in the forms that Transformers reads
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


def looks_local(path: str) -> bool:
    """Return whether ``path`` is a directory rather than a Hugging Face id (``name`` or ``owner/name``)."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or path.count("/") > 1


def missing_file(key: str, path: str | None, *, directory: bool = False) -> str | None:
    """Return a sentence if ``path`` is given and is not there, else ``None``."""
    if not path:
        return None
    if "://" in path:
        return f"{key}: only local paths are read; copy it to this machine first"
    full = Path(path).expanduser()
    if not full.exists():
        return f"{key}: no such {'directory' if directory else 'file'} (seen from {Path.cwd()})"
    if full.is_dir() != directory:
        return (
            f"{key}: is a {'directory' if full.is_dir() else 'file'}, expected a {'directory' if directory else 'file'}"
        )
    return None


def missing_model(key: str, path: str | None, *, needs_config: bool = True) -> str | None:
    """Return a sentence if ``path`` looks like a model directory and is none, else ``None``."""
    if not path or not (looks_local(path) or Path(path).is_dir()):
        return None
    if problem := missing_file(f"{key}={path}", path, directory=True):
        return problem
    if needs_config and not (Path(path).expanduser() / "config.json").is_file():
        return f"{key}={path}: has no config.json, so it is not a Hugging Face model directory"
    if needs_config and not any(file.suffix in _WEIGHTS for file in Path(path).expanduser().iterdir()):
        return f"{key}={path}: has no weights (a file *.safetensors or *.bin); was it copied or downloaded whole?"
    return None


def raise_problems(title: str, problems: Iterable[str | None]) -> None:
    """Raise ``ConfigError`` with all problems, each once, if there are any."""
    found = list(dict.fromkeys(p for p in problems if p))
    if found:
        raise ConfigError(f"{title}:\n" + "\n".join(f"  {p}" for p in found))
