"""The FSDP2 training engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.checkpoint.staged_shards import StagedShard
from verl.errors import CheckpointError, ConfigError
from verl.models.decoder import compile_dense_parts, decoder_layers
from verl.models.families import must_verify, named_failures, require_agreement
from verl.models.heads import HEADS, PROBE, HeadModel, PolicyModel
from verl.models.loading import (
    LOADERS,
    load_hf_config,
    supports_packing,
)
from verl.models.lora import LoraSettings, adapter_layers, adapters_off, add_adapters, is_adapter_name, merged
from verl.models.noise import give_every_token_its_gradient, noise_of, report_noise, set_training
from verl.models.offload import offload_activations
from verl.models.packing import RowLayout, build_layout
from verl.models.probe import Probe, compare, make_probe
from verl.models.sequence_group import SequenceGroup
from verl.models.sliced import DeferredWeights, local_part
from verl.models.ulysses import check_model, split_sequence
from verl.utils.background import BackgroundTask
from verl.utils.device import empty_cache, get_torch_device
from verl.utils.distributed import get_rank, get_world_size, init_process_group
from verl.utils.flops import FlopsCounter
from verl.utils.metrics import MetricSet, mmean, msum
from verl.utils.tokenizer import unsampled_tokens
from verl.workers.engine.base import (
    GlobalBatchInfo,
    LossFn,
    MicroBatching,
    ParallelLayout,
    TrainEngine,
    WeightForm,
)
from verl.workers.engine.batching import BatchPlan, as_tensordict, join_rows, plan_batch, reduce_metrics, take_rows
from verl.workers.engine.fsdp import checkpoint
from verl.workers.engine.fsdp.sharding import (
    Precision,
    ShardPlacement,
    clip_grad_norm,
    make_mesh,
    make_sequence_mesh,
    shard_model,
    whole_tensor,
)
from verl.workers.engine.images import images_of
from verl.workers.engine.lr_schedules import LRSchedule
from verl.workers.engine.offload import OffloadContext
from verl.workers.engine.oom_retry import OomRetry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig

logger = logging.getLogger(__name__)

_TRAINED = frozenset({"model", "optimizer", "extra"})


class FSDPEngine(TrainEngine):
    """One model, sharded with ``fully_shard``; on one rank without mixed precision a plain module.

    With ``ulysses_sequence_parallel_size`` N, each N neighbouring ranks get the same rows and share their tokens;
    parameters are sharded over all ranks as before.

    Args:
        model_config: which model and how to run it.
        fsdp_config: sharding, offload and numeric types.
        optim_config: optimizer and schedule; None for a model that is only evaluated.
        head: ``"lm"`` (policy, reference), ``"value"`` (critic) or ``"classifier"`` (reward model).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        checkpoint_config: whether loading is strict; None means strict.
        seed: seed of the run.
        renormalise: a policy gives tokens without text the probability 0, as generation never samples them.
        shard_placement: which dimension of each parameter is sharded; None: the first one.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        fsdp_config: FSDPConfig,
        optim_config: OptimConfig | None,
        *,
        head: str = "lm",
        device: str | torch.device = "auto",
        checkpoint_config: CheckpointConfig | None = None,
        seed: int = 1,
        renormalise: bool = True,
        shard_placement: ShardPlacement | None = None,
    ) -> None:
        if head not in HEADS:
            raise ConfigError(f"unknown head {head!r}; use one of {', '.join(HEADS)}")
        self.model_config = model_config
        self.fsdp_config = fsdp_config
        self.optim_config = optim_config
        self.head = head
        self.checkpoint_config = checkpoint_config
        self.seed = seed
        self.renormalise = renormalise
        self.shard_placement = shard_placement
        self._device_name = str(device)
        self.layout = ParallelLayout()
        self.step = 0  # optimizer steps so far, skipped ones included
        self.lr_step = 0
        self._offload = OffloadContext(self._load_part, self._offload_part)
        self._gradient_bytes = 0
        self._save_group: dist.ProcessGroup | None = None
        self._saving = BackgroundTask()
        self._copying = BackgroundTask()  # for a background save; until it is over, nothing that is saved may change
        self._images: dict[str, StagedShard] = {}  # memory for the copies of background saves

    # ---- construction -------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Load, shard, make the optimizer. Every rank reads the model directory itself: no rank waits for another.

        On several ranks parameters get memory when they are sharded, and each rank reads its slices of the files.
        """
        world = get_world_size()
        if world > 1:
            self.device = init_process_group(self._device_kind())
        else:
            self.device = get_torch_device(self._device_kind())
        self._place_rank(get_rank() if world > 1 else 0, world)
        self.precision = Precision.of(self.fsdp_config, self.device, trained=self.optim_config is not None)

        config = load_hf_config(self.model_config)
        self.flops = FlopsCounter.from_config(config, head_outputs=None if self.head == "lm" else 1)
        self.packed = bool(self.model_config.use_remove_padding) and supports_packing(config)
        if self.model_config.use_remove_padding and not self.packed:
            logger.warning("%s cannot run without padding; rows are padded instead", type(config).__name__)
        if self._sequence is not None:
            check_model(config, self._sequence.size, packed=self.packed)
        noise = noise_of(config) if self.optim_config is not None else {}
        if self.layout.rank == 0:
            report_noise(noise, self.model_config.training_noise)
        # equal prompts of two rows differ where something is dropped at random
        self.share_prompts = not (noise and self.model_config.training_noise)
        self.lora = LoraSettings.of(self.model_config)
        deferred = DeferredWeights()  # adapters are made from the values of what they adapt
        with named_failures(config, "building it"):
            hf_model = LOADERS[self.head](
                self.model_config,
                dtype=self.precision.master,
                hf_config=config,
                deferred=deferred if world > 1 and self.lora is None else None,
            )
        give_every_token_its_gradient(hf_model)
        if self.lora is not None:
            add_adapters(hf_model, self.lora, self.seed)
        if self.optim_config is None:
            hf_model.requires_grad_(False)
        elif self.model_config.enable_gradient_checkpointing:
            hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.fsdp_config.use_torch_compile:
            compile_dense_parts(decoder_layers(hf_model, []))
        self.module: HeadModel = HEADS[self.head](hf_model)
        if isinstance(self.module, PolicyModel):
            saving = self.model_config.use_fused_kernels or self.fsdp_config.entropy_checkpointing
            self.module.keep_logits = not saving
            rows = hf_model.get_output_embeddings().weight.shape[0]
            self.module.transform = self.module.transform.without(self._unsampled(rows), self.device)

        self._fsdp: FSDPModule | None = None  # the module again, if FSDP manages it
        self._shard_group: dist.ProcessGroup | None = None
        needs_fsdp = world > 1 or self.fsdp_config.offload_policy or self.precision.compute != self.precision.master
        if needs_fsdp:
            init_process_group(self._device_kind())
            mesh = make_mesh(self.device, self.fsdp_config.fsdp_size)
            self._fsdp = shard_model(
                self.module, mesh, self.fsdp_config, self.precision, self.device, self.shard_placement
            )
            if deferred:
                target = torch.device("cpu") if self.fsdp_config.offload_policy else self.device
                deferred.materialise(self.module, self.hf_tensors, target)
            if mesh["fsdp"].size() > 1:
                self._shard_group = mesh["fsdp"].get_group()
        else:
            self.module.to(self.device)

        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: LRSchedule | None = None
        if self.optim_config is not None:
            self._parameters = [p for p in self.module.parameters() if p.requires_grad]
            self.optimizer = _make_optimizer(self.optim_config, self._parameters)
            self.schedule = LRSchedule(self.optim_config)
        self.module.eval()
        self._guard = OomRetry(self.device, world)
        self._offload.release("model")
        if must_verify(self.model_config, config):
            with named_failures(config, "a forward pass"):
                self._verify(config)

    def _unsampled(self, size: int) -> tuple[int, ...]:
        """Tokens of a policy with ``size`` ones that generation never samples."""
        model = self.model_config
        if not self.renormalise:
            return ()
        return unsampled_tokens(model.path, model.tokenizer_path, model.trust_remote_code, size)

    def probe(self) -> Probe:
        """Rows on which differences between two forms of the model show."""
        masked = self.module.transform.unsampled if isinstance(self.module, PolicyModel) else None
        return make_probe(self.module.model.config, excluded=() if masked is None else masked.tolist())

    def _verify(self, config: PreTrainedConfig) -> None:
        """Compare the model, as it runs here, with plain Transformers on the same weights. Collective.

        Raises:
            ConfigError: the numbers differ.
        """
        probe = self.probe()
        with self.resident(optimizer=False), torch.no_grad():
            want = [self.module(row, frozenset({PROBE}))[PROBE] for row in probe.rows]
        require_agreement(
            self._probed(probe),
            want,
            probe,
            model_type=config.model_type,
            what=f"{'packed' if self.packed else 'padded'} training rows",
            dtype=self.precision.compute,
            remedy=lambda: self._remedy(probe, want),
        )

    def _probed(self, probe: Probe) -> list[Tensor]:
        return probe.split(self.forward(probe.batch(), frozenset({PROBE}), micro=MicroBatching())[PROBE])

    def _remedy(self, probe: Probe, want: list[Tensor]) -> str:
        """What helps where the numbers of packed or padded rows are wrong."""
        last = "model.verify=never trains it all the same"
        if not self.packed:
            return f"This model cannot be trained here; {last}"
        self.packed = False
        if (
            self._sequence is None
            and compare(self._probed(probe), want, probe.rows, dtype=self.precision.compute).agrees
        ):
            return f"Padded rows agree: set model.use_remove_padding=false; {last}"
        return f"Padded rows differ too, so this model cannot be trained here; {last}"

    def _place_rank(self, rank: int, world: int) -> None:
        """Make the groups of ranks that share sequences, and of those that see different rows."""
        size = self.fsdp_config.ulysses_sequence_parallel_size
        self._sequence: SequenceGroup | None = None
        self._dp_group: dist.ProcessGroup | None = None  # all ranks
        if size > 1:
            init_process_group(self._device_kind())
            mesh = make_sequence_mesh(self.device, size)
            self._sequence = SequenceGroup(mesh["sp"].get_group(), mesh["sp"].get_local_rank(), size)
            self._dp_group = mesh["dp"].get_group()
        sp_rank = rank % size
        self.layout = ParallelLayout(
            rank=rank,
            world_size=world,
            dp_rank=rank // size,
            dp_size=world // size,
            sp_rank=sp_rank,
            sp_size=size,
            is_output_rank=sp_rank == 0,
        )

    def _device_kind(self) -> str:
        return torch.device(self._device_name).type if self._device_name != "auto" else "auto"

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
        rows_of = as_tensordict(batch, reads_images=True)
        rows = rows_of["input_ids"].shape[0]

        def run(micro: MicroBatching) -> dict[str, Tensor]:
            plan = self._plan(rows_of, micro)
            layouts = (self._layout(take_rows(rows_of, part, rows)) for part in plan.parts)
            return join_rows([self.module(layout, want, temperature) for layout in layouts], plan.parts, rows)

        used = nullcontext() if adapter else adapters_off(self.module)
        with self.resident(optimizer=False), torch.no_grad(), used:
            self.module.eval()
            results = self._guard.run(micro, rows_of["attention_mask"], run)
            self._reshard()  # the root keeps its parameters gathered otherwise, and layers may be asked to
        return {name: value for name, value in results.items() if name in want}

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
        rows_of = as_tensordict(batch, reads_images=True)
        with self.resident(optimizer=True):
            set_training(self.module, noise=self.model_config.training_noise)
            pieces = self._guard.run(
                micro,
                rows_of["attention_mask"],
                lambda micro: self._accumulate(rows_of, loss, want, micro, temperature),
            )
            lr = self.schedule.lr(self.lr_step)
            self._gradient_bytes = sum(local_part(p.grad).nbytes for p in self._parameters if p.grad is not None)
            norm, finite = clip_grad_norm(self._parameters, float(self.optim_config.clip_grad), self._shard_group)
            if finite:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self._copying.settle()
                self.optimizer.step()
            else:
                logger.warning(
                    "gradient norm is %s at step %d: parameters stay as they are; look at the inputs of the loss",
                    norm,
                    self.step,
                )
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.lr_step += int(advance_lr)
        metrics = reduce_metrics(pieces, dp_size=self.layout.dp_size, group=self._dp_group)
        # Added after the reduction: they are the same on every rank and must count once.
        metrics["grad_norm"] = mmean(norm, 1.0)
        metrics["lr"] = mmean(lr, 1.0)
        metrics["skipped_steps"] = msum(0.0 if finite else 1.0)
        return metrics

    def _accumulate(
        self, batch: TensorDict, loss: LossFn, want: frozenset[str], micro: MicroBatching, temperature: float
    ) -> list[MetricSet]:
        """The gradient of a whole mini-batch, from zero; the metrics of its micro-batches."""
        assert self.optimizer is not None
        rows = batch["input_ids"].shape[0]
        plan = self._plan(batch, micro)
        pieces: list[MetricSet] = []
        self.optimizer.zero_grad(set_to_none=True)
        last = len(plan.parts) - 1
        for number, part in enumerate(plan.parts):
            if self._fsdp is not None and last > 0:
                # Shards are summed over micro-batches: whole gradients would not fit. Replicas wait for the last.
                self._fsdp.set_requires_all_reduce(number == last)
                self._fsdp.set_is_last_backward(number == last)
            pieces.append(self._backward(take_rows(batch, part, rows), loss, want, temperature, plan.info))
        return pieces

    def _backward(
        self, rows: TensorDict, loss: LossFn, want: frozenset[str], temperature: float, info: GlobalBatchInfo
    ) -> MetricSet:
        """Forward, loss and backward of one micro-batch."""
        layout = self._layout(rows)
        with self._saved_activations():
            outputs = self.module(layout, want, temperature)
            if rows.batch_size[0] == 0:  # nothing to learn, but the collectives of the backward pass need this rank
                sum(value.sum() for value in outputs.values()).backward()
                return MetricSet()
            if self.device.type != "cpu":
                rows = rows.to(self.device)
            value, metrics = loss(outputs, rows, info)
        value.backward()
        return metrics

    def _plan(self, batch: TensorDict, micro: MicroBatching) -> BatchPlan:
        share = self.packed and self.share_prompts
        if micro.max_tokens is not None:  # which counts for one rank
            micro = replace(micro, max_tokens=micro.max_tokens * self.layout.sp_size)
        return plan_batch(batch, micro, share_prompts=share, dp_size=self.layout.dp_size, group=self._dp_group)

    def _layout(self, rows: TensorDict) -> RowLayout:
        layout = build_layout(
            rows["input_ids"],
            rows["attention_mask"],
            rows["position_ids"],
            rows["response_mask"],
            packed=self.packed,
            share_prompts=self.share_prompts,
            images=images_of(rows, self.module.image_tokens),
        )
        if self._sequence is not None:
            layout = split_sequence(layout, self._sequence)
        return layout.to(self.device)

    def _saved_activations(self) -> AbstractContextManager[Any]:
        if self.model_config.enable_activation_offload and self.device.type != "cpu":
            return offload_activations(self.device)
        return nullcontext()

    def _reshard(self) -> None:
        """Give back gathered parameters; resharding the root alone would leave the layers as they are."""
        if self._fsdp is not None:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # ---- weights ------------------------------------------------------------------------------------------------

    def hf_tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and stored buffers (DTensors where sharded) by Hugging Face name."""
        self._reshard()
        return dict(self.module.hf_named_tensors())

    def saved_tensors(self) -> dict[str, Tensor]:
        """Of :meth:`hf_tensors` those that a checkpoint needs: all, or with adapters the ones that train."""
        tensors = self.hf_tensors()
        return tensors if self.lora is None else {name: t for name, t in tensors.items() if t.requires_grad}

    def named_tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        with self.resident(optimizer=False):
            adapted = {f"{name}.weight": layer for name, layer in adapter_layers(self.module.model).items()}
            for name, tensor in self._tensors_of(form).items():
                whole = whole_tensor(tensor.detach())
                if form == "merged" and name in adapted:  # what runs elsewhere is a plain layer that computes the same
                    layer = adapted[name]
                    a, b = whole_tensor(layer.lora_A.detach()), whole_tensor(layer.lora_B.detach())
                    whole = merged(whole, a, b, layer.scaling)
                yield name, whole

    def local_tensors(self, form: WeightForm = "merged") -> dict[str, Tensor] | None:
        if self.layout.world_size > 1 or (self.lora is not None and form == "merged"):
            return None
        if self._offloads("model") and self.device.type != "cpu":
            return None  # off-loading replaces the tensors; an alias would keep the copy on the device alive
        return {name: local_part(tensor.detach()) for name, tensor in self._tensors_of(form).items()}

    def _tensors_of(self, form: WeightForm) -> dict[str, Tensor]:
        """Of :meth:`hf_tensors` those that ``form`` is made of, adapters last."""
        tensors = self.hf_tensors()
        adapters = {name: tensor for name, tensor in tensors.items() if is_adapter_name(name)}
        if form == "adapters":
            return adapters
        base = {name: tensor for name, tensor in tensors.items() if name not in adapters}
        return base | adapters if form == "apart" else base

    def shards(self) -> dict[str, Tensor] | None:
        return self.hf_tensors() if self.lora is None else None  # adapters are merged into whole matrices

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, path: str | Path, contents: frozenset[str] = _TRAINED) -> None:
        with self.resident(optimizer=True):
            checkpoint.write(checkpoint.take(self, frozenset(contents)), Path(path))

    def start_save(self, path: str | Path, contents: frozenset[str] = _TRAINED) -> BackgroundTask:
        if self._saving.running:
            raise CheckpointError(f"cannot save to {path} yet: an earlier background save is still being written")
        with self.resident(optimizer=True):
            snapshot = checkpoint.take(self, frozenset(contents), images=self._images)
            if self.device.type != "cpu":
                snapshot.copy()  # before the device's memory is given back
        # On CPUs beside the next passes, which only read; the optimizer waits for it, and a failure is the save's.
        copying = self._copying = BackgroundTask(snapshot.copy, name="verl-copy")
        if self._save_group is None and self.layout.world_size > 1:
            self._save_group = dist.new_group(backend="gloo")  # collectives of a thread must not mix with training's

        def write() -> None:
            copying.wait()
            checkpoint.write(snapshot, Path(path), self._save_group)

        self._saving = BackgroundTask(write, name="verl-save")
        return self._saving

    def load(self, path: str | Path, contents: frozenset[str] = _TRAINED) -> None:
        self._copying.settle()
        with self.resident(optimizer=True):
            checkpoint.load(self, Path(path), frozenset(contents))

    # ---- memory -------------------------------------------------------------------------------------------------

    def resident(self, *, optimizer: bool) -> AbstractContextManager[Any]:
        return self._offload.of(["model", "optimizer"] if optimizer and self.optimizer is not None else ["model"])

    def _offloads(self, part: str) -> bool:
        wanted = self.fsdp_config.param_offload if part == "model" else self.fsdp_config.optimizer_offload
        # With the offload policy FSDP itself keeps everything on the host.
        return bool(wanted) and not self.fsdp_config.offload_policy

    def _load_part(self, part: str) -> None:
        if self._offloads(part):
            self._move(part, self.device)

    def _offload_part(self, part: str) -> None:
        if self._offloads(part):
            self._move(part, torch.device("cpu"))
            empty_cache(self.device)

    def _move(self, part: str, target: torch.device) -> None:
        if part == "model":
            self.module.to(target)
        elif self.optimizer is not None:
            for values in self.optimizer.state.values():
                for key, value in values.items():
                    # Step counters stay where the optimizer put them.
                    if isinstance(value, Tensor) and value.dim() > 0:
                        values[key] = value.to(target, non_blocking=target.type != "cpu")

    def state_bytes(self) -> dict[str, int]:
        self._reshard()
        states = (
            [] if self.optimizer is None else [v for state in self.optimizer.state.values() for v in state.values()]
        )
        return {
            "parameters": sum(local_part(p.detach()).nbytes for p in self.module.parameters()),
            "gradients": self._gradient_bytes,
            "optimizer": sum(local_part(v).nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0),
            "copies for saving": sum(image.nbytes for image in self._images.values()),
        }


def _make_optimizer(config: OptimConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one fused call over all parameters, or another optimizer of ``torch.optim`` by name."""
    kind = getattr(torch.optim, config.optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"optim.optimizer={config.optimizer!r} is not a class of torch.optim; use AdamW")
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in ("Adam", "AdamW"):
        settings |= {"betas": (float(config.betas[0]), float(config.betas[1])), "eps": config.eps, "fused": True}
    return kind(parameters, **settings)


__all__ = ["FSDPEngine"]
