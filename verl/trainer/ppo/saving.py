"""Saving and restoring all that the rest of a run depends on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.failure import report_failure, score_of
from verl.checkpoint.manager import CheckpointManager, StagedCheckpoint
from verl.checkpoint.state import DATALOADER_STATE, TRAINER_STATE, load_data_state, load_trainer_state, save_state
from verl.config import TrainerConfig
from verl.errors import CheckpointError, WorkerError
from verl.single_controller.base import WorkerGroup
from verl.utils.background import BackgroundTask

logger = logging.getLogger(__name__)

#: an exception that says that a checkpoint could not be written, in the traceback of a worker
_RAISED = f"{CheckpointError.__module__}.{CheckpointError.__qualname__}:"


@dataclass
class _Pending:
    """A save that is not complete yet."""

    staged: StagedCheckpoint
    info: dict[str, Any] = field(default_factory=dict)
    commit: BackgroundTask | None = None


class RunSaver:
    """Writes step directories: each role's engine, the place in the data, the controller's own state.

    A directory appears under its name when the last part of it is on the disk. With ``background`` the roles write
    while the training goes on, and the trainer calls :meth:`poll` after every step.

    Args:
        config: the ``trainer`` section.
        manager: finds, completes and removes step directories.
        groups: directory name -> worker group with ``save_checkpoint``, ``checkpoint_written`` and ``load_checkpoint``.
        background: a role has ``checkpoint.async_save``.
    """

    def __init__(
        self,
        config: TrainerConfig,
        manager: CheckpointManager,
        groups: Mapping[str, WorkerGroup],
        *,
        background: bool = False,
    ) -> None:
        self.config = config
        self.manager = manager
        self.groups = groups
        self.background = background
        self.seconds = 0.0  # the longest that a save has held up the training
        self.saved_step: int | None = None  # of the newest complete checkpoint that this process wrote
        self._pending: _Pending | None = None
        self._loaded: Path | None = None
        self._numbers: dict[str, float] = {}

    # ---- writing ------------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], data_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write the parts of ``step``, which the next :meth:`poll` completes; an earlier save is completed first.

        Args:
            step: the step that is over.
            state: of the controller, in plain values and tensors.
            data_state: the place in the training data.
            metrics: of the step, for ``trainer.best_ckpt_metric``.

        Raises:
            CheckpointError: it cannot be written, and ``trainer.on_save_error`` is ``stop``.
            ConfigError: the step has no metric of that name.
        """
        info = score_of(self.config.best_ckpt_metric, metrics)
        self.finish()
        started = time.perf_counter()
        staged: StagedCheckpoint | None = None
        try:
            staged = self.manager.begin(step)
            for name, group in self.groups.items():
                group.save_checkpoint(str(staged.path / name))
            save_state(staged.path / DATALOADER_STATE, data_state)
            save_state(staged.path / TRAINER_STATE, dict(state))
            self._pending = _Pending(staged, info)
        except BaseException as error:  # noqa: BLE001 - raised again unless it is a failed write
            if staged is not None:
                staged.abort()
            self._failed(step, error)
        self._took(started)

    def poll(self) -> None:
        """Complete a save if all its parts are written; without ``background`` they are."""
        self._advance(wait=not self.background)

    def finish(self) -> None:
        """Wait for a save that is still being written and complete it."""
        self._advance(wait=True)

    def drain(self) -> dict[str, float]:
        """Numbers to log since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    def _advance(self, *, wait: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        try:
            if pending.commit is None:
                written = [self._written(group, wait) for group in self.groups.values()]  # all are asked
                if not all(written):
                    return
                commit = partial(pending.staged.commit, pending.info)  # reads and syncs everything: slow too
                pending.commit = BackgroundTask(commit, name="verl-commit")
            if wait:
                pending.commit.wait()
            if not pending.commit.done():
                return
        except BaseException as error:  # noqa: BLE001 - raised again unless it is a failed write
            pending.staged.abort()
            self._failed(pending.staged.step, error)
            return
        finally:
            self._took(started)
        self._pending = None
        self.saved_step = pending.staged.step

    def _took(self, started: float) -> None:
        """Note how long the training stood still."""
        seconds = time.perf_counter() - started
        self.seconds = max(self.seconds, seconds)

    @staticmethod
    def _written(group: WorkerGroup, wait: bool) -> bool:
        answers = group.checkpoint_written(wait=wait)
        return all(answers) if isinstance(answers, list) else bool(answers)

    def _failed(self, step: int, error: BaseException) -> None:
        self._pending = None
        is_write = isinstance(error, CheckpointError) or (
            isinstance(error, WorkerError) and _RAISED in error.remote_traceback
        )
        if not is_write:
            raise error
        reason = str(error)
        if isinstance(error, WorkerError):
            lines = [line for line in error.remote_traceback.split("\n") if line.startswith(_RAISED)]
            reason = lines[-1].removeprefix(_RAISED).strip() if lines else reason
        report_failure(self.config.on_save_error, step, reason, self.manager.steps(), error)
        self._numbers["checkpoint/failed_saves"] = self._numbers.get("checkpoint/failed_saves", 0.0) + 1.0

    # ---- reading ------------------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """The step directory that ``trainer.resume_mode`` selects."""
        return self.manager.find(self.config.resume_mode, self.config.resume_from_path)

    def load(self, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restore every role; returns the controller's state and the place in the data."""
        logger.info("resuming from %s", directory)
        self._loaded = directory
        state, data_state = load_trainer_state(directory), load_data_state(directory)
        self.restore(directory)
        return state, data_state

    def restore(self, directory: Path) -> None:
        """Put the models and optimizers of every role back."""
        for name, group in self.groups.items():
            group.load_checkpoint(str(directory / name))

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run, written or resumed from; or None."""
        self.finish()
        return self.complete()

    def complete(self) -> Path | None:
        """:meth:`newest`, without waiting for a save that is being written."""
        return self._loaded if self.saved_step is None else self.manager.step_dir(self.saved_step)
