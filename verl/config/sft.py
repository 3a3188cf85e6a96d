"""Supervised fine-tuning, and what it shares with other training on a fixed data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor import strategy_problems
from verl.config.base import Config, MicroBatch, opt, section
from verl.config.batching import batch_problems, sequence_problems, sizes_per_gpu, token_problems
from verl.config.checkpoint import CheckpointConfig
from verl.config.data import CustomClsConfig, image_key_opt, image_pixels_opt
from verl.config.files import missing_file, missing_model, raise_problems
from verl.config.fsdp import FSDPConfig
from verl.config.megatron import MegatronConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig
from verl.config.trainer import RunConfig


@dataclass
class MultiturnConfig(Config):
    """Rows that hold whole conversations."""

    enable: bool = opt(False, "Rows hold conversations; the loss is on all assistant turns.")
    messages_key: str = opt("messages", "Column with the chat messages.")
    tools_key: str = opt("tools", "Column with the tool schemas, if there is one.")


@dataclass
class ExamplesConfig(Config):
    """Examples for training and validation: what every trainer on a fixed data set reads."""

    train_files: list[str] = opt([], "Training files, Parquet or JSONL: one path or a list.", affects="rows")
    val_files: list[str] = opt(
        [], "Validation files, Parquet or JSONL: one path or a list; empty = no validation.", affects="report"
    )
    train_batch_size: int = opt(256, "Examples per optimizer step, over all ranks.", ge=1)
    micro_batch_size_per_gpu: int | None = opt(
        None, "Examples per rank in one pass; not given = the rank's whole batch.", ge=1, affects="speed"
    )
    micro_batch_size: int | None = opt(
        None, "Old form of micro_batch_size_per_gpu: examples over all ranks.", ge=1, affects="speed"
    )
    use_dynamic_bsz: bool = opt(
        False,
        "Fill micro-batches up to max_token_len_per_gpu tokens; micro-batch sizes then play no part.",
        affects="speed",
    )
    max_token_len_per_gpu: int = opt(8192, "Tokens per rank in one pass with use_dynamic_bsz.", ge=1, affects="speed")
    max_length: int = opt(1024, "Longest example, in tokens.", ge=1)
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "Keyword arguments of the tokenizer's chat template.")
    image_key: str = image_key_opt()
    image_min_pixels: int | None = image_pixels_opt("Smaller images are enlarged")
    image_max_pixels: int | None = image_pixels_opt("Larger images are reduced")
    custom_cls: CustomClsConfig = section(CustomClsConfig, "A dataset class of the user.")
    shuffle: bool = opt(True, "Shuffle the examples in every epoch.")
    seed: int | None = opt(None, "Seed of the shuffling; not given = derived from trainer.seed.")
    train_max_samples: int = opt(-1, "Use only this many training examples; -1 = all.", ge=-1)
    val_max_samples: int = opt(-1, "Use only this many validation examples; -1 = all.", ge=-1, affects="report")
    dataloader_num_workers: int = opt(0, "Processes that read examples; 0 = in the trainer.", ge=0, affects="speed")

    def micro_batch(self) -> MicroBatch:
        """Return how a rank's batch is split."""
        if self.use_dynamic_bsz:
            return MicroBatch(None, self.max_token_len_per_gpu)
        return MicroBatch(self.micro_batch_size_per_gpu, None)


@dataclass
class SFTDataConfig(ExamplesConfig):
    """Examples for training and validation."""

    truncation: str = opt(
        "error",
        "What an example longer than max_length means: an error, or where to cut.",
        choices=("error", "left", "right"),
    )
    pad_mode: str = opt(
        "no_padding",
        "How a micro-batch is laid out: packed without padding, or padded on the right to max_length.",
        choices=("no_padding", "right"),
        affects="speed",
    )
    prompt_key: str = opt("prompt", "Column with the prompt, text or chat messages.")
    response_key: str = opt("response", "Column with the response text.")
    prompt_dict_keys: list[str] = opt([], "Keys to follow inside prompt_key's value, for example [question].")
    response_dict_keys: list[str] = opt([], "Keys to follow inside response_key's value, for example [answer].")
    multiturn: MultiturnConfig = section(MultiturnConfig, "Rows that hold whole conversations.")


@dataclass
class SFTModelConfig(ModelConfig):
    """The model to tune and its engine."""

    strategy: str = opt("fsdp", "Training engine: megatron, or fsdp and fsdp2, which both mean the FSDP2 engine.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "Sharding, offload and numeric types (strategy=fsdp).")
    megatron: MegatronConfig = section(MegatronConfig, "The same with strategy=megatron.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from strategy_problems(self.strategy)

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share the tokens of a sequence."""
        if self.strategy == "megatron":
            return self.megatron.context_parallel_size
        return self.fsdp_config.ulysses_sequence_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.megatron.model_parallel_size if self.strategy == "megatron" else self.ranks_per_sequence

    def row_share(self, rank: int, world: int) -> tuple[int, int]:
        """Which share of the rows a rank gets, and how many shares there are."""
        if self.strategy == "megatron":
            return self.megatron.row_share(rank, world)
        return rank // self.ranks_per_sequence, world // self.ranks_per_sequence


@dataclass
class SFTTrainerConfig(RunConfig):
    """The fine-tuning run."""

    # torchrun says how many processes there are, so a script need not repeat it.
    nnodes: int = opt(
        1, "Nodes; under torchrun what it says.", ge=1, inherits="oc.env:GROUP_WORLD_SIZE,1", affects="speed"
    )
    n_gpus_per_node: int = opt(
        1,
        "Processes per node; under torchrun what it says.",
        ge=1,
        inherits="oc.env:LOCAL_WORLD_SIZE,1",
        affects="speed",
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig,
        "Contents of the checkpoint.",
        save_contents=["model", "optimizer", "extra", "hf_model"],
        affects="place",
    )
    nccl_timeout: int = opt(600, "Time limit of a collective operation, in seconds.", ge=1, affects="limit")


@dataclass
class FineTuningConfig(Config):
    """A run on a fixed data set; its kinds differ in the rows that they read and in the loss."""

    data: ExamplesConfig = section(ExamplesConfig, "Examples for training and validation.")
    model: SFTModelConfig = section(SFTModelConfig, "The model to tune and its engine.")
    optim: OptimConfig = section(
        OptimConfig, "Optimizer.", lr=1e-5, betas=[0.9, 0.95], lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1
    )
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "The fine-tuning run.", total_epochs=4)

    def idle_sections(self) -> Iterator[str]:
        """Dotted paths of the sections that this run does not read."""
        yield "model.fsdp_config" if self.model.strategy == "megatron" else "model.megatron"

    def derive(self) -> Iterator[str]:
        """Turn the micro-batch size over all ranks into one per rank; yield a sentence if it does not divide."""
        shared = self.model.ranks_per_row
        return sizes_per_gpu(self, (("data.micro_batch_size", None),), self.trainer.world_size, lambda section: shared)

    def problems(self) -> Iterator[str]:
        data, world = self.data, self.trainer.world_size
        if not data.train_files:
            yield "data.train_files=[]: give the training data, data.train_files=train.parquet or a list of files"
        if not data.val_files and self.trainer.test_freq > 0:
            yield (
                f"data.val_files=[]: trainer.test_freq={self.trainer.test_freq} needs validation data, "
                "data.val_files=test.parquet or a list of files"
            )
        if not self.model.path:
            yield "model.path=None: give the model to tune, a directory or a Hugging Face id"
        yield from batch_problems(
            "data.train_batch_size",
            data.train_batch_size,
            "data.micro_batch_size_per_gpu",
            data.micro_batch().size,
            total_key="data.train_batch_size",
            total=data.train_batch_size,
            samples=1,
            world=max(1, world // self.model.ranks_per_row),
        )
        tokens = data.micro_batch().max_tokens
        budget = None if tokens is None else tokens * self.model.ranks_per_sequence
        yield from token_problems([("data.max_token_len_per_gpu", budget)], data.max_length, "data.max_length")
        yield from self.optim.engine_problems("optim", self.model.strategy)
        yield from self.trainer.checkpoint.engine_problems("trainer.checkpoint", self.model.strategy)
        if self.model.strategy == "megatron":
            yield from self.model.megatron.world_problems("model.megatron", world)
            yield from self.model.megatron.model_problems("model", self.model)
        else:
            yield from self._fsdp_problems(world)

    def _fsdp_problems(self, world: int) -> Iterator[str]:
        fsdp = self.model.fsdp_config
        sequence, packed = fsdp.ulysses_sequence_parallel_size, self.model.use_remove_padding
        yield from sequence_problems("model.fsdp_config", sequence, world, "model", packed)
        size = fsdp.fsdp_size
        if 0 < size < world and world % size:
            yield f"model.fsdp_config.fsdp_size={size}: must divide trainer.nnodes * trainer.n_gpus_per_node = {world}"

    def check_files(self) -> None:
        """Check that the files which the run reads exist.

        Raises:
            ConfigError: naming every file that is missing.
        """
        data = self.data
        bad = [missing_file(f"data.train_files={f}", f) for f in data.train_files]
        bad += [missing_file(f"data.val_files={f}", f) for f in data.val_files]
        bad.append(missing_model("model.path", self.model.path))
        bad.append(missing_model("model.tokenizer_path", self.model.tokenizer_path, needs_config=False))
        bad.append(missing_file(f"data.custom_cls.path={data.custom_cls.path}", data.custom_cls.path))
        resume = self.trainer.resume_from_path
        bad.append(missing_file(f"trainer.resume_from_path={resume}", resume, directory=True))
        raise_problems("files that the configuration names are missing", bad)


@dataclass
class SFTConfig(FineTuningConfig):
    """Everything that supervised fine-tuning reads."""

    EXAMPLE: ClassVar[str] = (
        "verl sft data.train_files=demonstrations.parquet data.train_batch_size=64 model.path=model"
    )

    data: SFTDataConfig = section(SFTDataConfig, "Examples for training and validation.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.data.pad_mode != "right":
            return
        sequence = self.model.fsdp_config.ulysses_sequence_parallel_size
        if self.model.strategy == "megatron":
            yield "data.pad_mode='right': the Megatron engine always removes padding; use pad_mode=no_padding"
        elif sequence > 1:
            yield (
                f"model.fsdp_config.ulysses_sequence_parallel_size={sequence}: shares the tokens of packed rows, so "
                "data.pad_mode='right' does not go with it; use pad_mode=no_padding"
            )
