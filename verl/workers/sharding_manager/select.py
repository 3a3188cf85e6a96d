"""Which training backends hand weights to which rollout engines, and how: one entry per pair that exists."""

from __future__ import annotations

from typing import Protocol, cast

from verl.errors import ConfigError
from verl.utils.distributed import get_world_size
from verl.utils.registry import Registry
from verl.workers.sharding_manager.base import ShardedSource, WeightSink, WeightSource
from verl.workers.sharding_manager.lora_sync import AdaptedSource, AdapterSync
from verl.workers.sharding_manager.sharded_sync import ShardedSync
from verl.workers.sharding_manager.sync import WeightSync


class ShardingManager(Protocol):
    """Hands the weights of a training engine to a rollout engine of the same worker."""

    def sync(self, version: int, *, stepped: bool = True) -> dict[str, float]:
        """See :meth:`WeightSync.sync`."""
        ...


class MakeShardingManager(Protocol):
    """Joins two engines; an entry of :data:`SHARDING_MANAGERS`."""

    def __call__(
        self, source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str
    ) -> ShardingManager: ...


#: "training backend/rollout engine" -> how to join them. Both FSDP strategies are the backend ``fsdp``.
SHARDING_MANAGERS: Registry[MakeShardingManager] = Registry("pair of training backend and rollout engine")

_BACKENDS = {"fsdp": "fsdp", "fsdp2": "fsdp"}


@SHARDING_MANAGERS.register("fsdp/hf")
def fsdp_hf(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """Every rank generates with the whole model: aliases on one rank, whole tensors in buckets on several."""
    return WeightSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


@SHARDING_MANAGERS.register("fsdp/vllm")
def fsdp_vllm(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """vLLM's parameters are fused and split: one rank's weights go through vLLM's loaders, the shards of several ranks
    straight to where each rank reads them."""
    if get_world_size() == 1:
        return WeightSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)
    return _parts_or_whole(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


@SHARDING_MANAGERS.register("fsdp/sglang")
def fsdp_sglang(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """Buckets of whole tensors go to the SGLang server, through shared memory or CUDA handles where it is the worker's
    own, through a process group where it runs elsewhere; its loaders fuse and split them."""
    return WeightSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


@SHARDING_MANAGERS.register("megatron/hf")
def megatron_hf(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """Every rank generates with the whole model: it receives the slices that it does not train, where it reads them."""
    return _parts_or_whole(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


@SHARDING_MANAGERS.register("megatron/vllm")
def megatron_vllm(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """Every rank receives the slices of its part that it does not train, straight to where vLLM reads them."""
    return _parts_or_whole(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


@SHARDING_MANAGERS.register("megatron/sglang")
def megatron_sglang(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """As ``fsdp/sglang``: a server's memory is its own, and its loaders take whole tensors, which are put together one
    by one."""
    return WeightSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


def _parts_or_whole(source: WeightSource, sink: WeightSink, *, bucket_bytes: int, on_unchanged: str) -> ShardingManager:
    """By a plan, or tensor by tensor where what is trained is not what is synced (adapters)."""
    if isinstance(source, ShardedSource) and source.shards() is not None:
        return ShardedSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)
    return WeightSync(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)


def make_sharding_manager(
    strategy: str,
    rollout: str,
    source: WeightSource,
    sink: WeightSink,
    *,
    bucket_bytes: int = 512 << 20,
    on_unchanged: str = "ignore",
) -> ShardingManager:
    """Join a training engine and a rollout engine of one worker.

    Args:
        strategy: ``actor.strategy``.
        rollout: ``rollout.name``.
        source, sink: the engines.
        bucket_bytes, on_unchanged: see :class:`WeightSync`.

    Raises:
        ConfigError: there is no such pair.
    """
    pair = f"{_BACKENDS.get(strategy, strategy)}/{rollout}"
    if pair not in SHARDING_MANAGERS:
        raise ConfigError(
            f"actor.strategy={strategy!r} cannot hand weights to rollout.name={rollout!r}; pairs that can: "
            f"{', '.join(sorted(SHARDING_MANAGERS))}"
        )
    if sink.supports_lora_update:
        return AdapterSync(cast(AdaptedSource, source), sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)
    return SHARDING_MANAGERS[pair](source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)
