"""Access to the fields of a batch for code that needs them to be there."""

from __future__ import annotations

from collections.abc import Iterable

from tensordict import TensorDict

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.schema import OPTIONAL_COLUMNS, STAGES


def tensors_of(data: DataProto) -> TensorDict:
    """The tensors of ``data``.

    Raises:
        SchemaError: it has none.
    """
    if data.batch is None:
        raise SchemaError(
            f"the batch has no tensors, only {sorted(data.non_tensor_batch)}; generate responses before this stage"
        )
    return data.batch


def stage_batch(data: DataProto, stage: str, more: Iterable[str] = ()) -> DataProto:
    """What the workers of a stage read of a batch; the tensors are shared with it.

    Args:
        data: the step's batch.
        stage: a name of :data:`verl.schema.STAGES`.
        more: fields that this configuration reads too; those that the batch lacks are optional.

    Raises:
        SchemaError: a field of the stage is missing.
    """
    present = {*tensors_of(data).keys(), *data.non_tensor_batch}
    optional = (*OPTIONAL_COLUMNS.get(stage, ()), *more)
    names = dict.fromkeys([*STAGES[stage], *(name for name in optional if name in present)])
    objects = [name for name in names if name in data.non_tensor_batch]
    return data.select(batch_keys=[n for n in names if n not in objects], non_tensor_batch_keys=objects)
