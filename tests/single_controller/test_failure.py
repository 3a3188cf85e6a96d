"""What a worker's exception becomes for the controller."""

from __future__ import annotations

import pickle

import pytest

from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RolloutError,
    SchemaError,
    TrainingError,
    WeightSyncError,
    WorkerError,
    WorkerInputError,
)
from verl.single_controller.base.failure import worker_error


def report(error: Exception) -> WorkerError:
    try:
        raise error
    except Exception as caught:
        # as it arrives from another process
        return pickle.loads(pickle.dumps(worker_error("actor", 3, "init_model", caught, "elsewhere.py")))


@pytest.mark.parametrize("error", [ConfigError("model.path=x: no"), DataError("row 3: no")])
def test_wrong_input_is_its_message_and_an_error_of_the_configuration(error: Exception) -> None:
    said = report(error)
    assert isinstance(said, WorkerInputError)
    assert isinstance(said, ConfigError)
    assert str(said) == f"{error} (told by worker 'actor' rank 3 in init_model())"
    assert (said.role, said.rank, said.method) == ("actor", 3, "init_model")


@pytest.mark.parametrize("kind", [CheckpointError, RolloutError, TrainingError, WeightSyncError])
def test_what_the_library_says_needs_no_traceback(kind: type[Exception]) -> None:
    said = report(kind("the disk is full"))
    assert not isinstance(said, ConfigError)
    assert str(said) == f"worker 'actor' rank 3 failed in init_model():\nverl.errors.{kind.__name__}: the disk is full"


def failed_engine() -> RolloutError:
    error = RolloutError("the engine failed")
    error.__cause__ = ValueError("inside of it")
    return error


@pytest.mark.parametrize("error", [KeyError("x"), SchemaError("no field 'y'"), failed_engine()])
def test_defects_keep_their_traceback(error: Exception) -> None:
    said = report(error)
    assert type(said) is WorkerError
    assert "test_failure.py" in said.remote_traceback
