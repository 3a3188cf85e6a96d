"""Weight sync: a source, a transport, a sink."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import torch

from verl import envs
from verl.errors import WeightSyncError
from verl.models.lora import is_adapter_name
from verl.workers.rollout.engine import run_blocking
from verl.workers.sharding_manager.base import SendReport, SyncReport, WeightSink, WeightSource
from verl.workers.sharding_manager.change_detection import ChangeDetector
from verl.workers.sharding_manager.transports.base import Transport, Weights
from verl.workers.sharding_manager.transports.colocated import ColocatedTransport

logger = logging.getLogger(__name__)


class WeightSync:
    """Gives a rollout engine the weights of a training engine in the same process.

    When the training engine holds whole parameters, the rollout gets those very tensors: no copy is made unless it
    generates in another dtype or on another device, and a later weight sync only raises the version. Otherwise the
    whole tensors are streamed, one bucket at a time, so that the peak is the rollout's weights plus one bucket.

    With ``VERL_SYNC_CHECK=1`` both sides' checksums are compared after every weight sync.

    Args:
        source: the training engine.
        sink: the rollout engine.
        bucket_bytes: size of a bucket when streaming (``rollout.update_weights_bucket_megabytes``).
        on_unchanged: ``"warn"`` or ``"error"`` when an optimizer step changed no weight; costs one read of all weights.
    """

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        *,
        bucket_bytes: int = 512 << 20,
        on_unchanged: str = "ignore",
    ) -> None:
        if bucket_bytes < 1:
            raise WeightSyncError(f"bucket_bytes={bucket_bytes}: a bucket needs a positive size")
        self.source = source
        self.sink = sink
        self.bucket_bytes = bucket_bytes
        self.changes = ChangeDetector(on_unchanged)
        self.last_report: SyncReport | None = None

    def sync(self, version: int, *, stepped: bool = True) -> dict[str, float]:
        """Hand over the current weights as policy ``version``. Collective over the source's ranks.

        Args:
            version: higher than the rollout's.
            stepped: the optimizer made a step since the last weight sync.

        Returns:
            Metrics: version, seconds, megabytes copied and shared, buckets.

        Raises:
            WeightSyncError: the version does not increase, names or shapes do not match, checksums differ, or nothing
                changed where that is to be an error.
        """
        return run_blocking(self.sync_async(version, stepped=stepped)).metrics()

    async def sync_async(self, version: int, *, stepped: bool = True) -> SyncReport:
        """:meth:`sync` for callers inside an event loop."""
        if version <= self.sink.policy_version:
            raise WeightSyncError(
                f"weights of version {version} were offered, but the rollout already has version "
                f"{self.sink.policy_version}; versions must increase with every weight sync"
            )
        self.last_report = await self.transfer(version, stepped=stepped)
        if envs.get("VERL_SYNC_CHECK"):
            await self._check()
        logger.debug("weights synced: %s", self.last_report)
        return self.last_report

    async def transfer(self, version: int, *, stepped: bool) -> SyncReport:
        """Transfer the weights and detect whether any changed."""
        live = self.source.local_tensors()
        weights: Weights = live.items() if live is not None else self.source.named_tensors()
        transport = ColocatedTransport(self.bucket_bytes)
        transport.send(version, self.changes.watch(weights), live=live is not None)
        report = await _deliver(transport, self.sink)
        return replace(report, changed=self.changes.finish(version, stepped=stepped))

    async def _check(self) -> None:
        """Compare digests of what the source has with what the sink uses."""
        live = self.source.local_tensors()
        expected: dict[str, str] = {}
        if live is not None:
            expected = await self.sink.checksums(live)
        else:  # a second stream, one tensor at a time: checking must not raise the peak
            for name, tensor in self.source.named_tensors():
                for key, digest in (await self.sink.checksums({name: tensor})).items():
                    expected.setdefault(key, digest)
        _compare(expected, await self.sink.checksums())


class WeightSender:
    """The training side of a weight sync to other processes. Every rank of the training engine makes one.

    Args:
        source: the training engine.
        transport: to the rollout; None on ranks that only take part in gathering the tensors.
        on_unchanged: as in :class:`WeightSync`.
    """

    def __init__(self, source: WeightSource, transport: Transport | None, *, on_unchanged: str = "ignore") -> None:
        self.source = source
        self.transport = transport
        self.changes = ChangeDetector(on_unchanged)

    def send(self, version: int, *, stepped: bool = True) -> SendReport:
        """Send the current weights as policy ``version``. Collective over the source's ranks.

        Raises:
            WeightSyncError: the version does not increase, a receiver is gone, or nothing changed where that is to be
                an error; receivers then have the version already.
        """
        started = time.perf_counter()
        count = 0

        def counted(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal count
            for item in weights:
                count += 1
                yield item

        live = self.source.local_tensors()
        weights = counted(self.changes.watch(live.items() if live is not None else self.source.named_tensors()))
        sent = 0
        if self.transport is not None:
            sent = self.transport.send(version, weights, live=live is not None)
        else:
            for _ in weights:
                pass
        changed = self.changes.finish(version, stepped=stepped)
        report = SendReport(version, time.perf_counter() - started, sent, count, changed)
        logger.debug("weights sent: %s", report)
        return report


class WeightReceiver:
    """The rollout side of a weight sync from another process.

    With ``VERL_SYNC_CHECK=1`` the rollout's weights are compared with what arrived; where the sender has the variable
    set too, the transport checks that this is what was sent.

    Args:
        sink: the rollout engine.
        transport: from the trainer.
    """

    def __init__(self, sink: WeightSink, transport: Transport) -> None:
        self.sink = sink
        self.transport = transport
        self._known: dict[str, str] = {}
        self.last_report: SyncReport | None = None

    def receive(self) -> SyncReport:
        """Wait for weights newer than the rollout's and load them.

        Raises:
            WeightSyncError: nothing came in time, the sender failed half way, names or shapes do not match, or
                checksums differ.
        """
        return run_blocking(self.receive_async())

    async def receive_async(self) -> SyncReport:
        """:meth:`receive` for callers inside an event loop; blocks the loop, in which nothing may be in flight."""
        report = await _deliver(self.transport, self.sink, known=self._known if envs.get("VERL_SYNC_CHECK") else None)
        self.last_report = report
        logger.debug("weights received: %s", report)
        return report


async def _deliver(transport: Transport, sink: WeightSink, *, known: dict[str, str] | None = None) -> SyncReport:
    """Load one version from a transport into a rollout engine.

    Args:
        transport: from the sender.
        sink: the engine.
        known: digests of what it has, brought up to date and compared with what it uses; None: no comparison.
    """
    started = time.perf_counter()
    delivery = transport.receive(newer_than=sink.policy_version)
    tensors = buckets = arrived = 0
    adapter_only = sink.supports_lora_update
    expected: dict[str, str] = {}
    async with updating(sink, delivery.version):
        with contextlib.closing(delivery.buckets) as arriving:  # at once on an error: the sender must not wait for us
            for bucket in arriving:
                await sink.load(bucket, live=delivery.live)
                if known is not None:
                    for key, digest in (await sink.checksums(dict(bucket))).items():
                        expected.setdefault(key, digest)
                tensors, buckets = tensors + len(bucket), buckets + 1
                arrived += sum(tensor.nbytes for _, tensor in bucket)
                adapter_only &= all(is_adapter_name(name) for name, _ in bucket)
    if known is not None:
        known.update(expected)  # of an adapter alone: the base weights must be as they were
        _compare(known, await sink.checksums())
    memory = sink.memory()
    return SyncReport(
        version=delivery.version,
        seconds=time.perf_counter() - started,
        bytes_copied=min(arrived, memory.owned_weights) if adapter_only else memory.owned_weights,
        bytes_shared=memory.aliased_weights,
        tensors=tensors,
        buckets=buckets,
    )


@contextlib.asynccontextmanager
async def updating(sink: WeightSink, version: int) -> AsyncIterator[None]:
    """An update of a rollout engine; whatever goes wrong inside leaves it without usable weights."""
    await sink.begin_update(version)
    try:
        yield
    except BaseException:
        with contextlib.suppress(WeightSyncError):  # it misses weights, which the error in flight explains
            await sink.end_update()
        raise
    await sink.end_update()


def _compare(expected: dict[str, str], actual: dict[str, str]) -> None:
    wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if wrong:
        raise WeightSyncError(
            f"after the weight sync {len(wrong)} of {len(actual)} weights differ between training and rollout: "
            f"{', '.join(wrong[:5])}; the rollout would generate with another policy"
        )
