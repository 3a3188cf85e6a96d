"""The root of a configuration for training on pairs of answers: DPO, and reward models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from verl.config.base import Config, opt, section
from verl.config.optim import OptimConfig
from verl.config.sft import ExamplesConfig, FineTuningConfig, SFTTrainerConfig

OBJECTIVES = ("dpo", "reward_model")
DPO_LOSSES = ("sigmoid", "ipo", "hinge")


@dataclass
class PreferenceDataConfig(ExamplesConfig):
    """Pairs of answers for training and validation. Sizes count pairs; max_length is of a prompt with one answer."""

    truncation: str = opt(
        "error",
        "What an example longer than max_length means: an error, or to cut the beginning of its prompt.",
        choices=("error", "left"),
    )
    prompt_key: str = opt(
        "prompt", "Column with the prompt, text or chat messages; absent where answers are whole conversations."
    )
    chosen_key: str = opt("chosen", "Column with the better answer: text, or chat messages that end with it.")
    rejected_key: str = opt("rejected", "Column with the worse answer, in the same form.")
    margin_key: str | None = opt(
        None, "Column with the least difference that the scores of a pair should have (objective=reward_model)."
    )


@dataclass
class PreferenceLossConfig(Config):
    """The loss over a pair."""

    beta: float = opt(0.1, "Strength of the pull to the reference model (dpo).", gt=0)
    loss_type: str = opt("sigmoid", "Form of the loss over a pair's margin (dpo).", choices=DPO_LOSSES)
    label_smoothing: float = opt(
        0.0, "Share of pairs that may be labelled the wrong way round (dpo with loss_type=sigmoid).", ge=0, le=0.5
    )
    center_coef: float = opt(
        0.0,
        "Weight of a penalty on the squared sum of a pair's scores, which keeps them around 0 (reward_model).",
        ge=0,
    )

    def problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss_type != "sigmoid":
            yield f"label_smoothing={self.label_smoothing}: needs loss_type=sigmoid, which is {self.loss_type!r}"


@dataclass
class PreferenceConfig(FineTuningConfig):
    """Everything that training on pairs of answers reads."""

    EXAMPLE: ClassVar[str] = (
        "verl preference objective=dpo data.train_files=pairs.parquet data.train_batch_size=64 model.path=model"
    )

    objective: str = opt(
        "dpo", "dpo trains a policy against a reference; reward_model trains scores.", choices=OBJECTIVES
    )
    data: PreferenceDataConfig = section(PreferenceDataConfig, "Pairs of answers for training and validation.")
    optim: OptimConfig = section(
        OptimConfig, "Optimizer.", lr=1e-6, betas=[0.9, 0.95], lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1
    )
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "The training run.", total_epochs=1)
    loss: PreferenceLossConfig = section(PreferenceLossConfig, "The loss over a pair.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.objective == "dpo" and self.data.margin_key is not None:
            yield f"data.margin_key={self.data.margin_key!r}: is for objective=reward_model; leave it out"
        unused = {"dpo": ("center_coef",), "reward_model": ("beta", "loss_type", "label_smoothing")}
        defaults = PreferenceLossConfig()
        for name in unused.get(self.objective, ()):
            if getattr(self.loss, name) != getattr(defaults, name):
                yield f"loss.{name}={getattr(self.loss, name)!r}: has no meaning with objective={self.objective}"
