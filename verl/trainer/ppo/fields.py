"""Access to a batch's tensors for code that needs them to be there."""

from __future__ import annotations

from tensordict import TensorDict

from verl.errors import SchemaError
from verl.protocol import DataProto


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
