"""The Megatron-core training engine: tensor, pipeline, context, expert and data parallel.

The engine itself packs rows without padding (:mod:`verl.models.packing`) and runs Megatron-core's schedule over the
micro-batches. The rest is in modules of one job each: ``parallel`` (process groups), ``families``
and ``model`` (models), ``modules`` (their parts), ``bridge``, ``weights``,
``tensor_layouts`` and ``slices`` (Hugging Face weights), ``lora`` (adapters), ``outputs``
(from hidden states to log-probs), ``optimizer`` (optimizer), ``checkpoint`` (checkpoints),
``storage_offload`` (off-loading) and, on machines without CUDA, ``cpu``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.errors import ConfigError
from verl.models.families import must_verify, require_agreement
from verl.models.heads import CLASSIFIER_OUTPUTS, LM_OUTPUTS, VALUE_OUTPUTS
from verl.models.loading import load_causal_lm, load_hf_config, resolve_model_dir
from verl.models.lora import LoraSettings
from verl.models.noise import noise_of, report_noise
from verl.models.packing import RowLayout, build_layout
from verl.models.probe import make_probe, plain_log_probs
from verl.utils.device import default_compute_dtype, empty_cache
from verl.utils.distributed import init_process_group
from verl.utils.flops import FlopsCounter
from verl.utils.metrics import MetricSet, mmean, msum
from verl.utils.tokenizer import unsampled_tokens
from verl.workers.engine.base import (
    LossFn,
    MicroBatching,
    ParallelLayout,
    SlicedWeight,
    TrainEngine,
    WeightForm,
)
from verl.workers.engine.batching import BatchPlan, as_tensordict, join_rows, plan_batch, reduce_metrics, take_rows
from verl.workers.engine.lr_schedules import LRSchedule
from verl.workers.engine.megatron.bridge import Bridge, CheckpointFiles
from verl.workers.engine.megatron.families import model_settings
from verl.workers.engine.megatron.optimizer import add_optimizer, clip_and_step, state_tensors
from verl.workers.engine.megatron.outputs import Outputs
from verl.workers.engine.megatron.parallel import construction, current_layout, join_parallel_groups
from verl.workers.engine.megatron.storage_offload import StorageOffloader
from verl.workers.engine.offload import OffloadContext

if TYPE_CHECKING:
    from verl.config import CheckpointConfig, MegatronConfig, ModelConfig, OptimConfig

logger = logging.getLogger(__name__)

_OUTPUTS = {"lm": LM_OUTPUTS, "value": VALUE_OUTPUTS, "classifier": CLASSIFIER_OUTPUTS}
_TRAINED = frozenset({"model", "optimizer", "extra"})


@dataclass
class _MicroBatch:
    """One micro-batch on its way through this rank's stage.

    Attributes:
        rows: the fields.
        layout: where results belong.
        input_ids: (1, T') this rank's tokens, padding included.
        packed: what the layers need.
        surplus: it only fills the schedule up; nobody waits for its results.
    """

    rows: TensorDict
    layout: RowLayout
    input_ids: Tensor
    packed: Any
    surplus: bool = False


class MegatronEngine(TrainEngine):
    """One model on Megatron-core.

    Args:
        model_config: which model and how to run it.
        megatron_config: parallel sizes, off-loading and numeric types.
        optim_config: optimizer and schedule; None for a model that is only evaluated.
        head: ``"lm"`` (policy, reference), ``"value"`` (critic) or ``"classifier"`` (reward model).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        checkpoint_config: whether loading is strict; None means strict.
        seed: seed of the run.
        renormalise: a policy gives tokens without text the probability 0, as generation never samples them.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        megatron_config: MegatronConfig,
        optim_config: OptimConfig | None,
        *,
        head: str = "lm",
        device: str | torch.device = "auto",
        checkpoint_config: CheckpointConfig | None = None,
        seed: int = 1,
        renormalise: bool = True,
    ) -> None:
        if head not in _OUTPUTS:
            raise ConfigError(f"unknown head {head!r}; use one of {', '.join(_OUTPUTS)}")
        if not model_config.use_remove_padding:
            raise ConfigError(
                "model.use_remove_padding=False: the Megatron engine always removes padding; leave the key out"
            )
        self.model_config = model_config
        self.megatron_config = megatron_config
        self.optim_config = optim_config
        self.head = head
        self.lora: LoraSettings | None = None  # from when the model has them
        self.checkpoint_config = checkpoint_config
        self.seed = seed
        self.renormalise = renormalise
        self._device_name = str(device)
        self.layout = ParallelLayout()
        self.step = 0  # optimizer steps so far, skipped ones included
        self.lr_step = 0
        self._offload = OffloadContext(self._load_part, self._offload_part)

    # ---- construction -------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Join the groups, make this rank's part of the model, read its weights, make the optimizer."""
        kind = "auto" if self._device_name == "auto" else torch.device(self._device_name).type
        self.device = init_process_group(kind)
        config = self.megatron_config
        sizes = join_parallel_groups(config, self.device, self.seed if config.seed is None else config.seed)
        self.layout = current_layout()
        # only now: importing Megatron-core's modules on a machine without CUDA needs the adaptation
        from verl.workers.engine.megatron import model

        self.hf_config = load_hf_config(self.model_config)
        self.flops = FlopsCounter.from_config(self.hf_config, head_outputs=None if self.head == "lm" else 1)
        dtype = default_compute_dtype(self.device) if config.dtype == "auto" else getattr(torch, config.dtype)
        trained = self.optim_config is not None
        settings = model_settings(self.hf_config)
        if trained and self.layout.rank == 0:
            report_noise(noise_of(self.hf_config), self.model_config.training_noise)
        if not self.model_config.training_noise:
            settings.transformer.update(attention_dropout=0.0, hidden_dropout=0.0)
        outputs = self._head_outputs()
        with construction(self.device):
            self.config = model.transformer_config(
                settings,
                config,
                sizes,
                dtype=dtype,
                recompute=trained and self.model_config.enable_gradient_checkpointing,
            )
            # equal prompts of two rows differ where something is dropped at random
            self.share_prompts = not (self.config.attention_dropout or self.config.hidden_dropout)
            self.chunks: list[Any] = list(
                model.build_chunks(
                    settings,
                    self.config,
                    self.device,
                    outputs=outputs,
                    head_bias=self.head == "value",
                    max_length=self.hf_config.max_position_embeddings,
                )
            )
            self.models = list(self.chunks)  # without the wrapper that reduces gradients
            self.bridge = Bridge(
                self.hf_config,
                self.chunks,
                self.layout,
                head=self.head,
                outputs=outputs,
                multiple_of=model.VOCAB_MULTIPLE,
                grouped=self.config.moe_grouped_gemm,
            )
            self.optimizer: Any = None
            self.schedule: LRSchedule | None = None
            self._load_initial_weights()
            if (lora := LoraSettings.of(self.model_config)) is not None:
                self._add_adapters(lora)
            if self.optim_config is None:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
            else:
                self.chunks, self.optimizer = add_optimizer(
                    self.models,
                    self.config,
                    self.optim_config,
                    dtype=dtype,
                    distributed=config.use_distributed_optimizer,
                    device=self.device,
                )
                self.schedule = LRSchedule(self.optim_config)
        self._outputs = Outputs(
            self.models[-1],
            head=self.head,
            layout=self.layout,
            vocab_size=settings.vocab_size,
            transform=settings.logits.without(self._unsampled(settings.vocab_size), self.device),
            keep=not self.model_config.use_fused_kernels,
        )
        self._offloaders = self._make_offloaders()
        self._set_training(False)
        self._offload.release("model")
        self._offload.release("optimizer")
        if self.head == "lm" and must_verify(self.model_config, self.hf_config):
            self._verify()

    def _unsampled(self, size: int) -> tuple[int, ...]:
        """Tokens of a policy with ``size`` ones that generation never samples."""
        model = self.model_config
        if self.head != "lm" or not self.renormalise:
            return ()
        return unsampled_tokens(model.path, model.tokenizer_path, model.trust_remote_code, size)

    def _verify(self) -> None:
        """Compare the model with plain Transformers on the weights of its directory, which rank 0 loads. Collective.

        Raises:
            ConfigError: the numbers differ.
        """
        if self.lora is not None and self.lora.adapter_path:
            logger.info("model.verify: not compared with plain Transformers, which has no trained adapter here")
            return
        unsampled = self._unsampled(self.hf_config.vocab_size)
        allowed = torch.ones(self.hf_config.vocab_size, dtype=torch.bool)
        allowed[list(unsampled)] = False
        probe = make_probe(self.hf_config, excluded=unsampled)
        got = probe.split(self.forward(probe.batch(), frozenset({"log_probs"}), micro=MicroBatching())["log_probs"])
        box: list[Any] = [None]
        if self.layout.rank == 0:
            plain = load_causal_lm(self.model_config, hf_config=load_hf_config(self.model_config))
            box = [plain_log_probs(plain, probe.rows, allowed=allowed)]
        dist.broadcast_object_list(box, 0)
        require_agreement(
            got,
            box[0],
            probe,
            model_type=self.hf_config.model_type,
            what="training rows of Megatron-core",
            dtype=self.config.params_dtype,
            remedy=lambda: "Use strategy=fsdp; model.verify=never trains it all the same",
        )

    def _head_outputs(self) -> int:
        if self.head == "lm":
            return 0
        names = self.hf_config.architectures or []
        if self.head == "classifier" and any(name.endswith("ForSequenceClassification") for name in names):
            return int(self.hf_config.num_labels)
        return 1

    def _load_initial_weights(self) -> None:
        files = CheckpointFiles(resolve_model_dir(self.model_config.path, use_shm=self.model_config.use_shm))
        missing = self.bridge.load(files, optional=frozenset({"score.weight", "score.bias"}))
        if missing and self.head == "classifier":
            logger.warning(
                "%s has no trained score head; it starts at zero and every score is 0 until it is trained",
                self.model_config.path,
            )
        if self.megatron_config.use_dist_checkpointing:
            from verl.workers.engine.megatron import checkpoint

            assert self.megatron_config.dist_checkpointing_path is not None
            checkpoint.load_weights(self, Path(self.megatron_config.dist_checkpointing_path))

    def _add_adapters(self, lora: LoraSettings) -> None:
        from verl.workers.engine.megatron.lora import add_adapters, keep_gradients_flowing

        self.lora = lora
        add_adapters(
            self.bridge,
            self.hf_config,
            lora,
            head=self.head,
            seed=self.seed,
            sequence_parallel=self.config.sequence_parallel,
        )
        if self.optim_config is not None:
            keep_gradients_flowing(self.models)

    @contextmanager
    def _adapters(self, enabled: bool) -> Iterator[None]:
        """Within the context the model computes with its adapters, or without."""
        if self.lora is None or enabled:
            yield
            return
        from verl.workers.engine.megatron.lora import set_adapters

        set_adapters(self.models, False)
        try:
            yield
        finally:
            set_adapters(self.models, True)

    # ---- running ------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: TensorDict | Mapping[str, Tensor],
        want: frozenset[str],
        *,
        micro: MicroBatching,
        temperature: float = 1.0,
        adapter: bool = True,
    ) -> dict[str, Tensor]:
        self._check(want)
        rows_of = as_tensordict(batch)
        rows = rows_of["input_ids"].shape[0]
        plan = self._plan(rows_of, micro)
        pieces: list[dict[str, Tensor]] = []

        def keep(item: _MicroBatch, outputs: dict[str, Tensor]) -> Tensor:
            pieces.append(outputs)
            return next(iter(outputs.values())).new_zeros(())

        with self.resident(optimizer=False), torch.no_grad(), self._adapters(adapter):
            self._set_training(False)
            self._run(rows_of, plan, want, temperature, keep, forward_only=True)
        joined = join_rows(pieces, plan.parts, rows) if pieces else {}
        return {name: value for name, value in self._from_last_stage(joined).items() if name in want}

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
        if self.optimizer is None or self.schedule is None or self.optim_config is None:
            raise ConfigError("this engine was made without an optimizer and only evaluates; give it optim_config")
        self._check(want)
        rows_of = as_tensordict(batch)
        plan = self._plan(rows_of, micro)
        pieces: list[MetricSet] = []

        def differentiate(item: _MicroBatch, outputs: dict[str, Tensor]) -> Tensor:
            if item.rows.batch_size[0] == 0:  # nothing to learn, but other ranks wait in the backward pass
                return torch.stack([value.sum() for value in outputs.values()]).sum()
            value, metrics = loss(outputs, item.rows, plan.info)
            pieces.append(metrics)
            return value

        with self.resident(optimizer=True):
            self._set_training(True)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(rows_of, plan, want, temperature, differentiate, forward_only=False)
            lr = self.schedule.lr(self.lr_step)
            norm, finite = clip_and_step(
                self.optimizer, largest=float(self.optim_config.clip_grad), lr=lr, step=self.step
            )
            self.step += 1
            self.lr_step += int(advance_lr)
        metrics = MetricSet()
        if self.layout.pp_rank == self.layout.pp_size - 1:
            metrics = reduce_metrics(pieces, dp_size=self.layout.dp_size, group=self._dp_group())
        metrics = self._from_last_stage(metrics)
        metrics["grad_norm"] = mmean(norm, 1.0)
        metrics["lr"] = mmean(lr, 1.0)
        metrics["skipped_steps"] = msum(0.0 if finite else 1.0)
        return metrics

    def _run(
        self,
        batch: TensorDict,
        plan: BatchPlan,
        want: frozenset[str],
        temperature: float,
        consume: Any,
        *,
        forward_only: bool,
    ) -> None:
        """Run Megatron-core's schedule over the micro-batches; ``consume`` is called on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = batch["input_ids"].shape[0]
        parts = list(plan.parts)
        if self.config.virtual_pipeline_model_parallel_size:  # the interleaved schedule goes in rounds of all stages
            parts += [[] for _ in range(-len(parts) % self.layout.pp_size)]
        layouts = [self._row_layout(take_rows(batch, part, rows)) for part in parts]
        tokens = [self._padded(layout.input_ids.shape[1]) for _, layout in layouts]
        if self.config.virtual_pipeline_model_parallel_size:
            tokens = [max(tokens)] * len(tokens)
        items = [
            self._micro_batch(part, layout, length) for (part, layout), length in zip(layouts, tokens, strict=True)
        ]
        for item in items[len(plan.parts) :]:
            item.surplus = True
        count = len(items)

        def forward_step(iterator: Iterator[_MicroBatch], model: Any) -> tuple[Tensor, Any]:
            item = next(iterator)
            hidden = model(
                input_ids=item.input_ids, position_ids=None, attention_mask=None, packed_seq_params=item.packed
            )

            def finish(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                outputs = self._outputs.fields(hidden, item.layout, want, temperature)
                if forward_only and item.surplus:
                    return hidden.new_zeros(()), {}
                # the schedule takes the mean over micro-batches; losses here are parts of one sum
                return consume(item, outputs) * count, {}

            return hidden, finish

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=count,
            seq_length=max(tokens),  # read only where all are the same
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _row_layout(self, rows: TensorDict) -> tuple[TensorDict, RowLayout]:
        layout = build_layout(
            rows["input_ids"],
            rows["attention_mask"],
            rows["position_ids"],
            rows["response_mask"],
            packed=True,
            share_prompts=self.share_prompts,
        )
        return rows, layout.to(self.device)

    def _padded(self, tokens: int) -> int:
        """Length of a sequence that ranks can divide."""
        unit = self.layout.sp_size * (self.layout.tp_size if self.config.sequence_parallel else 1)
        return tokens + -tokens % unit

    def _micro_batch(self, rows: TensorDict, layout: RowLayout, tokens: int) -> _MicroBatch:
        """This rank's slice of the packed rows, padded to ``tokens`` in all."""
        from verl.workers.engine.megatron.modules import PackedRows

        padding = tokens - layout.input_ids.shape[1]
        ids, positions = (
            torch.nn.functional.pad(x, (0, padding)).chunk(self.layout.sp_size, 1)[self.layout.sp_rank]
            for x in (layout.input_ids, layout.position_ids)
        )
        packed = PackedRows(plan=layout.plan, positions=positions[0])
        if self.device.type != "cpu":
            rows = rows.to(self.device)
        return _MicroBatch(rows, layout, ids, packed)

    def _plan(self, batch: TensorDict, micro: MicroBatching) -> BatchPlan:
        if micro.max_tokens is not None:  # which counts for one rank
            micro = replace(micro, max_tokens=micro.max_tokens * self.layout.sp_size)
        return plan_batch(
            batch, micro, share_prompts=self.share_prompts, dp_size=self.layout.dp_size, group=self._dp_group()
        )

    def _check(self, want: frozenset[str]) -> None:
        offered = _OUTPUTS[self.head]
        if not want <= offered:
            raise ConfigError(
                f"a model with the head {self.head!r} computes {sorted(offered)}, not {sorted(want - offered)}"
            )

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def _dp_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    def _from_last_stage(self, value: Any) -> Any:
        """What the last pipeline stage has, on all of them."""
        if self.layout.pp_size == 1:
            return value
        group = self.bridge.pp_group
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(group, self.layout.pp_size - 1), group=group)
        received = box[0]
        if type(received) is dict:  # of tensors, which arrive on the device of their sender
            return {name: tensor.to(self.device) for name, tensor in received.items()}
        return received

    # ---- weights ------------------------------------------------------------------------------------------------

    def named_tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        with self.resident(optimizer=False):
            if form != "adapters":
                yield from self.bridge.export(merge=form == "merged")
            if form != "merged":
                yield from self.bridge.export_adapters()

    def local_tensors(self, form: WeightForm = "merged") -> dict[str, Tensor] | None:
        """None: fused weights are stored in another order than the Hugging Face tensors they are made of."""
        return None

    def shards(self) -> dict[str, SlicedWeight] | None:
        return self.bridge.shards() if self.lora is None else None  # adapters are merged into whole matrices

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, path: str | Path, contents: frozenset[str] = _TRAINED) -> None:
        from verl.workers.engine.megatron import checkpoint

        with self.resident(optimizer=True):
            checkpoint.save(self, Path(path), frozenset(contents))

    def load(self, path: str | Path, contents: frozenset[str] = _TRAINED) -> None:
        from verl.workers.engine.megatron import checkpoint

        with self.resident(optimizer=True):
            checkpoint.load(self, Path(path), frozenset(contents))

    # ---- memory -------------------------------------------------------------------------------------------------

    def resident(self, *, optimizer: bool) -> AbstractContextManager[Any]:
        return self._offload.of(["model", "optimizer"] if optimizer and self.optimizer is not None else ["model"])

    def _load_part(self, part: str) -> None:
        for offloader in self._offloaders[part]:
            offloader.reload()

    def _offload_part(self, part: str) -> None:
        for offloader in self._offloaders[part]:
            offloader.offload()
        if self._offloaders[part]:
            empty_cache(self.device)

    def _make_offloaders(self) -> dict[str, list[StorageOffloader]]:
        """What moves to the host; nothing on CPU, where the host is the device."""
        found: dict[str, list[StorageOffloader]] = {"model": [], "optimizer": []}
        if self.device.type == "cpu":
            return found
        config = self.megatron_config
        if config.param_offload:
            found["model"].append(StorageOffloader(self.bridge.local.values))
        if self.optimizer is None:
            return found
        if config.grad_offload:
            found["optimizer"].append(StorageOffloader(self._gradients, keep=False))
        if config.optimizer_offload:
            found["optimizer"].append(StorageOffloader(self._optimizer_tensors))
        return found

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for c in self.chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)]

    def _optimizer_tensors(self) -> list[Tensor]:
        """State, and the optimizer's own copies of the parameters where it has some."""
        model = {tensor.untyped_storage()._cdata for tensor in self.bridge.local.values()}
        tensors: list[Tensor] = []
        for group in self.optimizer.param_groups:
            tensors += [p for p in group["params"] if p.untyped_storage()._cdata not in model]
        return tensors + state_tensors(self.optimizer)

    def state_bytes(self) -> dict[str, int]:
        return {
            "parameters": sum(tensor.nbytes for tensor in self.bridge.local.values()),
            "gradients": 0 if self.optimizer is None else sum(tensor.nbytes for tensor in self._gradients()),
            "optimizer": 0 if self.optimizer is None else sum(tensor.nbytes for tensor in self._optimizer_tensors()),
        }


__all__ = ["MegatronEngine"]
