"""Hand-over of a low-rank adapter: the base weights once, then the adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from verl.utils.distributed import get_world_size
from verl.workers.engine.base import WeightForm
from verl.workers.sharding_manager.base import SyncReport, WeightSink
from verl.workers.sharding_manager.sync import WeightSync


class AdaptedSource(Protocol):
    """The part of a training engine with adapters that gives weights; every ``TrainEngine`` is one."""

    def local_tensors(self, form: WeightForm = "merged") -> dict[str, torch.Tensor] | None: ...

    def named_tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, torch.Tensor]]: ...


class AdapterSource:
    """Gives the adapter, and with it the base weights when these are wanted. A ``WeightSource``.

    Args:
        engine: the training engine.
    """

    def __init__(self, engine: AdaptedSource) -> None:
        self.engine = engine
        #: the next weight sync brings the base weights too
        self.with_base = True

    @property
    def _form(self) -> WeightForm:
        return "apart" if self.with_base else "adapters"

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        """See :class:`WeightSource`."""
        return self.engine.local_tensors(self._form)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`WeightSource`."""
        return self.engine.named_tensors(self._form)


class AdapterSync(WeightSync):
    """:class:`WeightSync` for a rollout with ``supports_lora_update``: base weights come where the rollout has none.

    Args:
        source: the training engine.
        sink: the rollout engine.
        bucket_bytes, on_unchanged: as in :class:`WeightSync`.
    """

    def __init__(
        self,
        source: AdaptedSource,
        sink: WeightSink,
        *,
        bucket_bytes: int = 512 << 20,
        on_unchanged: str = "ignore",
    ) -> None:
        self.adapted = AdapterSource(source)
        super().__init__(self.adapted, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)

    async def transfer(self, version: int, *, stepped: bool) -> SyncReport:
        """See :meth:`WeightSync.transfer`; collective over all ranks."""
        self.adapted.with_base = _on_some_rank(self.sink.needs_base_weights)
        return await super().transfer(version, stepped=stepped)

    async def _check(self) -> None:
        self.adapted.with_base = True  # what was synced before must still be there
        await super()._check()


def _on_some_rank(flag: bool) -> bool:
    """Whether a flag is set on any rank. Collective."""
    if get_world_size() == 1:
        return flag
    flags = [flag] * get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)
