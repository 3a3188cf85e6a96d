"""What every training engine offers; roles and weight sync know engines through these types only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.errors import ConfigError
from verl.utils.background import BackgroundTask
from verl.utils.flops import FlopsCounter
from verl.utils.metrics import MetricSet


@dataclass(frozen=True)
class ParallelLayout:
    """Where this process stands.

    Data-parallel ranks see different rows; ranks of the other dimensions work together on the same rows.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    is_output_rank: bool = True  # whether the controller takes this rank's results for its dp_rank

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work together on the same rows."""
        return self.sp_size * self.tp_size * self.pp_size


@dataclass(frozen=True)
class MicroBatching:
    """How a batch is cut for memory; no choice changes a result. With neither value the batch runs at once.

    Attributes:
        size: rows per micro-batch.
        max_tokens: tokens per micro-batch and rank, padding not counted; rows are regrouped so that micro-batches are
            even. Ranks that share sequences hold their sum together.
        unit: this many neighbouring rows stay together, for losses that compare rows with each other.
    """

    size: int | None = None
    max_tokens: int | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if self.size is not None and self.max_tokens is not None:
            raise ConfigError(f"a micro-batch has either size={self.size} or max_tokens={self.max_tokens}, not both")
        for name, value in (("size", self.size), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"micro-batch {name}={value} must be at least 1")
        if self.unit < 1 or (self.size is not None and self.size % self.unit):
            raise ConfigError(f"micro-batch size={self.size} must be a multiple of the {self.unit} rows of a unit")


@dataclass(frozen=True)
class GlobalBatchInfo:
    """Counts over all data-parallel ranks and micro-batches of one mini-batch: the denominators of its loss.

    Attributes:
        dp_size: number of data-parallel ranks; gradients are averaged over them, so losses are scaled up by it.
        batch_num_tokens: response tokens (``response_mask`` non-zero).
        global_batch_size: rows that have a response token.
    """

    dp_size: int
    batch_num_tokens: int
    global_batch_size: int


#: along each dimension (first index in the whole weight, end, first index in the tensor that holds the slice)
Box = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of this rank in which slices of a weight lie, perhaps beside slices of others and padding.

    Attributes:
        tensor: the live memory.
        boxes: one for each slice.
    """

    tensor: Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class SlicedWeight:
    """What this rank holds of a weight that the engine stores in another form than the weight's own.

    Attributes:
        shape, dtype: of the whole weight.
        stored_in: name of what it is stored in, which other weights may be stored in as well.
        stacked: each entry along the first dimension (an expert) has a tensor of its own, without that dimension.
        held: entry -> this rank's tensor; the entry is 0 where the weight is not stacked.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_in: str
    stacked: bool = False
    held: Mapping[int, HeldTensor] = field(default_factory=dict)


#: what layers with low-rank adapters give: the weight of a plain layer that computes the same; the frozen weight and
#: beside it the matrices ``NAME.lora_A`` and ``NAME.lora_B``; or these matrices alone, and nothing of other layers
WeightForm = Literal["merged", "apart", "adapters"]

#: (model outputs, micro-batch, counts of the mini-batch) -> (scalar to differentiate, metrics of this micro-batch)
LossFn = Callable[[Mapping[str, Tensor], TensorDict, GlobalBatchInfo], tuple[Tensor, MetricSet]]


class TrainEngine(ABC):
    """One model across a worker group. Every method is collective: all ranks call it in the same order.

    A batch has ``input_ids``, ``attention_mask``, ``position_ids`` (B,P+R) and ``response_mask`` (B,R); other fields
    go to the loss untouched. Ranks may have different numbers of rows.
    """

    layout: ParallelLayout
    device: torch.device
    #: operations of the model, for utilisation metrics; None when the engine does not count them
    flops: FlopsCounter | None = None

    @abstractmethod
    def build(self) -> None:
        """Load and shard the model, make optimizer and schedule. Once, before anything else."""

    @abstractmethod
    def forward(
        self,
        batch: TensorDict | Mapping[str, Tensor],
        want: frozenset[str],
        *,
        micro: MicroBatching,
        temperature: float = 1.0,
        adapter: bool = True,
    ) -> dict[str, Tensor]:
        """Compute fields without gradients.

        Args:
            batch: the rows of this rank.
            want: of ``log_probs``, ``entropys``, ``values``: (B,R) float32, 0 where ``response_mask`` is 0; and
                ``scores``: (B,) float32. What a model offers depends on its head.
            micro: how to cut the batch.
            temperature: divides the logits.
            adapter: False runs a model with a low-rank adapter without it.

        Returns:
            The wanted fields, rows in the order of ``batch``, on the engine's device.
        """

    @abstractmethod
    def train_batch(
        self,
        batch: TensorDict | Mapping[str, Tensor],
        loss: LossFn,
        *,
        want: frozenset[str],
        micro: MicroBatching,
        temperature: float = 1.0,
        advance_lr: bool = True,
    ) -> MetricSet:
        """One optimizer step on one mini-batch.

        Args:
            batch: the rows of this rank.
            loss: called once for every micro-batch that has rows.
            want: model outputs that the loss needs.
            micro: how to cut the batch.
            temperature: divides the logits.
            advance_lr: move the learning-rate schedule on afterwards; give False for all but the last mini-batch where
                the schedule counts whole training steps.

        Returns:
            The loss's metrics combined over micro-batches and ranks, the same on every rank, plus ``grad_norm`` (before
            clipping), ``lr`` (used in this step) and ``skipped_steps`` (1 if the gradient was not finite and nothing
            was changed).
        """

    @abstractmethod
    def named_tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Whole parameters (and stored buffers) under Hugging Face names, one at a time.

        Tied parameters come once. Every rank must draw all of them. A tensor may alias the live parameter: read it
        before drawing the next one.

        Args:
            form: what a layer with an adapter gives; without adapters there is only ``"merged"``. Frozen weights come
                before all adapters.
        """

    @abstractmethod
    def local_tensors(self, form: WeightForm = "merged") -> dict[str, Tensor] | None:
        """The live parameters themselves by Hugging Face name, where this process holds them whole; else None."""

    def shards(self) -> Mapping[str, Tensor | SlicedWeight] | None:
        """This rank's parts of all that :meth:`named_tensors` yields; None where they must be put together.

        A ``DTensor`` where the parameter is a sharded weight, a :class:`SlicedWeight` where it is something else. The
        device's, so call it within :meth:`resident`.
        """
        return None

    @abstractmethod
    def save(self, path: str | Path, contents: frozenset[str]) -> None:
        """Write a checkpoint into directory ``path``: any of ``model, optimizer, extra, hf_model``."""

    def start_save(self, path: str | Path, contents: frozenset[str]) -> BackgroundTask:
        """:meth:`save` that writes the state as it is now, beside what the engine does next.

        An engine may still copy its state while it runs passes that only read; it waits before it changes anything. It
        keeps the memory of the copy for the next time, so a second save must wait for the first. An engine that cannot
        copy its state writes it before it returns.

        Raises:
            CheckpointError: an earlier background save is still being written.
        """
        self.save(path, contents)
        return BackgroundTask()

    @abstractmethod
    def load(self, path: str | Path, contents: frozenset[str]) -> None:
        """Read those parts of a checkpoint back, bit for bit; model and optimizer under any number of ranks."""

    @abstractmethod
    def resident(self, *, optimizer: bool) -> AbstractContextManager[Any]:
        """Within the context parameters, and the optimizer state if asked, are on the device; may be nested."""

    @abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds of ``parameters``, of ``gradients`` at the last step, of ``optimizer``, and of
        ``copies for saving`` (in host memory) where background saves keep some."""
