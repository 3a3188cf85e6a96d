"""Step directories of a run: ``global_step_N`` is complete or absent, whatever happens while it is written.

A save writes into a hidden directory beside the final one. When every part is on the disk a marker is added, the
directory is renamed, and last the pointer file is replaced. A crash at any point leaves the previous checkpoint and
its pointer as they were.

With several machines the root must be on a file system that all of them share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.checksums import verify_checksums, write_checksums
from verl.checkpoint.fingerprint import FINGERPRINT_FILE, compare
from verl.errors import CheckpointError, ConfigError
from verl.utils.fs import (
    atomic_write_text,
    directory_bytes,
    ensure_writable_dir,
    format_bytes,
    free_bytes,
    fsync_path,
    fsync_tree,
    write_error,
)
from verl.utils.json_text import dumps_json

if TYPE_CHECKING:
    from verl.checkpoint.fingerprint import Fingerprint
    from verl.config.trainer import RunConfig

logger = logging.getLogger(__name__)

POINTER_FILE = "latest_checkpointed_iteration.txt"
MARKER_FILE = "complete.json"
RESUME_MODES = ("auto", "disable", "resume_path")
_STEP_DIR = re.compile(r"^global_step_(\d+)$")
_HIDDEN_DIR = re.compile(r"^\.global_step_(?P<step>\d+)\.(?P<kind>new|old|del)\.(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+$")
_FOREIGN_GRACE_S = 3600.0  # a save on another machine that wrote nothing for so long is dead
_KEY = "checkpoint directory (trainer.default_local_dir)"


class StagedCheckpoint:
    """A checkpoint that is being written; :meth:`commit` makes it visible, :meth:`abort` removes it.

    Attributes:
        step: its step.
        path: where to write now. It exists, and its name changes with the commit.
    """

    def __init__(self, manager: CheckpointManager, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._manager = manager
        self._open = True

    def commit(self, info: dict[str, Any] | None = None) -> Path:
        """Make the checkpoint the latest one and apply the keep limits.

        Args:
            info: extra JSON values for the marker file; ``score`` is the number that retention compares.

        Returns:
            The final directory.

        Raises:
            CheckpointError: the disk is full or fails; the staged files are removed.
        """
        if not self._open:
            raise CheckpointError(f"the checkpoint of step {self.step} was already committed or aborted")
        self._open = False
        return self._manager._commit(self, info or {})

    def abort(self) -> None:
        """Remove what was written; nothing after a commit."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)


class CheckpointManager:
    """Saves, finds and removes the step directories below one root.

    Args:
        root: ``trainer.default_local_dir``; created, and checked to be writable.
        max_actor_ckpt_to_keep: how many newest ``actor`` directories stay; None keeps all.
        max_critic_ckpt_to_keep: the same for ``critic`` and for a ``reward_model`` that is trained.
        max_ckpt_to_keep: how many newest step directories stay as a whole; None keeps all.
        max_best_ckpt_to_keep: how many of those with the best score stay besides the newest.
        best_mode: ``"max"`` or ``"min"``: which score is better.
        verify: compare the files of a checkpoint with its checksums before it is used.

    Attributes:
        fingerprint: of the run; written into every checkpoint, and what :meth:`require_same_run` compares with. None
            without a run.

    Raises:
        CheckpointError: the root cannot be written.
        ConfigError: a limit below 1.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        max_actor_ckpt_to_keep: int | None = None,
        max_critic_ckpt_to_keep: int | None = None,
        max_ckpt_to_keep: int | None = None,
        max_best_ckpt_to_keep: int = 1,
        best_mode: str = "max",
        verify: bool = True,
    ) -> None:
        self.best_limit = max_best_ckpt_to_keep
        self.best_sign = 1.0 if best_mode == "max" else -1.0
        self.verify = verify
        self._verified: set[Path] = set()
        self.fingerprint: Fingerprint | None = None
        self.part_limits = {
            "actor": max_actor_ckpt_to_keep,
            "critic": max_critic_ckpt_to_keep,
            "reward_model": max_critic_ckpt_to_keep,
        }
        self.step_limit = max_ckpt_to_keep
        for name, limit in (
            ("max_actor_ckpt_to_keep", max_actor_ckpt_to_keep),
            ("max_critic_ckpt_to_keep", max_critic_ckpt_to_keep),
            ("max_ckpt_to_keep", max_ckpt_to_keep),
        ):
            if limit is not None and limit < 1:
                raise ConfigError(f"trainer.{name}={limit}: keep at least 1 checkpoint, or null to keep all")
        self.root = ensure_writable_dir(root, purpose=_KEY)
        self._recover()

    @classmethod
    def from_config(cls, config: RunConfig) -> CheckpointManager:
        """The manager that a ``trainer`` section describes; supervised runs have no limits per role."""
        return cls(
            config.default_local_dir,
            max_actor_ckpt_to_keep=getattr(config, "max_actor_ckpt_to_keep", None),
            max_critic_ckpt_to_keep=getattr(config, "max_critic_ckpt_to_keep", None),
            max_ckpt_to_keep=config.max_ckpt_to_keep,
            max_best_ckpt_to_keep=config.max_best_ckpt_to_keep,
            best_mode=config.best_ckpt_mode,
            verify=config.verify_checkpoint,
        )

    # ------------------------------------------------------------------ saving

    def begin(self, step: int) -> StagedCheckpoint:
        """Open a staging directory for ``step``.

        Raises:
            CheckpointError: less space is free than the previous checkpoint took.
        """
        previous = self.steps()
        if previous:
            needed = directory_bytes(self.step_dir(previous[-1]))
            free = free_bytes(self.root)
            if free < needed:
                raise CheckpointError(
                    f"{_KEY} {str(self.root)!r} has {format_bytes(free)} free and the checkpoint of step "
                    f"{previous[-1]} took {format_bytes(needed)}; free some space or set trainer.max_ckpt_to_keep"
                )
        path = self._hidden(step, "new")
        try:
            path.mkdir()
            if self.fingerprint is not None:
                self.fingerprint.save(path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise write_error(error, self.root, _KEY) from error
        return StagedCheckpoint(self, step, path)

    def require_same_run(self, path: Path, policy: str) -> None:
        """Compare this run with the one that saved a step directory.

        Args:
            path: what the run resumes from.
            policy: ``trainer.on_resume_mismatch``.

        Raises:
            ConfigError: something that decides numbers differs and the policy is ``refuse``; lists all of it.
            CheckpointError: the checkpoint's fingerprint cannot be read.
        """
        if self.fingerprint is not None:
            compare(self.fingerprint, path, path / FINGERPRINT_FILE, policy)

    @contextlib.contextmanager
    def staging(self, step: int, info: dict[str, Any] | None = None) -> Iterator[Path]:
        """Write a checkpoint in a block: committed when the block ends, removed when it raises.

        Args:
            step: the step the state belongs to.
            info: extra JSON values for the marker file.

        Yields:
            The directory to write into.

        Raises:
            CheckpointError: from a failing write; other exceptions pass through.
        """
        staged = self.begin(step)
        try:
            yield staged.path
        except OSError as error:
            staged.abort()
            raise write_error(error, self.root, _KEY) from error
        except BaseException:
            staged.abort()
            raise
        staged.commit(info)

    def _commit(self, staged: StagedCheckpoint, info: dict[str, Any]) -> Path:
        final = self.step_dir(staged.step)
        try:
            parts = sorted(entry.name for entry in staged.path.iterdir() if entry.is_dir())
            marker = {**info, "step": staged.step, "parts": parts}
            write_checksums(staged.path, leave_out=[MARKER_FILE])
            (staged.path / MARKER_FILE).write_text(dumps_json(marker, indent=2, sort_keys=True) + "\n", "utf-8")
            fsync_tree(staged.path)
            replaced = None
            if final.exists():  # the step was saved before: resumed from an earlier one, or saved twice
                replaced = self._hidden(staged.step, "old")
                final.rename(replaced)
            try:
                staged.path.rename(final)
            except OSError:
                if replaced is not None:
                    replaced.rename(final)
                raise
            fsync_path(self.root)
            atomic_write_text(self.root / POINTER_FILE, f"{staged.step}\n")
        except OSError as error:
            shutil.rmtree(staged.path, ignore_errors=True)
            raise write_error(error, self.root, _KEY) from error
        self._verified.discard(final)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._apply_limits(staged.step)
        return final

    # ------------------------------------------------------------------ finding

    def step_dir(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.root / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return [step for step in self._all_steps() if is_complete(self.step_dir(step))]

    def latest_step(self) -> int | None:
        """The step that the pointer file names; None without one.

        Raises:
            CheckpointError: the file cannot be read or holds no number.
        """
        path = self.root / POINTER_FILE
        try:
            text = path.read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the pointer file {str(path)!r} cannot be read: {error}") from error
        if not text.isdecimal():
            raise CheckpointError(f"the pointer file {str(path)!r} holds {text[:40]!r} instead of a step number")
        return int(text)

    def find(self, resume_mode: str = "auto", resume_from_path: str | Path | None = None) -> Path | None:
        """The checkpoint to start from.

        Args:
            resume_mode: ``"auto"``: the latest complete and undamaged one below the root, if any; ``"disable"``: none;
                ``"resume_path"``: the one given.
            resume_from_path: a ``global_step_N`` directory, for ``"resume_path"``.

        Returns:
            A complete step directory, or None to start from the beginning.

        Raises:
            ConfigError: an unknown mode, or ``resume_path`` without a path.
            CheckpointError: the given path is missing, no step directory, incomplete or damaged; or, with ``"auto"``,
                there are traces of checkpoints and none of them can be used.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return self._given(resume_from_path)
        if resume_mode != "auto":
            raise ConfigError(f"trainer.resume_mode={resume_mode!r}; use one of {', '.join(RESUME_MODES)}")
        pointed, problems = None, []
        try:
            pointed = self.latest_step()
        except CheckpointError as error:
            problems.append(str(error))
        present = self._all_steps()
        if pointed is not None and pointed not in present:
            problems.append(
                f"the pointer file names step {pointed}, but {str(self.step_dir(pointed))!r} does not exist"
            )
        # the one that the pointer names, those before it, and last the later ones, of an abandoned branch
        for step in sorted(present, key=lambda s: (s == pointed, pointed is None or s < pointed, s), reverse=True):
            path = self.step_dir(step)
            try:
                self._check(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if step != pointed:
                logger.warning("%s; resuming from %s", "; ".join(problems) or "no pointer file", path)
            return path
        if problems:
            raise CheckpointError(
                f"{'; '.join(problems)}; no checkpoint in {str(self.root)!r} can be used. Set "
                "trainer.resume_mode=disable to start from the beginning, or trainer.resume_mode=resume_path with a "
                "good checkpoint"
            )
        return None

    def _check(self, path: Path) -> None:
        """Raise :class:`CheckpointError` unless the step directory is complete and undamaged."""
        if missing := _what_is_missing(path):
            raise CheckpointError(f"checkpoint {str(path)!r} is incomplete: {missing}")
        if self.verify and path not in self._verified:
            verify_checksums(path, leave_out=[MARKER_FILE])
            self._verified.add(path)

    def _given(self, resume_from_path: str | Path | None) -> Path:
        if not resume_from_path:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
        path = Path(resume_from_path).expanduser().absolute()
        if not path.is_dir():
            raise CheckpointError(f"trainer.resume_from_path={str(resume_from_path)!r}: no such directory")
        if _STEP_DIR.match(path.name) is None:
            inside = sorted(entry.name for entry in path.iterdir() if _STEP_DIR.match(entry.name))
            hint = f"; did you mean {str(path / inside[-1])!r}?" if inside else ""
            raise CheckpointError(
                f"trainer.resume_from_path={str(resume_from_path)!r} is not a global_step_N directory{hint}"
            )
        try:
            self._check(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; choose another one or copy it again") from error
        return path

    # ------------------------------------------------------------------ removing

    def delete(self, path: str | Path) -> bool:
        """Remove a checkpoint, as ``trainer.del_local_ckpt_after_load`` wants after loading, unless it is the only one.

        Returns:
            Whether it was removed.
        """
        path = Path(path).absolute()
        step = step_of(path)
        others = [other for other in self.steps() if self.step_dir(other) != path]
        if path.parent == self.root and not others:
            logger.warning("%s is the only complete checkpoint and is kept", path)
            return False
        trash = path.with_name(self._hidden(step, "del").name)
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def best_step(self) -> int | None:
        """The complete checkpoint with the best score, the earliest of equals; None if none has a score."""
        return next(iter(self._ranked(self.steps())), None)

    def _ranked(self, steps: list[int]) -> list[int]:
        """Those of the steps that have a score, the best first."""
        scores = {step: _marker(self.step_dir(step)).get("score") for step in steps}
        having = {step: float(score) for step, score in scores.items() if score is not None}
        return sorted(having, key=lambda step: (-self.best_sign * having[step], step))

    def _apply_limits(self, current: int) -> None:
        """Remove what the limits no longer cover. ``current``, the best and steps after it, an old branch, stay."""
        saved = [step for step in self._all_steps() if step <= current]
        best = set(self._ranked(saved)[: self.best_limit])
        if self.step_limit is not None:
            for step in saved[: -self.step_limit]:
                if step not in best:
                    self._remove(self.step_dir(step), step)
        saved = [step for step in saved if self.step_dir(step).exists()]
        for part, limit in self.part_limits.items():
            if limit is None:
                continue
            having = [step for step in saved if (self.step_dir(step) / part).is_dir()]
            for step in having[:-limit]:
                if step not in best:
                    self._remove(self.step_dir(step) / part, step)
        for step in saved[:-1]:
            parts = _marker(self.step_dir(step)).get("parts") or []
            if parts and not any((self.step_dir(step) / part).exists() for part in parts):
                self._remove(self.step_dir(step), step)

    def _remove(self, path: Path, step: int) -> None:
        """Rename first, so that a crash in the middle leaves no directory that looks whole and is not."""
        trash = self._hidden(step, "del")
        try:
            path.rename(trash)
            shutil.rmtree(trash)
        except OSError as error:
            logger.warning("could not remove the old checkpoint %s: %s", path, error)
            return
        logger.info("removed the old checkpoint %s", path)

    # ------------------------------------------------------------------ housekeeping

    def _all_steps(self) -> list[int]:
        found = (_STEP_DIR.match(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def _hidden(self, step: int, kind: str) -> Path:
        return self.root / f".global_step_{step}.{kind}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def _recover(self) -> None:
        """Undo what saves that died left behind, but leave alone a save that another live process is doing."""
        for entry in sorted(self.root.iterdir()):
            match = _HIDDEN_DIR.match(entry.name)
            if match is None or not entry.is_dir():
                continue
            if _is_running(entry, match.group("host"), int(match.group("pid"))):
                logger.warning("%s belongs to a running process; is another run using this directory?", entry)
                continue
            final = self.step_dir(int(match.group("step")))
            if match.group("kind") == "old" and not final.exists():
                entry.rename(final)  # died between the two renames of a replacement
                logger.warning("restored the checkpoint %s after an interrupted save", final)
                continue
            shutil.rmtree(entry, ignore_errors=True)
            logger.warning("removed %s, left by an interrupted save", entry.name)


def step_of(path: str | Path) -> int:
    """The step in the name of a ``global_step_N`` directory.

    Raises:
        CheckpointError: the name has another form.
    """
    match = _STEP_DIR.match(Path(path).name)
    if match is None:
        raise CheckpointError(f"{str(path)!r} is not a global_step_N directory")
    return int(match.group(1))


def is_complete(path: Path) -> bool:
    """Whether a step directory has its marker and every part that the marker lists."""
    return path.is_dir() and not _what_is_missing(path)


def _what_is_missing(path: Path) -> str:
    """Why a step directory is not complete; empty if it is."""
    try:
        marker = _read_marker(path)
    except CheckpointError as error:
        return str(error)
    missing = [part for part in marker.get("parts", []) if not (path / part).is_dir()]
    return f"it lacks {', '.join(missing)}" if missing else ""


def _read_marker(path: Path) -> dict[str, Any]:
    """The marker of a step directory.

    Raises:
        CheckpointError: it is not there, or not what a save writes; the message is a part of a sentence.
    """
    try:
        marker = json.loads((path / MARKER_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"it has no readable {MARKER_FILE}, which a finished save writes last") from None
    if not isinstance(marker, dict):
        raise CheckpointError(f"its {MARKER_FILE} holds a {type(marker).__name__} instead of an object")
    parts, step, score = marker.get("parts", []), marker.get("step"), marker.get("score")
    if not isinstance(parts, list) or not all(isinstance(p, str) and p and Path(p).name == p for p in parts):
        raise CheckpointError(f"its {MARKER_FILE} has parts={parts!r} instead of a list of names")
    if step is not None and (isinstance(step, bool) or step != step_of(path)):
        raise CheckpointError(f"its {MARKER_FILE} is of step {step!r}")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise CheckpointError(f"its {MARKER_FILE} has score={score!r} instead of a number")
    return marker


def _marker(path: Path) -> dict[str, Any]:
    """The marker of a step directory, empty where it cannot be used."""
    try:
        return _read_marker(path)
    except CheckpointError:
        return {}


def _is_running(entry: Path, host: str, pid: int) -> bool:
    """Whether the process that made a hidden directory may still be writing it."""
    if host != socket.gethostname():  # cannot ask another machine: recent files count as life
        with contextlib.suppress(OSError):
            return time.time() - max(path.stat().st_mtime for path in (entry, *entry.rglob("*"))) < _FOREIGN_GRACE_S
        return True
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
