"""Generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, MicroBatch, opt, section
from verl.config.fsdp import DTYPE_SPELLINGS, DTYPES

ACTOR = "actor_rollout_ref.actor"


@dataclass
class ValKwargsConfig(Config):
    """Sampling during validation."""

    n: int = opt(1, "Samples per validation prompt.", ge=1)
    do_sample: bool = opt(False, "Sample instead of taking the most probable token.")
    temperature: float = opt(0.0, "Sampling temperature; 0 = the most probable token.", ge=0)
    top_p: float = opt(1.0, "Probability mass to sample from.", gt=0, le=1)
    top_k: int = opt(-1, "Number of most probable tokens to sample from; -1 = all.", ge=-1)

    def problems(self) -> Iterator[str]:
        if self.do_sample and self.temperature == 0:
            yield "do_sample=True: with temperature=0 nothing is sampled; give a temperature > 0"
        if self.n > 1 and (not self.do_sample or self.temperature == 0):
            yield f"n={self.n}: greedy samples of one prompt are all the same; set do_sample=True and a temperature"


@dataclass
class RolloutConfig(Config):
    """Generation."""

    name: str = opt("hf", "Rollout engine; 'hf' samples on the policy's own weights.")
    mode: str = opt("sync", "'sync': all prompts of a step are generated in one call.")
    n: int = opt(1, "Samples per prompt.", ge=1)
    temperature: float = opt(1.0, "Sampling temperature, also applied to the training log-probabilities.", gt=0)
    top_p: float = opt(1.0, "Probability mass to sample from.", gt=0, le=1)
    top_k: int = opt(-1, "Number of most probable tokens to sample from; -1 = all.", ge=-1)
    do_sample: bool = opt(True, "Sample instead of taking the most probable token.")
    prompt_length: int = opt(512, "Prompt length, in tokens.", ge=1, inherits="data.max_prompt_length")
    response_length: int = opt(512, "Largest number of generated tokens.", ge=1, inherits="data.max_response_length")
    ignore_eos: bool = opt(False, "Go on after an end-of-sequence token until response_length.")
    dtype: str = opt(
        "auto",
        "Type of the weights in generation; auto = the policy's computing type.",
        choices=DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    max_num_seqs: int = opt(1024, "Largest number of sequences generated at once per rank.", ge=1)
    max_model_len: int | None = opt(
        None, "Largest number of prompt and response tokens; not given = prompt_length + response_length.", ge=1
    )
    free_cache_engine: bool = opt(True, "Free the key-value cache after every generation phase.")
    update_weights_bucket_megabytes: int = opt(
        512, "Largest piece in which weights that cannot be shared are handed to the rollout engine, in MB.", ge=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward pass for the old log-probabilities; not given = all at once.",
        ge=1,
        inherits=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    )
    log_prob_micro_batch_size: int | None = opt(
        None, "Old form of log_prob_micro_batch_size_per_gpu: samples over all ranks.", ge=1
    )
    log_prob_use_dynamic_bsz: bool = opt(
        False, "Fill micro-batches up to log_prob_max_token_len_per_gpu tokens.", inherits=f"{ACTOR}.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one forward pass with log_prob_use_dynamic_bsz.",
        ge=1,
        inherits=f"{ACTOR}.ppo_max_token_len_per_gpu",
    )
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "Sampling during validation.")

    def problems(self) -> Iterator[str]:
        if self.name != "hf":
            known = (
                f"the {self.name} engine is not in this version"
                if self.name in ("vllm", "sglang")
                else ("there is no such rollout engine")
            )
            yield f"name={self.name!r}: {known}; use 'hf', which samples on the policy's own weights"
        if self.mode != "sync":
            why = "rollout servers are not in this version" if self.mode == "async" else "there is no such mode"
            yield f"mode={self.mode!r}: {why}; use 'sync'"
        for where, top_k in (("top_k", self.top_k), ("val_kwargs.top_k", self.val_kwargs.top_k)):
            if top_k == 0:
                yield f"{where}=0: must be -1 (all tokens) or a positive number of tokens"
        need = self.prompt_length + self.response_length
        if self.max_model_len is not None and self.max_model_len < need:
            yield (
                f"max_model_len={self.max_model_len}: smaller than prompt_length + response_length = "
                f"{self.prompt_length} + {self.response_length} = {need}; raise it or leave it out"
            )

    def log_prob_micro_batch(self) -> MicroBatch:
        """Return how the policy splits a rank's batch when it recomputes log-probabilities."""
        if self.log_prob_use_dynamic_bsz:
            return MicroBatch(None, self.log_prob_max_token_len_per_gpu)
        return MicroBatch(self.log_prob_micro_batch_size_per_gpu, None)
