"""Two ways to run a model on a batch: the real training engine, and plain Transformers to compare it with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.models.loading import quiet_transformers
from verl.models.sliced import local_part
from verl.selftest.model import ModelDirs
from verl.selftest.splits import PLAIN, Cut
from verl.utils.metrics import MetricSet, mmean, msum
from verl.workers.engine.base import GlobalBatchInfo
from verl.workers.engine.fsdp.engine import FSDPEngine

TEMPERATURE = 0.7
POLICY_OUTPUTS = frozenset({"log_probs", "entropys"})


@dataclass
class Step:
    """What one update computes, before anything moves.

    Attributes:
        loss: the scalar that was differentiated, summed over micro-batches and averaged over ranks.
        metrics: by name.
        gradient: whole gradient of each parameter, under Hugging Face names, on CPU.
        log_ratio: largest ``|log_probs - old_log_probs|`` over the response tokens; None without old ones.
    """

    loss: float
    metrics: dict[str, float]
    gradient: dict[str, Tensor]
    log_ratio: float | None


class Recorder:
    """A loss that takes notes; everything else of it is that of the loss itself."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.total = 0.0
        self.log_ratio: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo
    ) -> tuple[Tensor, MetricSet]:
        """The loss of a micro-batch."""
        value, metrics = self._loss(outputs, rows, info)
        self.total += float(value.detach()) / info.dp_size
        if "log_probs" in outputs and "old_log_probs" in rows.keys():  # noqa: SIM118 - a TensorDict iterates its rows
            mask = rows["response_mask"] != 0
            difference = (outputs["log_probs"].detach() - rows["old_log_probs"]).abs()[mask]
            largest = float(difference.max()) if difference.numel() else 0.0
            # not max(): it would lose a nan
            if self.log_ratio is None or not largest <= self.log_ratio:
                self.log_ratio = largest
        return value, metrics


class Backend(Protocol):
    """What the checks run on."""

    rank: int
    world: int

    def forward(self, head: str, batch: TensorDict, cut: Cut) -> dict[str, Tensor]:
        """``log_probs`` and ``entropys`` of the policy (``lm``), or ``values`` of the critic (``value``)."""

    def update(self, head: str, batch: TensorDict, loss: Any, cut: Cut) -> Step:
        """Loss, metrics and gradient of one update; parameters stay as they are."""

    def gather(self, fields: Mapping[str, Tensor], cut: Cut = PLAIN) -> dict[str, Tensor]:
        """The rows of all ranks, in rank order; once where ranks share them."""


class EngineBackend:
    """The FSDP engine, with a learning rate of 0 so that one engine serves every check.

    Args:
        models: directories.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, models: ModelDirs, device: str) -> None:
        self.models = models
        self.device = device
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._engines: dict[tuple[str, bool, int], FSDPEngine] = {}

    def engine(self, head: str, packed: bool, sequence: int = 1) -> FSDPEngine:
        """The engine of a head, built at its first use."""
        key = head, packed, sequence
        if key not in self._engines:
            fsdp = FSDPConfig()
            fsdp.mixed_precision.param_dtype = "float32"
            fsdp.ulysses_sequence_parallel_size = sequence
            path = self.models.policy if head == "lm" else self.models.critic
            engine = FSDPEngine(
                ModelConfig(path=path, use_remove_padding=packed, enable_gradient_checkpointing=False),
                fsdp,
                OptimConfig(optimizer="SGD", lr=0.0, weight_decay=0.0, clip_grad=0.0),
                head=head,
                device=self.device,
            )
            engine.build()
            self._engines[key] = engine
        return self._engines[key]

    def forward(self, head: str, batch: TensorDict, cut: Cut) -> dict[str, Tensor]:
        want = POLICY_OUTPUTS if head == "lm" else frozenset({"values"})
        temperature = TEMPERATURE if head == "lm" else 1.0
        out = self.engine(head, cut.packed, cut.sequence).forward(batch, want, micro=cut.micro, temperature=temperature)
        return {name: value.cpu() for name, value in out.items()}

    def update(self, head: str, batch: TensorDict, loss: Any, cut: Cut) -> Step:
        engine = self.engine(head, cut.packed, cut.sequence)
        assert engine.optimizer is not None
        gradient: dict[str, Tensor] = {}

        def take(*_: Any) -> None:
            shards = {}
            for name, parameter in engine.module.hf_named_tensors():
                if isinstance(parameter, nn.Parameter):
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    shards[name] = local_part(grad.detach()).cpu().clone()
            # one collective for all: they are sharded over their first dimension
            gradient.update(self.gather(shards))

        recorder = Recorder(loss)
        handle = engine.optimizer.register_step_pre_hook(take)  # after the reduction over ranks, before the step
        try:
            metrics = engine.train_batch(
                batch,
                recorder,
                want=loss.want,
                micro=cut.micro,
                temperature=TEMPERATURE if head == "lm" else 1.0,
            )
        finally:
            handle.remove()
        notes = [(recorder.total, recorder.log_ratio)]
        if self.world > 1:
            notes = [(0.0, None)] * self.world
            dist.all_gather_object(notes, (recorder.total, recorder.log_ratio))
        notes = notes[:: cut.sequence]  # ranks that share sequences note the same
        ratios = [ratio for _, ratio in notes if ratio is not None]
        largest = None if not ratios else math.nan if any(map(math.isnan, ratios)) else max(ratios)
        return Step(sum(total for total, _ in notes), metrics.values_by_name(), gradient, largest)

    def gather(self, fields: Mapping[str, Tensor], cut: Cut = PLAIN) -> dict[str, Tensor]:
        if self.world == 1:
            return dict(fields)
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, dict(fields))
        return {name: torch.cat([part[name] for part in parts[:: cut.sequence]]) for name in fields}


class PlainBackend:
    """Transformers' own model in float32, one row at a time, without padding, packing or micro-batches."""

    rank, world = 0, 1

    def __init__(self, models: ModelDirs, device: str) -> None:
        self.device = torch.device(device)
        with quiet_transformers():
            options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
            self._models: dict[str, nn.Module] = {
                "lm": AutoModelForCausalLM.from_pretrained(models.policy, **options),
                "value": AutoModelForTokenClassification.from_pretrained(models.critic, **options),
            }
        for model in self._models.values():
            model.to(self.device).eval()

    def _outputs(self, head: str, batch: TensorDict) -> dict[str, Tensor]:
        mask = batch["response_mask"].to(self.device) != 0
        present = batch["attention_mask"].to(self.device) != 0
        width = mask.shape[1]
        rows: dict[str, list[Tensor]] = {}
        for ids, real in zip(batch["input_ids"].to(self.device), present, strict=True):
            tokens = ids[real][None]
            size = int(real[-width:].sum())
            logits = self._models[head](input_ids=tokens).logits[0, -size - 1 : -1]
            if head == "lm":
                log_p = torch.log_softmax(logits / TEMPERATURE, -1)
                chosen = tokens[0, tokens.shape[1] - size :, None]
                results = {"log_probs": log_p.gather(1, chosen)[:, 0], "entropys": -(log_p.exp() * log_p).sum(-1)}
            else:
                results = {"values": logits[:, 0]}
            for name, value in results.items():
                rows.setdefault(name, []).append(nn.functional.pad(value, (0, width - size)))
        return {name: torch.where(mask, torch.stack(values), 0.0) for name, values in rows.items()}

    def forward(self, head: str, batch: TensorDict, cut: Cut) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.cpu() for name, value in self._outputs(head, batch).items()}

    def update(self, head: str, batch: TensorDict, loss: Any, cut: Cut) -> Step:
        model = self._models[head]
        model.zero_grad(set_to_none=True)
        outputs = self._outputs(head, batch)
        mask = batch["response_mask"] != 0
        info = GlobalBatchInfo(1, int(mask.sum()), int(mask.any(-1).sum()))
        recorder = Recorder(loss)
        value, metrics = recorder(outputs, batch.to(self.device), info)
        value.backward()
        gradient = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu().clone()
            for name, p in model.named_parameters()
        }
        square = sum(float(grad.double().square().sum()) for grad in gradient.values())
        metrics.merge({"grad_norm": mmean(math.sqrt(square), 1.0), "lr": mmean(0.0, 1.0), "skipped_steps": msum(0.0)})
        return Step(recorder.total, metrics.values_by_name(), gradient, recorder.log_ratio)

    def gather(self, fields: Mapping[str, Tensor], cut: Cut = PLAIN) -> dict[str, Tensor]:
        return dict(fields)
