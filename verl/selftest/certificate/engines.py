"""The engines under test, made as a worker makes them, in this process and without Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl.config import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, RolloutConfig
from verl.errors import ConfigError
from verl.models.sliced import local_part
from verl.selftest.certificate.plain import probe_loss
from verl.selftest.certificate.subject import Subject
from verl.utils.device import resolve_device
from verl.utils.metrics import MetricSet, msum
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching, TrainEngine
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.engine import RolloutEngine, run_blocking
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams
from verl.workers.sharding_manager import make_sharding_manager

POLICY = frozenset({"log_probs", "entropys"})
#: of the update that the weight sync is checked with
LEARNING_RATE = 0.02
LORA_RANK, LORA_ALPHA = 4, 24.0
MAX_TOKENS = 12

TrainName = Literal["fsdp", "megatron"]


@dataclass(frozen=True)
class Setup:
    """Which engines are certified.

    Attributes:
        engine: ``"fsdp"`` or ``"megatron"``.
        rollout: ``"hf"``, ``"vllm"`` or ``"sglang"``.
        lora: train low-rank adapters.
        device: ``"cpu"`` or ``"cuda"``.
        ranks: processes that share sequences; below 2: none.
    """

    engine: str = "fsdp"
    rollout: str = "hf"
    lora: bool = False
    device: str = "cpu"
    ranks: int = 2

    def __post_init__(self) -> None:
        if self.engine not in TRAINERS:
            raise ConfigError(f"--engine={self.engine}: choose {' or '.join(TRAINERS)}")
        resolve_device(self.device)


def model_section(subject: Subject, setup: Setup) -> ModelConfig:
    """The ``model`` section of a run with this model."""
    adapters: dict[str, Any] = {"lora_rank": LORA_RANK, "lora_alpha": LORA_ALPHA} if setup.lora else {}
    return ModelConfig(
        path=subject.path,
        trust_remote_code=subject.trust_remote_code,
        enable_gradient_checkpointing=False,
        **adapters,
    )


@dataclass
class ProbeLoss:
    """:func:`probe_loss` for one micro-batch; keeps the outputs by row number."""

    seen: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    total: float = 0.0

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: TensorDict, info: GlobalBatchInfo
    ) -> tuple[Tensor, MetricSet]:
        """The loss of a micro-batch."""
        for place, row in enumerate(rows["row"].tolist()):
            self.seen[row] = {name: outputs[name][place].detach().cpu() for name in POLICY}
        value = probe_loss(outputs, rows, info.batch_num_tokens)
        self.total += float(value.detach())
        return value * info.dp_size, MetricSet({"loss": msum(float(value.detach()))})

    def outputs(self) -> dict[str, Tensor]:
        """What the training pass computed, rows in order."""
        return {name: torch.stack([self.seen[row][name] for row in sorted(self.seen)]) for name in POLICY}


@dataclass(frozen=True)
class Pass:
    """One training pass.

    Attributes:
        loss: of the whole batch.
        outputs: ``log_probs`` and ``entropys`` as the loss saw them.
        gradients: whole gradients by Hugging Face name, on the host.
    """

    loss: float
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


class FixedRate:
    """A learning-rate schedule that is set from outside; 0 leaves the weights as they are."""

    def __init__(self) -> None:
        self.value = 0.0

    def lr(self, step: int) -> float:
        """The rate."""
        return self.value


class Trainer(ABC):
    """A training engine whose updates change nothing until :meth:`update` asks for it."""

    engine: Any
    #: rows can be computed without padding
    packs: bool
    can_pad: ClassVar[bool]

    def _settle(self, engine: TrainEngine) -> None:
        self.engine = engine
        engine.build()
        self.rate = FixedRate()
        self.engine.schedule = self.rate

    @contextmanager
    def packed(self, wanted: bool) -> Iterator[None]:
        """Within the context rows are packed, or padded."""
        if wanted == self.packs:
            yield
            return
        before, self.engine.packed = self.engine.packed, wanted
        try:
            yield
        finally:
            self.engine.packed = before

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Within the context rows with equal prompts each have their own."""
        before, self.engine.share_prompts = self.engine.share_prompts, False
        try:
            yield
        finally:
            self.engine.share_prompts = before

    def forward(self, batch: TensorDict, micro: MicroBatching, temperature: float) -> dict[str, Tensor]:
        """``log_probs`` and ``entropys`` without gradients, on the host."""
        found = self.engine.forward(batch, POLICY, micro=micro, temperature=temperature)
        return {name: value.cpu() for name, value in found.items()}

    def training_pass(self, batch: TensorDict, micro: MicroBatching, temperature: float) -> Pass:
        """One training pass; the weights stay."""
        loss = ProbeLoss()
        gradients: dict[str, Tensor] = {}
        with self._gradients(gradients):
            self.engine.train_batch(batch, loss, want=POLICY, micro=micro, temperature=temperature)
        return Pass(loss.total, loss.outputs(), gradients)

    def update(self, batch: TensorDict, temperature: float, rate: float = LEARNING_RATE) -> None:
        """One update that changes the weights."""
        self.rate.value = rate
        try:
            self.engine.train_batch(batch, ProbeLoss(), want=POLICY, micro=MicroBatching(), temperature=temperature)
        finally:
            self.rate.value = 0.0

    @contextmanager
    @abstractmethod
    def _gradients(self, found: dict[str, Tensor]) -> Iterator[None]:
        """Fill ``found`` with the gradients of the training pass inside."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint as a run does."""
        self.engine.save(directory, frozenset({"model", "optimizer", "extra", "hf_model"}))


class FSDPTrainer(Trainer):
    """The FSDP2 engine."""

    can_pad = True

    def __init__(self, subject: Subject, setup: Setup, *, sequence: int = 1) -> None:
        from verl.workers.engine.fsdp.engine import FSDPEngine

        config = FSDPConfig()
        config.mixed_precision.param_dtype = "float32"
        config.ulysses_sequence_parallel_size = sequence
        optim = OptimConfig(lr=LEARNING_RATE, weight_decay=0.0, clip_grad=0.0)
        self._settle(FSDPEngine(model_section(subject, setup), config, optim, device=setup.device))
        self.packs = bool(self.engine.packed)

    @contextmanager
    def _gradients(self, found: dict[str, Tensor]) -> Iterator[None]:
        def take(*_: Any) -> None:
            for name, parameter in self.engine.module.hf_named_tensors():
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    found[name] = local_part(grad.detach()).cpu().clone()

        handle = self.engine.optimizer.register_step_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()


class MegatronTrainer(Trainer):
    """The Megatron-core engine on one rank."""

    can_pad = False

    def __init__(self, subject: Subject, setup: Setup) -> None:
        from verl.workers.engine.megatron.engine import MegatronEngine

        optim = OptimConfig(lr=LEARNING_RATE, weight_decay=0.0, clip_grad=0.0)
        config = MegatronConfig(sequence_parallel=False, dtype="float32")
        self._settle(MegatronEngine(model_section(subject, setup), config, optim, device=setup.device))
        self.packs = True

    @contextmanager
    def _gradients(self, found: dict[str, Tensor]) -> Iterator[None]:
        yield
        bridge = self.engine.bridge
        local = bridge.local
        bridge.local = {name: getattr(p, "main_grad", torch.zeros_like(p)) for name, p in local.items()}
        try:
            adapters = self.engine.lora is not None
            named = bridge.export_adapters() if adapters else self.engine.named_tensors()
            found.update({name: tensor.cpu().clone() for name, tensor in named})
        finally:
            bridge.local = local


TRAINERS: dict[str, type[Trainer]] = {"fsdp": FSDPTrainer, "megatron": MegatronTrainer}


def make_trainer(subject: Subject, setup: Setup) -> Trainer:
    """The training engine.

    Raises:
        ConfigError: it does not train this model.
    """
    kind: Any = TRAINERS[setup.engine]
    trainer: Trainer = kind(subject, setup)
    return trainer


class Generator:
    """A rollout engine that gets its weights from a trainer.

    Args:
        subject: the model.
        setup: which engine.
        reach: tokens of the longest prompt.
        merged: with adapters: they come added to the weights.
    """

    def __init__(self, subject: Subject, setup: Setup, reach: int, *, merged: bool | None = None) -> None:
        config = RolloutConfig(
            name=setup.rollout,
            dtype="float32",
            prompt_length=reach,
            response_length=4 * MAX_TOKENS,
            max_num_seqs=64,
            lora_merge=merged,
        )
        self.name = setup.rollout
        self.strategy = setup.engine
        self.engine: RolloutEngine = get_rollout_class(setup.rollout)(
            model_section(subject, setup), config, device=setup.device, tokenizer=subject.tokenizer
        )
        self.version = 0
        self._syncs: dict[int, Any] = {}

    def sync(self, trainer: Trainer) -> None:
        """Take the trainer's weights."""
        if id(trainer) not in self._syncs:
            self._syncs[id(trainer)] = make_sharding_manager(self.strategy, self.name, trainer.engine, self.engine)
        self.version += 1
        self._syncs[id(trainer)].sync(self.version)

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        seed: int = 0,
        stops: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """One completion a prompt; each has a seed of its own, and with ``stops`` a stop token of its own."""
        requests = [
            GenerationRequest(
                prompt,
                SamplingParams(
                    MAX_TOKENS,
                    seed=seed * 1000 + number,
                    stop_token_ids=() if stops is None else (stops[number],),
                    **sampling,
                ),
                f"certificate-{number}",
            )
            for number, prompt in enumerate(prompts)
        ]
        return run_blocking(self.engine.generate_many(requests))


def adapters_of(trainer: Trainer) -> dict[str, Tensor]:
    """Whole adapter matrices by name."""
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.engine.named_tensors("adapters")}
