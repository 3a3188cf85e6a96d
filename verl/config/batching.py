"""Batch arithmetic that the roots share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl.config.base import Config


def select(config: Config, path: str) -> Any:
    """Return the value at a dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def sequence_problems(fsdp_key: str, size: int, world: int, model_key: str, packed: bool) -> Iterator[str]:
    """Yield the problems of ranks that share sequences.

    Args:
        fsdp_key: dotted path of the ``fsdp_config`` section, for the message.
        size: ranks that share a sequence.
        world: number of ranks.
        model_key: dotted path of the ``model`` section, for the message.
        packed: its ``use_remove_padding``.
    """
    if size > 1 and world % size:
        yield (
            f"{fsdp_key}.ulysses_sequence_parallel_size={size}: must divide trainer.nnodes * trainer.n_gpus_per_node "
            f"= {world}"
        )
    if size > 1 and not packed:
        yield (
            f"{fsdp_key}.ulysses_sequence_parallel_size={size}: shares the tokens of packed rows, so it needs "
            f"{model_key}.use_remove_padding=True"
        )


def sizes_per_gpu(
    config: Config,
    keys: Sequence[tuple[str, str | None]],
    world: int,
    sequence_size: Callable[[str], int] = lambda section: 1,
) -> Iterator[str]:
    """Replace sizes over all ranks by ``<key>_per_gpu = size / world``; yield one sentence for each wrong one.

    Args:
        config: a root section, changed in place.
        keys: (dotted path of the old key, dotted path that ``<key>_per_gpu`` inherits from or ``None``), in the order
            of inheritance.
        world: number of ranks.
        sequence_size: dotted path of a key's section -> ranks that share a sequence there; they get the same samples.
    """
    ranks = world
    derived: dict[str, int] = {}  # dotted path of <key>_per_gpu -> its new value
    for path, parent in keys:
        where, old = path.rsplit(".", 1)
        new = f"{old}_per_gpu"
        holder = select(config, where)
        world = max(1, ranks // sequence_size(where))
        total, per_gpu = getattr(holder, old), getattr(holder, new)
        inherited = select(config, parent) if parent else None
        if total is None:
            if per_gpu is None and parent in derived:
                setattr(holder, new, derived[parent])
                derived[f"{where}.{new}"] = derived[parent]
            continue
        setattr(holder, old, None)
        if total < 1 or total % world:
            yield (
                f"{path}={total}: counts samples over all {world} ranks, so it must be a multiple of {world}; better "
                f"give {where}.{new}, the samples per rank"
            )
        elif per_gpu not in (None, inherited, total // world):
            yield (
                f"{path}={total}: is {total // world} samples on each of {world} ranks, but {where}.{new}={per_gpu} is "
                "given too; keep the second"
            )
        else:
            setattr(holder, new, total // world)
            derived[f"{where}.{new}"] = total // world


def batch_problems(
    mini_key: str,
    mini: int,
    micro_key: str,
    micro: int | None,
    *,
    total_key: str,
    total: int,
    samples: int,
    world: int,
) -> Iterator[str]:
    """Yield the problems of total batch -> mini-batches -> ranks -> micro-batches.

    Args:
        mini_key, micro_key, total_key: dotted paths, for the messages.
        mini, total: prompts per optimizer step and per training step.
        micro: samples per rank and pass, ``None`` when there is no such limit.
        samples: samples per prompt.
        world: number of ranks.
    """
    if min(mini, total, samples, world) < 1 or (micro is not None and micro < 1):
        return  # already reported as out of bounds
    if total % mini:
        yield f"{total_key}={total}: must be a multiple of {mini_key}={mini}, which counts prompts per optimizer step"
        return
    count = f"{mini} prompts * {samples} samples" if samples > 1 else f"{mini} samples"
    if mini * samples % world:
        yield f"{mini_key}={mini}: {count} do not split evenly over {world} ranks; make it a multiple of {world}"
        return
    per_rank = mini * samples // world
    if micro is not None and per_rank % micro:
        fits = [d for d in range(1, per_rank + 1) if per_rank % d == 0]
        near = max((d for d in fits if d <= micro), default=1)
        yield (
            f"{micro_key}={micro}: must divide the {per_rank} samples that a rank has of a mini-batch ({count} over "
            f"{world} rank{'s' * (world > 1)}); use {near}, or use_dynamic_bsz=True"
        )


def token_problems(budgets: Sequence[tuple[str, int | None]], tokens: int, meaning: str) -> Iterator[str]:
    """Yield the token budgets into which the longest sample does not fit.

    Args:
        budgets: (dotted path, tokens per rank and pass or ``None`` when not used).
        tokens: tokens of the longest sample.
        meaning: what ``tokens`` is, for the message.
    """
    for key, budget in budgets:
        if budget is not None and budget < tokens:
            yield f"{key}={budget}: the longest sample has {meaning} = {tokens} tokens; give at least that many"
