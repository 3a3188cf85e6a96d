"""Checkpoints of a run whose ranks all run the same loop: the first one owns the step directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from verl.checkpoint.failure import report_failure, score_of
from verl.checkpoint.manager import CheckpointManager, StagedCheckpoint
from verl.checkpoint.state import DATALOADER_STATE, TRAINER_STATE, load_data_state, load_trainer_state, save_state
from verl.errors import CheckpointError, VerlError
from verl.utils.background import BackgroundTask
from verl.utils.distributed import get_world_size
from verl.workers.engine.base import TrainEngine

if TYPE_CHECKING:
    from verl.config.sft import SFTTrainerConfig

T = TypeVar("T")


def on_rank_zero(action: Callable[[], T] | None) -> T:
    """The first rank's result on every rank; its failure is raised everywhere. Collective.

    Args:
        action: what the first rank does; the others give None or the same. The result must pickle.

    Raises:
        VerlError: the one that the action raised.
    """
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert action is not None
        try:
            outcome[0] = action()
        except VerlError as error:
            outcome[1] = error
    if get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def everywhere(flag: bool, problem: str | None = None) -> bool:
    """Whether the flag is true on every rank. Collective.

    Raises:
        CheckpointError: a rank has a problem.
    """
    answers: list[Any] = [(flag, problem)]
    if get_world_size() > 1:
        answers = [None] * get_world_size()
        dist.all_gather_object(answers, (flag, problem))
    problems = [text for _, text in answers if text]
    if problems:
        raise CheckpointError(problems[0])
    return all(done for done, _ in answers)


class SFTSaver:
    """Saves and restores an engine and the place in the data; every method is collective.

    Args:
        config: the ``trainer`` section.
        engine: of this rank.
        manager: step directories; None on all ranks but the first.
    """

    def __init__(self, config: SFTTrainerConfig, engine: TrainEngine, manager: CheckpointManager | None) -> None:
        self.config = config
        self.engine = engine
        self.manager = manager
        self.background = config.checkpoint.async_save
        self.seconds = 0.0  # the longest that a save has held up the training
        self.failed = 0
        self._staged: StagedCheckpoint | None = None
        self._step: int | None = None
        self._written = BackgroundTask()
        self._commit: BackgroundTask | None = None  # of the first rank
        self._committing = False
        self._info: dict[str, Any] = {}
        self._newest: Path | None = None  # complete, of this run

    def save(
        self, step: int, state: Mapping[str, Any], data_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write the parts of ``step``, which the next :meth:`poll` completes; an earlier save is completed first."""
        self.finish()
        self._info = score_of(self.config.best_ckpt_metric, metrics)
        started = time.perf_counter()
        self._step = step
        contents = frozenset(self.config.checkpoint.save_contents)
        try:
            path = Path(on_rank_zero(self._begin))
            if self.background:
                self._written = self.engine.start_save(path, contents)
            else:
                self.engine.save(path, contents)

            def save_states() -> None:
                save_state(path / DATALOADER_STATE, dict(data_state))
                save_state(path / TRAINER_STATE, dict(state))

            on_rank_zero(save_states)
        except CheckpointError as error:
            self._failed(error)
        self.seconds = max(self.seconds, time.perf_counter() - started)

    def _begin(self) -> str:
        assert self.manager is not None
        assert self._step is not None
        self._staged = self.manager.begin(self._step)
        return str(self._staged.path)

    def poll(self) -> None:
        """Complete a save if every rank has written its part."""
        self._advance(wait=not self.background)

    def finish(self) -> None:
        """Wait for a save that is still being written and complete it."""
        self._advance(wait=True)

    def _advance(self, *, wait: bool) -> None:
        if self._step is None:
            return
        started = time.perf_counter()
        try:
            if not self._committing:
                if not self._is_written(wait):
                    return
                self._committing = True
                if self._staged is not None:
                    staged, info = self._staged, self._info
                    self._commit = BackgroundTask(lambda: staged.commit(info), name="verl-commit")
            done = on_rank_zero(lambda: self._is_committed(wait))
            if done is None:
                return
            self._newest = Path(done)
        except CheckpointError as error:
            self._failed(error)
        self._step, self._staged, self._commit, self._committing = None, None, None, False
        self.seconds = max(self.seconds, time.perf_counter() - started)

    def _is_written(self, wait: bool) -> bool:
        done, problem = False, None
        try:
            if wait:
                self._written.wait()
            done = self._written.done()
        except CheckpointError as error:
            problem = str(error)
        return everywhere(done, problem)

    def _is_committed(self, wait: bool) -> str | None:
        """The directory of a checkpoint that is complete now."""
        assert self._commit is not None
        assert self.manager is not None
        assert self._step is not None
        if wait:
            self._commit.wait()
        return str(self.manager.step_dir(self._step)) if self._commit.done() else None

    def _failed(self, error: CheckpointError) -> None:
        step, staged = self._step, self._staged
        self._step, self._staged, self._commit, self._committing = None, None, None, False
        self._written = BackgroundTask()
        assert step is not None
        if staged is not None:
            staged.abort()
        complete = on_rank_zero(lambda: self.manager.steps() if self.manager is not None else [])
        report_failure(self.config.on_save_error, step, str(error), complete, error)
        self.failed += 1

    def load(self) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
        """Restore the engine from the checkpoint that ``trainer.resume_mode`` selects.

        Returns:
            The directory, the trainer's state and the place in the data; None to start from the beginning.
        """
        name = on_rank_zero(self._find)
        if name is None:
            return None
        self._newest = path = Path(name)
        self.restore(path)
        return path, load_trainer_state(path), load_data_state(path)

    def restore(self, path: Path) -> None:
        """Put the model and the optimizer back."""
        self.engine.load(path, frozenset(self.config.checkpoint.load_contents))

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run, written or resumed from; or None."""
        self.finish()
        return self.complete()

    def complete(self) -> Path | None:
        """:meth:`newest`, without waiting for a save that is being written."""
        return self._newest

    def _find(self) -> str | None:
        assert self.manager is not None
        found = self.manager.find(self.config.resume_mode, self.config.resume_from_path)
        return None if found is None else str(found)
