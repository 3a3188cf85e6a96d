"""What a run needs of memory: predicted from the configuration alone, and measured phase by phase.

The prediction counts what one rank holds, the first, which has the largest shards. Parameters, gradients, optimizer
state, buckets and the key-value cache of full batches follow from shapes; activations are an estimate from the usual
decoder layer. What Python, CUDA and the libraries take is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig, PPOConfig
from verl.config.base import MicroBatch
from verl.models.logprobs import CHUNK_NUMBERS_CPU, CHUNK_NUMBERS_DEVICE
from verl.models.shape import ModelShape, model_shape
from verl.utils.device import device_memory_stats, reset_peak_memory
from verl.workers.engine.fsdp.sharding import Precision
from verl.workers.rollout.hf.packed_linears import PACKED_FROM
from verl.workers.rollout.settings import (
    cache_itemsize,
    resolve_dtype,
    sglang_cpu_cache_tokens,
    vllm_cpu_cache_bytes,
)

#: phases of a step, in order; ``load`` is the state before the first
PHASES = ("load", "generate", "log_prob", "update", "sync")
#: what is computed from shapes, and what is estimated
EXACT = frozenset(
    {"parameters", "gradients", "optimizer", "kv cache", "rollout weights", "bucket", "copies for saving"}
)
#: end of the name of a measured part that an engine takes by its share of the device, whatever batches need
RESERVED = ", reserved"
#: needed while a role computes, one role after the other
_PASSING = frozenset({"gradients", "gathered layers", "activations", "logits chunk"})
#: state tensors of an optimizer as large as the parameter
_OPTIMIZER_STATES = {"Adam": 2, "AdamW": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adamax": 2, "NAdam": 2, "RAdam": 2}


@dataclass(frozen=True)
class Item:
    """Memory of one kind in one phase on one rank.

    Attributes:
        role: ``actor``, ``ref``, ``critic``, ``reward_model`` or ``rollout``.
        part: what it is for.
        phase: of :data:`PHASES`.
        nbytes: how much.
        host: whether it lies in host memory while the models run on an accelerator.
    """

    role: str
    part: str
    phase: str
    nbytes: int
    host: bool = False

    @property
    def exact(self) -> bool:
        """Whether it follows from shapes."""
        return self.part in EXACT


@dataclass(frozen=True)
class _Role:
    """A model of the run and how it is used."""

    name: str
    shape: ModelShape
    model: ModelConfig
    fsdp: FSDPConfig
    optim: OptimConfig | None
    update: MicroBatch | None
    forward: MicroBatch
    logits: bool
    copied: frozenset[str] = frozenset()  # parts of which background saves keep a copy


def predict(config: PPOConfig, device: str = "cpu", shapes: Mapping[str, ModelShape] | None = None) -> list[Item]:
    """Predict what one rank holds in each phase.

    Args:
        config: of the run.
        device: ``"cpu"`` or ``"cuda"``; ``auto`` types depend on it.
        shapes: sizes of the models by role; those that are missing are read from the models' ``config.json``.

    Raises:
        ConfigError: a model's configuration cannot be read.
    """
    kind, world = torch.device(device), config.trainer.world_size
    sizes = dict(shapes or {})
    items: list[Item] = []
    for role in _roles(config, sizes):
        items += _role_items(role, config, kind, world)
    items += _rollout_items(config, sizes["actor"], kind, world)
    return [item for item in items if item.nbytes]


def _roles(config: PPOConfig, shapes: dict[str, ModelShape]) -> Iterator[_Role]:
    arr = config.actor_rollout_ref

    def shape(name: str, model: ModelConfig, head: str) -> ModelShape:
        return shapes[name] if name in shapes else shapes.setdefault(name, model_shape(model, head))

    trains = not config.trainer.val_only
    actor = shape("actor", arr.model, "lm")
    forward = arr.rollout.log_prob_micro_batch()
    yield _Role(
        "actor",
        actor,
        arr.model,
        arr.actor.fsdp_config,
        arr.actor.optim,
        arr.actor.micro_batch(),
        forward,
        True,
        _copied(config, arr.actor.checkpoint),
    )
    # with adapters the actor is its own reference
    if config.use_reference_policy and trains and arr.model.lora_rank == 0:
        shapes.setdefault("ref", actor)
        ref = arr.ref
        yield _Role("ref", actor, arr.model, ref.fsdp_config, None, None, ref.log_prob_micro_batch(), True)
    if config.use_critic and trains:
        critic = config.critic
        yield _Role(
            "critic",
            shape("critic", critic.model, "value"),
            critic.model,
            critic.fsdp_config,
            critic.optim,
            critic.micro_batch(),
            critic.forward_micro_batch(),
            False,
            _copied(config, critic.checkpoint),
        )
    if config.reward_model.enable and not config.reward_model.implicit:
        reward = config.reward_model
        sized = shape("reward_model", reward.model, "classifier")
        yield _Role("reward_model", sized, reward.model, reward.fsdp_config, None, None, reward.micro_batch(), False)


def _copied(config: PPOConfig, checkpoint: CheckpointConfig) -> frozenset[str]:
    saves = checkpoint.async_save and config.trainer.save_freq > 0
    return frozenset(checkpoint.save_contents) if saves else frozenset()


def _role_items(role: _Role, config: PPOConfig, device: torch.device, world: int) -> Iterator[Item]:
    fsdp, shape = role.fsdp, role.shape
    precision = Precision.of(fsdp, device, trained=role.optim is not None)
    shards = world if fsdp.fsdp_size <= 0 or fsdp.fsdp_size >= world else fsdp.fsdp_size
    master, compute = precision.master.itemsize, precision.compute.itemsize
    sharded = world > 1 or fsdp.offload_policy or compute != master
    held, trained = shape.shard(shards), shape.shard(shards, trained=True)
    accelerator = device.type != "cpu"
    states = 0 if role.optim is None else _OPTIMIZER_STATES.get(role.optim.optimizer, 2)
    uses = (
        {"log_prob"} | ({"update"} if role.optim is not None else set()) | ({"sync"} if role.name == "actor" else set())
    )
    for phase in PHASES:
        used = phase in uses
        off_host = accelerator and (fsdp.offload_policy or (fsdp.param_offload and not used))
        yield Item(role.name, "parameters", phase, held * master, off_host)
        if states and phase != "load":
            in_update = phase == "update" and not fsdp.offload_policy
            off_host = accelerator and (fsdp.offload_policy or (fsdp.optimizer_offload and not in_update))
            yield Item(role.name, "optimizer", phase, states * trained * master, off_host)
    copied = (shape.shard(shards, trained=True) if role.model.lora_rank else held) * ("model" in role.copied)
    copied += states * trained * ("optimizer" in role.copied)
    for phase in PHASES[1:]:  # made by the first save
        yield Item(role.name, "copies for saving", phase, copied * master, accelerator)
    if role.update is not None:
        yield Item(role.name, "gradients", "update", trained * master, accelerator and fsdp.offload_policy)
    for phase, micro in (("log_prob", role.forward), ("update", role.update)):
        if micro is None:
            continue
        tokens, results = _tokens(role, config, micro, world)
        if sharded:
            everything = phase == "update" and not fsdp.reshard_after_forward
            root = shape.count - shape.layers * shape.layer_parameters
            # the layer at work and the next one, which is gathered meanwhile
            gathered = shape.count if everything else max(root, 0) + min(2, shape.layers) * shape.layer_parameters
            yield Item(role.name, "gathered layers", phase, gathered * compute)
        yield Item(role.name, "activations", phase, _activations(role, tokens, compute, training=phase == "update"))
        if role.logits:
            limit = CHUNK_NUMBERS_DEVICE if accelerator else CHUNK_NUMBERS_CPU
            numbers = min(results * shape.vocabulary, max(limit, shape.vocabulary))
            copies = 3 if phase == "update" else 2  # log-softmax, the products, and gradients of them
            yield Item(role.name, "logits chunk", phase, numbers * 4 * copies)


def _tokens(role: _Role, config: PPOConfig, micro: MicroBatch, world: int) -> tuple[int, int]:
    """Tokens and response tokens of a full micro-batch on one rank, all samples at their longest."""
    sequence = max(1, role.fsdp.ulysses_sequence_parallel_size)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.rows_per_prompt * sequence // world
    if role.update is micro:
        mini = config.critic.ppo_mini_batch_size if role.name == "critic" else _actor_mini_batch(config)
        samples = mini * config.actor_rollout_ref.rollout.rows_per_prompt * sequence // world
    rows = min(samples, micro.size or samples)
    tokens = rows * (prompt + response)
    if micro.max_tokens is not None:
        tokens = min(samples * (prompt + response), micro.max_tokens * sequence)
    results = tokens * response // (prompt + response)
    return -(-tokens // sequence), -(-results // sequence)


def _actor_mini_batch(config: PPOConfig) -> int:
    return config.actor_rollout_ref.actor.ppo_mini_batch_size


def _activations(role: _Role, tokens: int, itemsize: int, *, training: bool) -> int:
    """Estimate for the usual decoder: norms, projections, attention, gated feed-forward."""
    shape = role.shape
    projected = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = 6 * shape.hidden + 2 * projected + 4 * shape.intermediate
    if not training:  # nothing is kept; the widest point of one layer
        numbers = 2 * shape.hidden + max(projected, 3 * shape.intermediate)
    elif role.model.enable_gradient_checkpointing:
        numbers = shape.layers * shape.hidden + layer
    else:
        numbers = shape.layers * layer
    if training and role.model.enable_gradient_checkpointing and role.model.enable_activation_offload:
        numbers = layer + shape.hidden
    return tokens * numbers * itemsize


def _rollout_items(config: PPOConfig, shape: ModelShape, device: torch.device, world: int) -> Iterator[Item]:
    arr = config.actor_rollout_ref
    rollout, actor = arr.rollout, arr.actor
    dtype = resolve_dtype(rollout.dtype, device)
    parallel = rollout.tensor_model_parallel_size
    master = Precision.of(actor.fsdp_config, device, trained=True).master
    # one rank with the type of the training weights reads them in place
    aliased = rollout.name == "hf" and rollout.mode == "sync" and world == 1 and dtype == master
    aliased &= arr.model.lora_rank == 0 or not rollout.lora_merge  # merged weights are new tensors
    freed = {"log_prob", "update"} if rollout.free_cache_engine else set()
    weights = 0 if aliased else -(-shape.count * dtype.itemsize // parallel)
    for phase in PHASES[1:]:
        if phase not in freed or (rollout.name == "hf" and world > 1):
            yield Item("rollout", "rollout weights", phase, weights)
    if (
        rollout.name == "hf"
        and device.type == "cpu"
        and rollout.pack_weights is not False
        and rollout.enforce_eager is not False
    ):
        matrices = [math.prod(p) for p in shape.parameters if len(p) == 2 and math.prod(p) >= PACKED_FROM]
        yield Item("rollout", "packed weights", "generate", sum(matrices) * dtype.itemsize)
    samples = config.data.train_batch_size * rollout.n * parallel // world
    sequences = min(rollout.max_num_seqs, max(samples, 1))
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    token = shape.cached_token_bytes(cache_itemsize(rollout, dtype), parallel=parallel)
    cache = sequences * length * token
    if device.type == "cpu" and rollout.name == "vllm":  # engines that reserve their cache when they start
        cache = vllm_cpu_cache_bytes(rollout.max_num_seqs, token, length)
    elif device.type == "cpu" and rollout.name == "sglang":
        cache = sglang_cpu_cache_tokens(rollout.max_num_seqs, length) * token
    for phase in PHASES[1:]:
        if phase == "generate" or not rollout.free_cache_engine:
            yield Item("rollout", "kv cache", phase, cache)
    if not aliased:
        whole = shape.count * master.itemsize
        yield Item("rollout", "bucket", "sync", min(rollout.update_weights_bucket_megabytes << 20, whole))


def table(items: Sequence[Item], measured: Sequence[Mapping[str, int]] = ()) -> str:
    """Predicted bytes by role and part, a column for each phase, in MiB; measured ones below.

    Args:
        items: from :func:`predict`.
        measured: for each rank, bytes by ``"role part"`` and ``"phase NAME"``; none leaves them out.
    """
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for item in items:
        part = item.part if item.exact else f"{item.part} ~"
        cells = rows.setdefault((item.role, f"{part}, off-loaded" if item.host else part), {})
        cells[item.phase] = cells.get(item.phase, 0) + item.nbytes
    lines = [["per rank, MiB", *PHASES]]
    lines += [[" ".join(key), *(_mib(cells.get(phase)) for phase in PHASES)] for key, cells in rows.items()]
    lines.append(["at most together", *(_mib(together(items, phase)) for phase in PHASES)])
    if any(item.host for item in items):
        lines.append(["off-loaded", *(_mib(together(items, phase, host=True)) for phase in PHASES)])
    for rank, found in enumerate(measured):
        phases = {name.removeprefix("phase "): value for name, value in found.items() if name.startswith("phase ")}
        if phases:
            lines.append([f"process, measured, rank {rank}", *(_mib(phases.get(phase)) for phase in PHASES)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(PHASES) + 1)]
    text = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.append("~ estimated; Python, CUDA and libraries are not counted")
    return "\n".join([*text, *_beside(items, measured)])


def together(items: Sequence[Item], phase: str, *, host: bool = False) -> int:
    """Most bytes at a time in a phase: what stays, and the passing needs of the role that has most.

    Args:
        items: from :func:`predict`.
        phase: of :data:`PHASES`.
        host: count what is off-loaded instead.
    """
    stays, passing = 0, {"": 0}
    for item in items:
        if item.phase == phase and item.host == host:
            if item.part in _PASSING:
                passing[item.role] = passing.get(item.role, 0) + item.nbytes
            else:
                stays += item.nbytes
    return stays + max(passing.values())


def _beside(items: Sequence[Item], measured: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Lines with a measured part beside the most that was predicted for it."""
    predicted: dict[str, int] = {}
    for item in items:
        name = f"{item.role} {item.part}"
        predicted[name] = max(predicted.get(name, 0), item.nbytes)
    for rank, found in enumerate(measured):
        for name, value in found.items():
            needed = name.removesuffix(RESERVED)
            if name in predicted:
                yield f"rank {rank} {name}: predicted {_mib(predicted[name])} MiB, measured {_mib(value)} MiB"
            elif needed in predicted:
                yield (
                    f"rank {rank} {needed}: full batches need {_mib(predicted[needed])} MiB, {_mib(value)} MiB are "
                    "reserved (rollout.gpu_memory_utilization)"
                )


def _mib(value: int | None) -> str:
    return "." if value is None else f"{value / 2**20:,.1f}"


class MemoryMeter:
    """Memory of this process in each phase. The roles of a process share one, because they share its memory."""

    def __init__(self) -> None:
        self._phases: dict[str, int] = {}
        self._this_step: set[str] = set()
        self._current: str | None = None
        self.max_allocated = 0
        self.max_reserved = 0

    @contextmanager
    def phase(self, name: str, device: Any) -> Iterator[None]:
        """Measure a phase: on an accelerator the peak of what tensors held, on a CPU the process's size at its end.

        Of several roles in one phase the largest counts; ``generate`` begins a step.
        """
        if name == "generate":
            self._this_step.clear()
        self._keep_peaks(device)
        reset_peak_memory(device)
        outer, self._current = self._current, name
        try:
            yield
        finally:
            self.readings(device)
            self._current = outer
            self._keep_peaks(device)

    def readings(self, device: Any) -> dict[str, int]:
        """Bytes by phase: of this step, or the last one that had the phase; of the running phase up to now."""
        if (name := self._current) is not None:
            stats = device_memory_stats(device)
            before = self._phases.get(name, 0) if name in self._this_step else 0
            self._phases[name] = max(before, stats.max_allocated or stats.cpu_used)
            self._this_step.add(name)
        return dict(self._phases)

    def _keep_peaks(self, device: Any) -> None:
        """Remember the peaks of the whole run, which a new phase starts anew."""
        stats = device_memory_stats(device)
        self.max_allocated = max(self.max_allocated, stats.max_allocated)
        self.max_reserved = max(self.max_reserved, stats.max_reserved)


#: of this process
METER = MemoryMeter()

__all__ = ["EXACT", "METER", "PHASES", "Item", "MemoryMeter", "predict", "table"]
