"""The roots of generation from a data set, and of the evaluation of what was generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from verl.config.actor import ActorRolloutRefConfig
from verl.config.base import Config, find_problems, opt, seal, section
from verl.config.data import DataConfig, image_key_opt, image_pixels_opt
from verl.config.files import missing_file, missing_model, raise_problems
from verl.config.model import ModelConfig
from verl.config.ppo import PPOConfig, RayKwargsConfig
from verl.config.reward import ScoringConfig
from verl.config.rollout import EngineKwargsConfig, RolloutConfig
from verl.config.trainer import TrainerConfig

OUTPUTS = (".parquet", ".jsonl")


@dataclass
class GenerationDataConfig(Config):
    """Prompts, and where the responses go."""

    path: list[str] = opt([], "Files with prompts, Parquet or JSONL: one path or a list.")
    prompt_key: str = opt("prompt", "Column with the chat messages, or text.")
    image_key: str = image_key_opt()
    image_min_pixels: int | None = image_pixels_opt("Smaller images are enlarged")
    image_max_pixels: int | None = image_pixels_opt("Larger images are reduced")
    n_samples: int = opt(1, "Responses per prompt.", ge=1)
    output_path: str | None = opt(None, "File for the rows with their responses, .parquet or .jsonl.")
    response_key: str = opt("responses", "Column for the list of a prompt's responses.")
    batch_size: int = opt(128, "Prompts that are generated, and then written down, together.", ge=1)
    max_samples: int = opt(-1, "Use only this many prompts; -1 = all.", ge=-1)
    max_prompt_length: int = opt(1024, "Longest prompt, in tokens.", ge=1)
    max_response_length: int = opt(512, "Longest response, in tokens.", ge=1)
    truncation: str = opt(
        "error",
        "What a prompt longer than max_prompt_length means: an error, or where to cut.",
        choices=("error", "left", "right"),
    )
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "Keyword arguments of the tokenizer's chat template.")

    def problems(self) -> Iterator[str]:
        if not self.path:
            yield "path=[]: give the prompts, data.path=test.parquet or a list of files"
        if not self.output_path:
            yield "output_path=None: give the file for the responses, for example data.output_path=responses.parquet"
        elif Path(self.output_path).suffix not in OUTPUTS:
            yield f"output_path={self.output_path!r}: must end in {' or '.join(OUTPUTS)}"


@dataclass
class SamplingConfig(Config):
    """How responses are generated, and by which engine."""

    name: str = opt("hf", "Rollout engine, as for training: hf or vllm.")
    temperature: float = opt(1.0, "Sampling temperature; 0 = the most probable token.", ge=0)
    top_p: float = opt(1.0, "Probability mass to sample from.", gt=0, le=1)
    top_k: int = opt(-1, "Number of most probable tokens to sample from; -1 = all.", ge=-1)
    repetition_penalty: float = opt(1.0, "More than 1 = fewer repetitions.", gt=0)
    ignore_eos: bool = opt(False, "Go on after an end-of-sequence token until data.max_response_length.")
    dtype: str = opt("auto", "Type of the weights in generation.", choices=("auto", "float32", "bfloat16", "float16"))
    max_num_seqs: int = opt(1024, "Largest number of sequences generated at once per rank.", ge=1)
    max_num_batched_tokens: int = opt(8192, "Largest number of tokens in one forward pass.", ge=1)
    gpu_memory_utilization: float = opt(0.8, "Share of the memory for weights and cache.", gt=0, le=1)
    tensor_model_parallel_size: int = opt(1, "Ranks that generate together with one split copy (vllm).", ge=1)
    engine_kwargs: EngineKwargsConfig = section(
        EngineKwargsConfig, "Settings of the rollout engine under its own names."
    )


@dataclass
class ProgramConfig(Config):
    """Processes and devices of a program that does not train."""

    nnodes: int = opt(1, "Nodes.", ge=1)
    n_gpus_per_node: int = opt(1, "GPUs per node; on CPU the number of worker processes.", ge=1)
    device: str = opt("auto", "Device; auto = CUDA where there is a GPU, else CPU.", choices=("auto", "cpu", "cuda"))
    controller: str = opt(
        "ray", "ray = workers are processes on Ray; local = one worker in this process.", choices=("ray", "local")
    )
    seed: int = opt(1, "Seed; every sample's own seed derives from it.", ge=0)


@dataclass
class GenerationConfig(Config):
    """Everything that ``python -m verl.trainer.main_generation`` reads."""

    EXAMPLE: ClassVar[str] = (
        "verl generate data.path=test.parquet data.output_path=answers.parquet data.n_samples=8 model.path=merged"
    )

    data: GenerationDataConfig = section(GenerationDataConfig, "Prompts, and where the responses go.")
    model: ModelConfig = section(ModelConfig, "The model.")
    rollout: SamplingConfig = section(SamplingConfig, "How responses are generated, and by which engine.")
    trainer: ProgramConfig = section(ProgramConfig, "Processes and devices.")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "How Ray is started.")

    def problems(self) -> Iterator[str]:
        if not self.model.path:
            yield "model.path=None: give the model, a directory or a Hugging Face id"
        if self.rollout.temperature == 0 and self.data.n_samples > 1:
            yield f"data.n_samples={self.data.n_samples}: with rollout.temperature=0 all responses would be equal"
        if not self.model.path or not self.data.path:
            return
        for problem in find_problems(self.as_run()):
            yield problem.removeprefix("actor_rollout_ref.")

    def as_run(self) -> PPOConfig:
        """The configuration of a run that generates and does nothing else."""
        data, sampling = self.data, self.rollout
        given = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "temperature"}
        greedy = sampling.temperature == 0
        rollout = RolloutConfig(
            **given,
            temperature=1.0 if greedy else sampling.temperature,
            do_sample=not greedy,
            prompt_length=data.max_prompt_length,
            response_length=data.max_response_length,
        )
        trainer = {f.name: getattr(self.trainer, f.name) for f in fields(self.trainer)}
        config = PPOConfig(
            data=DataConfig(
                val_files=data.path,
                max_prompt_length=data.max_prompt_length,
                max_response_length=data.max_response_length,
                gen_batch_size=None,
                return_raw_chat=True,
            ),
            actor_rollout_ref=ActorRolloutRefConfig(model=self.model, rollout=rollout),
            trainer=TrainerConfig(val_only=True, **trainer),
            ray_kwargs=self.ray_kwargs,
        )
        # sizes of updates, of which there are none
        config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = config.trainer.world_size
        config.algorithm.adv_estimator = "reinforce_plus_plus"
        return config

    def sealed_run(self) -> PPOConfig:
        """:meth:`as_run`, read-only."""
        return seal(self.as_run())

    def check_files(self) -> None:
        """Check that the files which the program reads exist.

        Raises:
            ConfigError: naming every file that is missing.
        """
        bad = [missing_file(f"data.path={f}", f) for f in self.data.path]
        bad.append(missing_model("model.path", self.model.path))
        bad.append(missing_model("model.tokenizer_path", self.model.tokenizer_path, needs_config=False))
        raise_problems("files that the configuration names are missing", bad)


@dataclass
class EvalDataConfig(Config):
    """Generated responses."""

    path: list[str] = opt([], "Files with responses, as generation writes them: one path or a list.")
    response_key: str = opt("responses", "Column with a response, or the list of a prompt's responses.")
    data_source_key: str = opt("data_source", "Column that selects the scorer.")
    reward_model_key: str = opt("reward_model", "Column with the reference, a mapping with ground_truth.")
    output_path: str | None = opt(None, "JSON file for the result.")
    scores_path: str | None = opt(None, "JSONL file for the score of every response.")

    def problems(self) -> Iterator[str]:
        if not self.path:
            yield "path=[]: give the generated responses, data.path=responses.parquet or a list of files"


@dataclass
class MetricsConfig(Config):
    """What is computed from the scores."""

    k: list[int] = opt([], "pass@k for these k; empty = 1, 2, 4, ... up to the number of responses.")
    threshold: float = opt(1.0, "A response passes with this score (or acc, where the function reports it) or more.")
    confidence: float = opt(0.95, "Probability that a confidence interval covers the true value.", gt=0, le=0.999)
    resamples: int = opt(2000, "Bootstrap resamples of the prompts, for the confidence intervals.", ge=100)
    seed: int = opt(1, "Seed of the resamples.", ge=0)

    def problems(self) -> Iterator[str]:
        if any(k < 1 for k in self.k):
            yield f"k={self.k}: every k must be at least 1"


@dataclass
class EvalConfig(Config):
    """Everything that ``python -m verl.trainer.main_eval`` reads."""

    EXAMPLE: ClassVar[str] = (
        "verl eval data.path=answers.parquet custom_reward_function.path=reward.py data.output_path=result.json"
    )

    data: EvalDataConfig = section(EvalDataConfig, "Generated responses.")
    reward: ScoringConfig = section(ScoringConfig, "How a function scores responses.")
    metrics: MetricsConfig = section(MetricsConfig, "What is computed from the scores.")

    def check_files(self) -> None:
        """Check that the files which the program reads exist.

        Raises:
            ConfigError: naming every file that is missing.
        """
        bad = [missing_file(f"data.path={f}", f) for f in self.data.path]
        custom = self.reward.custom_reward_function.path
        bad.append(missing_file(f"reward.custom_reward_function.path={custom}", custom))
        raise_problems("files that the configuration names are missing", bad)
