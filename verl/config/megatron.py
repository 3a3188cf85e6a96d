"""The Megatron-core training engine (``strategy=megatron``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.base import Config, opt
from verl.config.fsdp import DTYPE_SPELLINGS
from verl.config.model import ModelConfig

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass
class MegatronConfig(Config):
    """Parallelism, off-loading and numeric types of one model on Megatron-core."""

    tensor_model_parallel_size: int = opt(1, "Ranks that share every layer's weights.", ge=1, affects="speed")
    pipeline_model_parallel_size: int = opt(1, "Stages that the layers are divided over.", ge=1, affects="speed")
    virtual_pipeline_model_parallel_size: int | None = opt(
        None, "Pieces of the model per stage (interleaved schedule); not given = one piece.", ge=2, affects="speed"
    )
    context_parallel_size: int = opt(1, "Ranks that share one sequence.", ge=1, affects="speed")
    expert_model_parallel_size: int = opt(
        1, "Ranks that the experts of a layer are divided over.", ge=1, affects="speed"
    )
    expert_tensor_parallel_size: int | None = opt(
        None, "Ranks that share one expert's weights; not given = tensor_model_parallel_size.", ge=1, affects="speed"
    )
    sequence_parallel: bool = opt(
        True,
        "With tensor parallelism, divide activations between the layers' products over its ranks too.",
        affects="speed",
    )
    use_distributed_optimizer: bool = opt(
        True, "Divide the optimizer state over the data-parallel ranks.", affects="speed"
    )
    param_offload: bool = opt(
        False, "Keep the parameters in host memory while the model is not in use.", affects="speed"
    )
    grad_offload: bool = opt(False, "Free the gradient buffers while the model is not in use.", affects="speed")
    optimizer_offload: bool = opt(
        False, "Keep the optimizer state in host memory outside optimizer steps.", affects="speed"
    )
    dtype: str = opt(
        "auto",
        "Type of the parameters in the forward and backward pass, beside float32 ones in the optimizer; auto = "
        "bfloat16 on CUDA, float32 on CPU.",
        choices=("auto", "float32", "bfloat16"),
        spellings=DTYPE_SPELLINGS,
    )
    seed: int | None = opt(None, "Seed of dropout; not given = the seed of the run.")
    use_dist_checkpointing: bool = opt(
        False, "Read the initial weights from a checkpoint of this engine in dist_checkpointing_path."
    )
    dist_checkpointing_path: str | None = opt(
        None,
        "Checkpoint of this engine with the initial weights; model.path still gives config and tokenizer.",
        affects="model",
    )
    override_transformer_config: dict[str, Any] = opt(
        {},
        "Fields of Megatron-core's TransformerConfig, for example recompute_granularity or "
        "num_layers_in_first_pipeline_stage.",
    )

    def problems(self) -> Iterator[str]:
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            yield (
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size}: interleaving needs "
                "several stages; leave it out, or raise pipeline_model_parallel_size"
            )
        if self.use_dist_checkpointing != (self.dist_checkpointing_path is not None):
            yield (
                f"use_dist_checkpointing={self.use_dist_checkpointing}: goes together with dist_checkpointing_path, "
                f"which is {self.dist_checkpointing_path!r}; give both or neither"
            )

    def model_problems(self, where: str, model: ModelConfig) -> Iterator[str]:
        """Yield why a model cannot run on this engine.

        Args:
            where: dotted path of its section.
            model: the section.
        """
        if not model.use_remove_padding:
            yield f"{where}.use_remove_padding=False: the Megatron engine always removes padding; leave it out"
        if model.enable_activation_offload:
            yield (
                f"{where}.enable_activation_offload=True: is for the FSDP2 engine; with strategy=megatron leave it "
                "out, and recompute activations (enable_gradient_checkpointing) or set fields of Megatron-core's own "
                "off-loading in megatron.override_transformer_config"
            )

    def world_problems(self, where: str, world: int) -> Iterator[str]:
        """Yield why the parallel sizes do not fit a number of ranks.

        Args:
            where: dotted path of this section.
            world: number of ranks.
        """
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        experts = self.expert_model_parallel_size
        inside = tensor if self.expert_tensor_parallel_size is None else self.expert_tensor_parallel_size
        total = f"trainer.nnodes * trainer.n_gpus_per_node = {world} ranks"
        if world % self.model_parallel_size:
            yield (
                f"{where}.tensor_model_parallel_size={tensor}: with pipeline_model_parallel_size={pipeline} and "
                f"context_parallel_size={self.context_parallel_size} one copy of the model takes "
                f"{self.model_parallel_size} ranks, which do not divide the {total}"
            )
        elif world % (experts * inside * pipeline):
            yield (
                f"{where}.expert_model_parallel_size={experts}: with expert_tensor_parallel_size={inside} and "
                f"pipeline_model_parallel_size={pipeline} the experts take {experts * inside * pipeline} ranks, which "
                f"do not divide the {total}"
            )

    def row_share(self, rank: int, world: int) -> tuple[int, int]:
        """Which share of the rows a rank gets, and how many shares there are.

        Neighbouring ranks share weights and tokens; data-parallel ranks come next, and stages last.
        """
        inner = self.tensor_model_parallel_size * self.context_parallel_size
        shares = world // self.model_parallel_size
        return rank // inner % shares, shares

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and work on the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
