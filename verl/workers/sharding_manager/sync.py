"""Weight hand-over inside one process: live parameters where the rollout can read them, buckets otherwise."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

from verl import envs
from verl.errors import WeightSyncError
from verl.workers.rollout.base import RolloutEngine, run_blocking
from verl.workers.sharding_manager.base import SyncReport, WeightSource

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]


class WeightSync:
    """Gives a rollout engine the weights of a training engine in the same process.

    When the training engine holds whole parameters, the rollout gets those very tensors: no copy is made unless it
    generates in another dtype or on another device, and a later hand-over only raises the version. Otherwise the
    whole tensors are streamed, one bucket at a time, so that the peak is the rollout's weights plus one bucket.

    With ``VERL_SYNC_CHECK=1`` both sides' checksums are compared after every hand-over.

    Args:
        source: the training engine.
        sink: the rollout engine.
        bucket_bytes: size of a bucket when streaming (``rollout.update_weights_bucket_megabytes``).
    """

    def __init__(self, source: WeightSource, sink: RolloutEngine, *, bucket_bytes: int = 512 << 20) -> None:
        if bucket_bytes < 1:
            raise WeightSyncError(f"bucket_bytes={bucket_bytes}: a bucket needs a positive size")
        self.source = source
        self.sink = sink
        self.bucket_bytes = bucket_bytes
        self.last_report: SyncReport | None = None

    def sync(self, version: int) -> dict[str, float]:
        """Hand over the current weights as policy ``version``. Collective over the source's ranks.

        Returns:
            Metrics: version, seconds, megabytes copied and shared, buckets.

        Raises:
            WeightSyncError: the version does not increase, names or shapes do not match, or checksums differ.
        """
        return run_blocking(self.sync_async(version)).metrics()

    async def sync_async(self, version: int) -> SyncReport:
        """:meth:`sync` for callers inside an event loop."""
        if version <= self.sink.policy_version:
            raise WeightSyncError(
                f"weights of version {version} were offered, but the rollout already has version "
                f"{self.sink.policy_version}; versions must increase with every hand-over"
            )
        started = time.perf_counter()
        live = self.source.local_tensors()
        tensors = buckets = 0
        await self.sink.begin_update(version)
        try:
            if live is not None:
                tensors, buckets = len(live), 1
                await self.sink.load(live.items(), live=True)
            else:
                for bucket in self._buckets():
                    await self.sink.load(bucket, live=False)
                    tensors, buckets = tensors + len(bucket), buckets + 1
        except BaseException:
            with contextlib.suppress(WeightSyncError):  # it misses weights, which the error in flight explains
                await self.sink.end_update()
            raise
        await self.sink.end_update()
        memory = self.sink.memory()
        report = SyncReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes_copied=memory.owned_weights,
            bytes_shared=memory.aliased_weights,
            tensors=tensors,
            buckets=buckets,
        )
        self.last_report = report
        if envs.get("VERL_SYNC_CHECK"):
            await self._check(live)
        logger.debug("weights handed over: %s", report)
        return report

    def _buckets(self) -> Iterator[Bucket]:
        bucket: Bucket = []
        size = 0
        for name, tensor in self.source.named_tensors():
            if bucket and size + tensor.nbytes > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket

    async def _check(self, live: dict[str, torch.Tensor] | None) -> None:
        """Compare digests of what the source has with what the sink uses."""
        expected: dict[str, str] = {}
        if live is not None:
            expected = await self.sink.checksums(live)
        else:  # a second stream, one tensor at a time: checking must not raise the peak
            for name, tensor in self.source.named_tensors():
                for key, digest in (await self.sink.checksums({name: tensor})).items():
                    expected.setdefault(key, digest)
        actual = await self.sink.checksums()
        wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
        if wrong:
            raise WeightSyncError(
                f"after the hand-over {len(wrong)} of {len(actual)} weights differ between training and rollout: "
                f"{', '.join(wrong[:5])}; the rollout would generate with another policy"
            )
