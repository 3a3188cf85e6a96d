"""The roles of a run as workers: their remote methods, written once for every training engine.

A role owns engines and turns a :class:`~verl.protocol.DataProto` shard into engine calls and back. It knows
neither how the engine shards the model (``fsdp_workers.py`` binds that) nor which algorithm runs
(the controller does). Every worker of a group calls the same method with its own shard.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
import transformers
from tensordict import TensorDict

from verl.algorithms.prime import implicit_rewards
from verl.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RewardModelConfig,
)
from verl.data.chat import encode, encode_plain, render
from verl.data.images import IMAGE_FIELD, copies_of, image_parts, repeated
from verl.errors import ConfigError, DataError, WeightSyncError
from verl.models.loading import import_external_lib, load_hf_config
from verl.models.vision import ImageTokens
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.background import BackgroundTask
from verl.utils.device import device_memory_stats, device_name
from verl.utils.distributed import env_local_world_size, get_world_size, init_process_group
from verl.utils.flops import model_flops_utilization
from verl.utils.metrics import MetricSet, mmax, mmean
from verl.utils.seeding import derive_seed, set_seed, use_deterministic_algorithms
from verl.utils.tokenizer import load_tokenizer
from verl.workers.engine.base import MicroBatching, TrainEngine
from verl.workers.engine.batching import MINI_BATCH_ROWS
from verl.workers.engine.export import export_model
from verl.workers.engine.images import engine_rows, prompt_parts, with_images
from verl.workers.losses import actor_loss, critic_loss, implicit_reward_model_loss
from verl.workers.memory_usage import METER, RESERVED
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import unless_cancelled
from verl.workers.rollout.batch import EventCounts, batch_from_completions, requests_from_batch
from verl.workers.sharding_manager import SendReport, WeightSender, WeightSource, make_sharding_manager
from verl.workers.sharding_manager.lora_sync import AdapterSource
from verl.workers.sharding_manager.reshard.grid import sharing_ranks
from verl.workers.sharding_manager.weight_link import WeightLink
from verl.workers.sharding_manager.transports.base import ALIGNMENT

logger = logging.getLogger(__name__)

#: a section that says how a model is divided over ranks
EngineSection = ActorConfig | RefConfig | CriticConfig | RewardModelConfig

POLICY = frozenset({"log_probs"})
POLICY_AND_ENTROPY = frozenset({"log_probs", "entropys"})
VALUES = frozenset({"values"})

F = TypeVar("F", bound=Callable[..., Any])


def measured(phase: str) -> Callable[[F], F]:
    """Measure the memory of a worker's method as one phase of the step."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with METER.phase(phase, self.device):
                return function(self, *args, **kwargs)

        return cast(F, run)

    return decorate


class RoleWorker(Worker):
    """What all roles share: device, process group, seeds, engines by name, checkpoints.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        seed: seed of the run; every random choice of the worker derives from it.
        timeout_s: how long a collective may wait for the other workers.
        external_lib: package that registers plug-ins when it is imported.
        deterministic: use only algorithms whose result depends on nothing but their input.
    """

    def __init__(
        self,
        *,
        device: str,
        seed: int,
        timeout_s: float,
        external_lib: str | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if deterministic:
            use_deterministic_algorithms()
        import_external_lib(external_lib)
        transformers.utils.logging.disable_progress_bar()
        self.device = device
        self.seed = seed
        self.updates = 0  # optimizer steps that must have changed weights
        init_process_group(device, timeout_s)
        # the same seed on every rank: a fresh value head must start alike everywhere
        set_seed(derive_seed(seed, "worker"))
        self._saving = BackgroundTask()

    @abstractmethod
    def make_engine(
        self,
        model: ModelConfig,
        section: EngineSection,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> TrainEngine:
        """Construct (not build) the training engine of this backend.

        Args:
            model: what to load.
            section: the role's section, which holds the engine's own one.
            optim: optimizer; None for a model that is only evaluated.
            head: of the model.
            checkpoint: the role's checkpoint section.
        """

    def join_mesh(self, mesh_name: str, engine: TrainEngine) -> None:
        """Tell the controller which data-parallel shard this worker computes under ``mesh_name``."""
        layout = engine.layout
        self._register_dispatch_collect_info(mesh_name, dp_rank=layout.dp_rank, is_collect=layout.is_output_rank)

    def save_engine(self, engine: TrainEngine, config: CheckpointConfig, path: str) -> None:
        """Write an engine's checkpoint, or with ``async_save`` start to; collective."""
        self._saving.wait()
        if config.async_save:
            self._saving = engine.start_save(Path(path), frozenset(config.save_contents))
        else:
            engine.save(Path(path), frozenset(config.save_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether the last ``save_checkpoint`` is on the disk; raises what went wrong since."""
        if wait:
            self._saving.wait()
        return self._saving.done()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, root: str, provenance: dict[str, Any]) -> str:
        """Write the trained model into ``root/huggingface``; returns that directory. Collective."""
        self._saving.wait()
        return str(export_model(self.exported_engine(), Path(root), provenance))

    def exported_engine(self) -> TrainEngine:
        """The engine whose model :meth:`export_model` writes."""
        raise ConfigError(f"{type(self).__name__} has no model to export")

    def memory_metrics(self, engine: TrainEngine) -> MetricSet:
        """Peak memory of this process so far, the largest over ranks after the merge."""
        stats = device_memory_stats(engine.device)
        gib = 1 / 2**30
        return MetricSet(
            {
                "perf/max_memory_allocated_gb": mmax(max(stats.max_allocated, METER.max_allocated) * gib),
                "perf/max_memory_reserved_gb": mmax(max(stats.max_reserved, METER.max_reserved) * gib),
                **{
                    f"perf/memory_{phase}_gb": mmax(nbytes * gib)
                    for phase, nbytes in METER.readings(self.device).items()
                },
                "perf/cpu_memory_used_gb": mmax(stats.cpu_used * gib),
                # Linux counts in KiB
                "perf/cpu_memory_peak_gb": mmax(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * gib),
            }
        )

    def memory_of(self, **engines: TrainEngine | None) -> dict[str, int]:
        """Measured bytes: what each engine holds as ``"role part"``, and the process in each phase."""
        held = {
            f"{role} {part}": nbytes
            for role, engine in engines.items()
            if engine is not None
            for part, nbytes in engine.state_bytes().items()
        }
        return held | {f"phase {phase}": nbytes for phase, nbytes in METER.readings(self.device).items()}

    def run_update(
        self,
        engine: TrainEngine,
        batch: TensorDict,
        *,
        prefix: str,
        loss: Any,
        mini_batch_size: int,
        epochs: int,
        micro: MicroBatching,
        temperature: float = 1.0,
    ) -> MetricSet:
        """Run ``epochs`` passes of mini-batch updates over this worker's shard.

        The controller has arranged the batch so that the i-th mini-batch of all workers together is the i-th
        global mini-batch. Reported numbers are means over the updates; the learning rate advances once a step.

        Args:
            batch: this worker's rows, a multiple of ``mini_batch_size``.
            mini_batch_size: rows per update on this worker.
        """
        started = time.perf_counter()
        updates = [
            batch[start : start + mini_batch_size]
            for _ in range(epochs)
            for start in range(0, len(batch), mini_batch_size)
        ]
        metrics = MetricSet()
        for index, mini_batch in enumerate(updates):
            step = engine.train_batch(
                mini_batch,
                loss,
                want=loss.want,
                micro=micro,
                temperature=temperature,
                advance_lr=index == len(updates) - 1,
            )
            self.updates += _changes_weights(step)
            for name, metric in step.items():
                full = name if "/" in name else f"{prefix}/{name}"
                as_mean = metric if metric.reduction in ("min", "max") else mmean(metric.value, 1.0)
                metrics.merge({full: as_mean})
        seconds = time.perf_counter() - started
        logger.debug("%s: %d updates in %.2f s", prefix, len(updates), seconds)
        if engine.flops is not None:
            flops = epochs * engine.flops.train(batch["attention_mask"].sum(-1).tolist())
            mfu = model_flops_utilization(flops, seconds, engine.layout.ranks_per_row, device_name(self.device))
            if mfu is not None:
                metrics[f"perf/mfu/{prefix}"] = mmean(mfu, 1.0)
        return metrics.merge(self.memory_metrics(engine))


def _changes_weights(step: MetricSet) -> bool:
    """Whether an optimizer step must have changed weights: it was taken, with a learning rate and a gradient.

    Args:
        step: what ``TrainEngine.train_batch`` returned.
    """
    return step["skipped_steps"].value == 0 and step["lr"].value > 0 and step["grad_norm"].value > 0


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


class TrainedModelWorker(RoleWorker):
    """A role with one model that it trains: its checkpoints. ``init_model`` makes ``engine``."""

    config: Any
    engine: TrainEngine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write the model's checkpoint into directory ``path``. Collective."""
        self.save_engine(self.engine, self.config.checkpoint, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Restore the model from directory ``path``. Collective."""
        self.engine.load(Path(path), frozenset(self.config.checkpoint.load_contents))


class CriticWorker(TrainedModelWorker):
    """The value model.

    Args:
        config: the ``critic`` section.
        rollout_n: training rows per prompt, because ``ppo_mini_batch_size`` counts prompts.
    """

    config: CriticConfig

    def __init__(self, config: CriticConfig, rollout_n: int = 1, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.rollout_n = rollout_n

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the backbone, add the value head and build the engine. Collective."""
        config = self.config
        self.engine = self.make_engine(
            config.model,
            config,
            config.optim,
            head="value",
            checkpoint=config.checkpoint,
        )
        self.engine.build()
        self.join_mesh("critic", self.engine)
        self.loss = critic_loss(config)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), reuse_fields=True)
    @measured("log_prob")
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B,R): the value before each response token, without gradients."""
        config = self.config
        with self.engine.resident(optimizer=False):
            out = self.engine.forward(
                engine_rows(data),
                VALUES,
                micro=MicroBatching(*config.forward_micro_batch()),
            )
        return DataProto.from_dict({"values": out["values"].cpu()})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), auto_padding=False, reuse_fields=True
    )
    @measured("update")
    def update_critic(self, data: DataProto) -> MetricSet:
        """Run all mini-batch updates of a step on this worker's rows."""
        config = self.config
        rows = data.meta_info.get(MINI_BATCH_ROWS, config.ppo_mini_batch_size * self.rollout_n)
        with self.engine.resident(optimizer=True):
            metrics = self.run_update(
                self.engine,
                engine_rows(data),
                prefix="critic",
                loss=self.loss,
                mini_batch_size=rows // self.engine.layout.dp_size,
                epochs=config.ppo_epochs,
                micro=MicroBatching(*config.micro_batch()),
            )
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_report(self) -> dict[str, int]:
        """Measured bytes of this rank, see :meth:`memory_of`."""
        return self.memory_of(critic=self.engine)


class RewardModelWorker(RoleWorker):
    """A sequence-classification model that scores responses.

    The conversation is written with the reward model's own chat template and tokens: its vocabulary and format
    need not be the policy's.

    Args:
        config: the ``reward_model`` section.
        policy_model: model whose tokenizer decodes the policy's responses.
        max_length: longest conversation in the reward model's tokens.
    """

    def __init__(self, config: RewardModelConfig, policy_model: ModelConfig, max_length: int, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.max_length = config.max_length or max_length
        model = config.model
        self.tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.image_tokens = ImageTokens.of(load_hf_config(model))
        self.policy_tokenizer = load_tokenizer(
            policy_model.tokenizer_path or policy_model.path, trust_remote_code=policy_model.trust_remote_code
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the model and build the engine. Collective."""
        config = self.config
        self.engine = self.make_engine(config.model, config, None, head="classifier")
        self.engine.build()
        self.join_mesh("reward_model", self.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"))
    @measured("log_prob")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B,R): the model's score of each conversation, on the last token of the response.

        Args:
            data: ``responses``, ``response_mask`` (B,R), ``attention_mask``, the chat ``raw_prompt`` (B,) and, where
                prompts have images, ``multi_modal_inputs``.

        Raises:
            DataError: a conversation with images is longer than ``max_length``.
        """
        batch = data.batch
        width = batch["responses"].shape[1]
        present = batch["attention_mask"][:, -width:].bool()
        texts = [
            self.policy_tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)
            for row, keep in zip(batch["responses"], present, strict=True)
        ]
        chats = [
            self._chat(prompt, text) for prompt, text in zip(data.non_tensor_batch["raw_prompt"], texts, strict=True)
        ]
        column = list(data.non_tensor_batch.get(IMAGE_FIELD, [None] * len(chats)))
        images = prompt_parts(column, [0 if isinstance(chat, str) else image_parts(chat) for chat in chats])
        rows = with_images(self._tokenize(chats, images), images)
        with self.engine.resident(optimizer=False):
            scores = self.engine.forward(rows, frozenset({"scores"}), micro=MicroBatching(*self.config.micro_batch()))[
                "scores"
            ].cpu()
        rm_scores = torch.zeros_like(present, dtype=torch.float32)
        has_token = batch["response_mask"].bool().any(-1)
        # the last token that the policy itself made; an empty response has none and keeps 0
        last = (batch["response_mask"].bool() * torch.arange(1, width + 1)).argmax(-1)
        scored = torch.nonzero(has_token).flatten()
        rm_scores[scored, last[scored]] = scores[scored]
        return DataProto.from_dict({"rm_scores": rm_scores})

    def _chat(self, prompt: str | list[dict[str, Any]], response: str) -> str | list[dict[str, Any]]:
        """A conversation for the reward model; text where neither model has a chat template."""
        if isinstance(prompt, str):
            if not getattr(self.tokenizer, "chat_template", None):
                return prompt + response
            prompt = [{"role": "user", "content": prompt}]
        return [*prompt, {"role": "assistant", "content": response}]

    def _tokenize(self, chats: Sequence[str | list[dict[str, Any]]], images: list[dict[str, Any] | None]) -> TensorDict:
        """Conversations as left-padded rows; too long ones lose their beginning, since the response is judged."""
        rows = [self._token_ids(chat, shown) for chat, shown in zip(chats, images, strict=True)]
        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row) :] = torch.tensor(row)
            attention_mask[i, width - len(row) :] = 1
        return TensorDict(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(-1) - 1).clamp_(min=0),
                # every token but the first, which nothing precedes
                "response_mask": attention_mask[:, 1:] * attention_mask[:, :-1],
            },
            batch_size=[len(rows)],
        )

    def _token_ids(self, chat: str | list[dict[str, Any]], images: dict[str, Any] | None) -> list[int]:
        if isinstance(chat, str):
            ids = encode_plain(self.tokenizer, chat)
        else:
            ids = encode(self.tokenizer, render(self.tokenizer, chat, add_generation_prompt=False))
        if images is None:
            return ids[-self.max_length :]
        assert self.image_tokens is not None  # checked at start-up
        counts = self.image_tokens.counts(images["image_grid_thw"].numpy()).tolist()
        ids = repeated(ids, copies_of(ids, self.image_tokens.token_id, counts))
        if len(ids) > self.max_length:
            raise DataError(
                f"a conversation has {len(ids)} tokens of the reward model with those of its images, more than "
                f"reward_model.max_length={self.max_length}, and is not cut; raise it"
            )
        return ids


class ImplicitRewardWorker(TrainedModelWorker):
    """A language model whose log-ratio to its frozen reference is a reward for every token, learnt from outcomes.

    It reads the policy's tokens, so it must have the policy's vocabulary.

    Args:
        config: the ``reward_model`` section.
        rollout_n: training rows per prompt, because ``mini_batch_size`` counts prompts.
    """

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, rollout_n: int = 1, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.rollout_n = rollout_n

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the model and its reference and build the engines. Collective."""
        config = self.config
        reference = replace(
            config.model, path=config.ref_path or config.model.path, lora_rank=0, lora_adapter_path=None
        )
        self.ref = self.make_engine(reference, config, None, head="lm")
        self.ref.build()
        self.engine = self.make_engine(config.model, config, config.optim, head="lm", checkpoint=config.checkpoint)
        self.engine.build()
        self.join_mesh("reward_model", self.engine)
        self.loss = implicit_reward_model_loss(config)

    def _log_probs(self, engine: TrainEngine, batch: TensorDict) -> torch.Tensor:
        with engine.resident(optimizer=False):
            out = engine.forward(batch, POLICY, micro=MicroBatching(*self.config.micro_batch()))
        return out["log_probs"].cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"), reuse_fields=True)
    @measured("log_prob")
    def compute_rm_ref_log_prob(self, data: DataProto) -> DataProto:
        """``rm_ref_log_prob`` (B,R) of the frozen reference, without gradients."""
        return DataProto.from_dict({"rm_ref_log_prob": self._log_probs(self.ref, engine_rows(data))})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"), reuse_fields=True)
    @measured("log_prob")
    def compute_process_rewards(self, data: DataProto) -> DataProto:
        """``process_rewards`` (B,R) of the model as it is now; reads ``rm_ref_log_prob``."""
        batch = engine_rows(data)
        rewards = implicit_rewards(
            self._log_probs(self.engine, batch), batch["rm_ref_log_prob"], batch["response_mask"], self.config.beta
        )
        return DataProto.from_dict({"process_rewards": rewards})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"),
        auto_padding=False,
        reuse_fields=True,
    )
    @measured("update")
    def update_reward_model(self, data: DataProto) -> MetricSet:
        """Learn the ``outcomes`` (B,) of this worker's rows."""
        config = self.config
        rows = config.mini_batch_size * self.rollout_n // self.engine.layout.dp_size
        with self.engine.resident(optimizer=True):
            return self.run_update(
                self.engine,
                engine_rows(data),
                prefix="reward_model",
                loss=self.loss,
                mini_batch_size=rows,
                epochs=1,
                micro=MicroBatching(*config.micro_batch()),
            )
