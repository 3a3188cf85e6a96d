"""The exceptions of ``verl``: one tree, so that a caller can catch as much or as little as it wants.

Every message says what is wrong, shows the offending value and names the remedy. All of them survive
pickling, because most are raised in one process and read in another.
"""

from __future__ import annotations


class VerlError(Exception):
    """Base of every error that the library raises on purpose."""


class ConfigError(VerlError, ValueError):
    """The configuration is wrong: an unknown key, a bad value or options that contradict each other."""


class DataError(VerlError, ValueError):
    """A data file, a row or a batch is not what it must be."""


class SchemaError(DataError):
    """A batch lacks a field, or a field has the wrong shape or dtype for the stage that reads it."""


class RolloutError(VerlError, RuntimeError):
    """Generation failed."""


class ReplicaError(RolloutError):
    """A rollout server cannot serve now, for a reason that is not the request's: another one may."""


class LostProcessError(RolloutError):
    """A process that generates, or runs agent loops, died or gave no answer: new ones may do better."""


class WeightSyncError(VerlError, RuntimeError):
    """Weights could not be handed from training to generation, or arrived changed."""


class RewardError(VerlError, RuntimeError):
    """Rewards could not be computed, or too many of them failed for the run to go on."""


class ScoreError(RewardError):
    """A score is no finite number; the message names who gave it, and for what."""


class TrainingError(VerlError, RuntimeError):
    """Training cannot go on with the numbers that it has, such as a loss that is not finite."""


class OutputError(VerlError, RuntimeError):
    """What a program was asked to print could not be written."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint could not be written or read."""


class WorkerError(VerlError, RuntimeError):
    """A worker raised or died.

    Args:
        role: name of the role or worker class, for example ``"actor_rollout_ref"``.
        rank: global rank of the worker in its group; -1 when unknown.
        method: the remote method that was running.
        remote_traceback: traceback text of the worker, or what is known about its death.
    """

    def __init__(self, role: str, rank: int, method: str, remote_traceback: str) -> None:
        super().__init__(role, rank, method, remote_traceback)  # args = pickling state
        self.role = role
        self.rank = rank
        self.method = method
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"worker {self.role!r} rank {self.rank} failed in {self.method}():\n{self.remote_traceback.rstrip()}"


class WorkerInputError(WorkerError, ConfigError):
    """A worker was given something wrong, such as a model that does not load: new workers would say the same.

    ``remote_traceback`` is the message alone.
    """

    def __str__(self) -> str:
        return f"{self.remote_traceback.rstrip()} (told by worker {self.role!r} rank {self.rank} in {self.method}())"
