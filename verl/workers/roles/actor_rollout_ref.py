"""The worker that holds actor, rollout and reference: any of them, alone or together."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl.config import (
    ActorConfig,
    ActorRolloutRefConfig,
)
from verl.errors import ConfigError, WeightSyncError
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.distributed import env_local_world_size, get_world_size
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.engine.batching import MINI_BATCH_ROWS
from verl.workers.engine.images import engine_rows
from verl.workers.losses import actor_loss
from verl.workers.memory_usage import RESERVED
from verl.workers.roles.base import POLICY, RoleWorker, measured
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.batch import EventCounts, batch_from_completions, requests_from_batch
from verl.workers.rollout.engine import unless_cancelled
from verl.workers.sharding_manager import SendReport, WeightSender, WeightSource, make_sharding_manager
from verl.workers.sharding_manager.lora_sync import AdapterSource
from verl.workers.sharding_manager.reshard.grid import sharing_ranks
from verl.workers.sharding_manager.transports.base import ALIGNMENT
from verl.workers.sharding_manager.weight_link import WeightLink

POLICY_AND_ENTROPY = frozenset({"log_probs", "entropys"})


class ActorRolloutRefWorker(RoleWorker):
    """Actor, rollout and reference in one process group, sharing the actor's weights.

    Args:
        config: the ``actor_rollout_ref`` section.
        role: the parts to hold, joined by ``_``: ``actor``, ``rollout``, ``ref``.
    """

    PARTS: ClassVar[frozenset[str]] = frozenset({"actor", "rollout", "ref"})

    def __init__(self, config: ActorRolloutRefConfig, role: str = "actor_rollout", **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.parts = frozenset(role.split("_"))
        if not self.parts <= self.PARTS or ("rollout" in self.parts and "actor" not in self.parts):
            raise ConfigError(f"role={role!r}: expected actor, actor_rollout, actor_rollout_ref or ref")
        self.actor: TrainEngine | None = None
        self.ref: TrainEngine | None = None
        self.cache_bytes = 0  # of the rollout's keys and values when the last generation ended
        self.rollout_counts = EventCounts()
        self.updates_handed_over = 0
        self._sender: WeightSender | None = None
        self._sender_link: str | None = None
        self._links_with_base: set[str] = set()  # whose receivers have the base weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the model and build the engines of this worker's parts. Collective."""
        config = self.config
        if "actor" in self.parts:
            actor = config.actor
            self.actor = self.make_engine(
                config.model,
                actor,
                actor.optim,
                head="lm",
                checkpoint=actor.checkpoint,
            )
            self.actor.build()
            self.join_mesh("actor", self.actor)
            self._adapter_source = AdapterSource(self.actor)
            self.actor_loss = actor_loss(actor)
        if "rollout" in self.parts:
            assert self.actor is not None
            self.rollout = get_rollout_class(config.rollout.name)(
                config.model, config.rollout, device=self.device, **self.rollout_options()
            )
            self.sharding_manager = make_sharding_manager(
                config.actor.strategy,
                config.rollout.name,
                self.actor,
                self.rollout,
                bucket_bytes=config.rollout.update_weights_bucket_megabytes << 20,
                on_unchanged=config.rollout.on_unchanged_weights,
            )
            # ranks that share sequences in training generate rows of their own
            self._register_dispatch_collect_info("rollout", dp_rank=self.actor.layout.rank, is_collect=True)
        if "ref" in self.parts:
            if self.actor is not None and config.model.lora_rank > 0:
                self.ref = self.actor  # with its adapters off it is the model that it started from
            else:
                self.ref = self.make_engine(config.model, config.ref, None, head="lm")
                self.ref.build()
            self.join_mesh("ref", self.ref)

    def rollout_options(self) -> dict[str, Any]:
        """Further arguments of the rollout engine, which depend on how the training engine places its ranks."""
        parallel = self.config.rollout.tensor_model_parallel_size
        if parallel == 1 or self.config.rollout.name != "vllm":  # elsewhere neighbours share a server
            return {}
        groups = sharing_ranks(
            get_world_size(), shards=self.ranks_of_a_weight(), parallel=parallel, local_world=env_local_world_size()
        )
        return {"groups": groups}

    @abstractmethod
    def ranks_of_a_weight(self) -> int:
        """Consecutive ranks that the training engine divides a weight over; the other ranks hold replicas, or other
        weights."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @measured("generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row.

        Args:
            prompts: ``input_ids``, ``attention_mask`` (B,P) left-padded and ``sample_index`` (B,);
                ``meta_info`` holds ``step`` and ``validate``.

        Returns:
            The rollout fields of the schema for the same rows.
        """
        config = self.config.rollout
        meta = prompts.meta_info
        requests = requests_from_batch(
            prompts, config, seed=self.seed, step=meta["step"], validate=meta.get("validate", False)
        )

        async def run() -> list[Any]:
            await self.rollout.wake()
            try:
                if config.tensor_model_parallel_size == 1:
                    completions = await unless_cancelled(self.rollout, requests)
                else:  # ranks that generate together must end together
                    completions = await self.rollout.generate_many(requests)
                self.cache_bytes = self.rollout.memory().kv_cache
                return completions
            finally:
                if config.free_cache_engine:
                    await self.rollout.sleep()

        completions = asyncio.run(run())
        answers = batch_from_completions(prompts, completions, config.response_length, self.rollout.pad_token_id)
        return self.with_counts(answers)

    def with_counts(self, answers: DataProto) -> DataProto:
        """A generated batch, with what its generation added to the rollout engine's counters."""
        return self.rollout_counts.add_to(answers, {"": self.rollout.counters()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), reuse_fields=True)
    @measured("log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs``, ``entropys`` and, if configured, ``sum_pi_squared`` (B,R) of the actor, no gradients."""
        assert self.actor is not None
        squares = frozenset({"sum_pi_squared"} if self.config.actor.calculate_sum_pi_squared else ())
        with self.actor.resident(optimizer=False):
            out = self.actor.forward(
                engine_rows(data),
                POLICY_AND_ENTROPY | squares,
                micro=MicroBatching(*self.config.rollout.log_prob_micro_batch()),
                temperature=self.config.rollout.temperature,
            )
        fields = {"log_probs": "old_log_probs"}
        return DataProto.from_dict({fields.get(name, name): value.cpu() for name, value in out.items()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"), reuse_fields=True)
    @measured("log_prob")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B,R) of the reference model, without gradients."""
        assert self.ref is not None
        with self.ref.resident(optimizer=False):
            out = self.ref.forward(
                engine_rows(data),
                POLICY,
                micro=MicroBatching(*self.config.ref.log_prob_micro_batch()),
                temperature=self.config.rollout.temperature,
                adapter=False,
            )
        return DataProto.from_dict({"ref_log_prob": out["log_probs"].cpu()})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), auto_padding=False, reuse_fields=True
    )
    @measured("update")
    def update_actor(self, data: DataProto) -> MetricSet:
        """Run all mini-batch updates of a step on this worker's rows."""
        assert self.actor is not None
        config: ActorConfig = self.config.actor
        rows = data.meta_info.get(MINI_BATCH_ROWS, config.ppo_mini_batch_size * self.config.rollout.rows_per_prompt)
        with self.actor.resident(optimizer=True):
            metrics = self.run_update(
                self.actor,
                engine_rows(data),
                prefix="actor",
                loss=self.actor_loss,
                mini_batch_size=rows // self.actor.layout.dp_size,
                epochs=config.ppo_epochs,
                micro=MicroBatching(*config.micro_batch()),
                temperature=self.config.rollout.temperature,
            )
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("sync")
    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to the rollout as policy ``version``; returns the transfer's metrics."""
        assert self.actor is not None
        stepped = self.updates > self.updates_handed_over
        self.updates_handed_over = self.updates
        with self.actor.resident(optimizer=False):
            return self.sharding_manager.sync(version, stepped=stepped)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_report(self) -> dict[str, int]:
        """Measured bytes of this rank, see :meth:`memory_of`; the cache as it was while generating."""
        report = self.memory_of(actor=self.actor, ref=None if self.ref is self.actor else self.ref)
        if "rollout" in self.parts:
            by_share = self.config.rollout.name != "hf" and torch.device(self.device).type != "cpu"
            report["rollout kv cache" + RESERVED * by_share] = self.cache_bytes
            report["rollout rollout weights"] = self.rollout.memory().owned_weights
        return report

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("sync")
    def send_weights(
        self, version: int, links: dict[int, WeightLink], again: bool = False, adapter_apart: bool = False
    ) -> SendReport:
        """Send the actor's weights to rollout servers as policy ``version``. Collective.

        Args:
            version: policy version.
            links: sending rank -> where its receivers are.
            again: other servers have had this version already.
            adapter_apart: the servers take the low-rank adapter beside the base weights, which then go through a new
                link only.

        Raises:
            WeightSyncError: a receiver is gone or failed, or the weights are not those of ``version`` any more.
        """
        assert self.actor is not None
        stepped = self.updates > self.updates_handed_over
        if again and stepped:
            raise WeightSyncError(
                f"the actor was updated since version {version}: a server that was restarted waits for the next one"
            )
        self.updates_handed_over = self.updates
        with self.actor.resident(optimizer=False):
            names = {link.name for link in links.values()}
            if adapter_apart:
                self._adapter_source.with_base = names != self._links_with_base
            sender = self._sender_for(links.get(self.rank), self._adapter_source if adapter_apart else self.actor)
            report = sender.send(version, stepped=stepped)
            self._links_with_base = names
            return report

    def _sender_for(self, link: WeightLink | None, source: WeightSource) -> WeightSender:
        if self._sender is None:
            self._sender = WeightSender(source, None, on_unchanged=self.config.rollout.on_unchanged_weights)
            # buffers need not be larger than the model; every rank has to draw the tensors to know
            self._weight_bytes = sum(tensor.nbytes + ALIGNMENT for _, tensor in source.named_tensors())
        name = None if link is None else link.name
        if name != self._sender_link:
            if self._sender.transport is not None:
                self._sender.transport.close()
            self._sender.transport = None if link is None else link.sender(most_bytes=self._weight_bytes)
            self._sender_link = name
        return self._sender

    def exported_engine(self) -> TrainEngine:
        assert self.actor is not None
        return self.actor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write the actor's checkpoint into directory ``path``. Collective."""
        assert self.actor is not None
        self.save_engine(self.actor, self.config.actor.checkpoint, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Restore the actor from directory ``path``. Collective."""
        assert self.actor is not None
        self.updates_handed_over = self.updates  # what the rollout gets next is no step away from what it had
        self.actor.load(Path(path), frozenset(self.config.actor.checkpoint.load_contents))
