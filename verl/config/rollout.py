"""Generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from verl import envs
from verl.config.base import Config, MicroBatch, opt, section, suggestion
from verl.config.engine_keys import engine_key_problems
from verl.config.fsdp import DTYPE_SPELLINGS, DTYPES
from verl.config.multi_turn import AgentConfig, MultiTurnConfig

ACTOR = "actor_rollout_ref.actor"
ENGINES = ("hf", "sglang", "vllm")

#: keys that mean something to the engines that are not built in, and their values that mean nothing
_ENGINE_KEYS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("tensor_model_parallel_size", (1,)),
    ("enable_chunked_prefill", (None, False)),
    ("enable_prefix_caching", (None, False)),
)


@dataclass
class ValKwargsConfig(Config):
    """Sampling during validation."""

    n: int = opt(1, "Samples per validation prompt.", ge=1)
    do_sample: bool = opt(False, "Sample instead of taking the most probable token.")
    temperature: float = opt(0.0, "Sampling temperature; 0 = the most probable token.", ge=0)
    top_p: float = opt(1.0, "Probability mass to sample from.", gt=0, le=1)
    top_k: int = opt(-1, "Number of most probable tokens to sample from; -1 = all.", ge=-1)
    repetition_penalty: float = opt(1.0, "As for training.", gt=0)

    def problems(self) -> Iterator[str]:
        if self.do_sample and self.temperature == 0:
            yield "do_sample=True: with temperature=0 nothing is sampled; give a temperature > 0"
        if self.n > 1 and (not self.do_sample or self.temperature == 0):
            yield f"n={self.n}: greedy samples of one prompt are all the same; set do_sample=True and a temperature"


@dataclass
class EngineKwargsConfig(Config):
    """Settings that are passed on to a rollout engine under its own names."""

    vllm: dict[str, Any] = opt(
        {}, "Arguments of vLLM's EngineArgs, for example block_size or compilation_config; null values are left out."
    )
    sglang: dict[str, Any] = opt(
        {}, "Arguments of SGLang's ServerArgs, for example attention_backend; null values are left out."
    )


@dataclass
class RolloutServerConfig(Config):
    """Rollout engines in processes of their own (``mode: async``)."""

    timeout: float = opt(3600.0, "Longest time that a call of the servers may take, with all its attempts, in s.", gt=0)
    max_attempts: int = opt(3, "Servers that a request is given to, one after the other, before it fails.", ge=1)
    retry_delay: float = opt(
        2.0, "Seconds for which a server that failed is avoided, and the pause when none is up.", ge=0
    )
    max_start_wait_time: float = opt(300.0, "Longest wait for a server to start or to be restarted, in seconds.", gt=0)
    max_restarts: int = opt(3, "How often a server whose process died is restarted.", ge=0)
    openai_api: bool = opt(
        False, "Give every server an OpenAI-compatible HTTP endpoint, whose address is logged; needs verl[server]."
    )
    host: str = opt(
        "127.0.0.1",
        "Address on which these endpoints listen, on a free port; another than this machine's own needs "
        "VERL_SERVER_API_KEY in the environment.",
    )

    def problems(self) -> Iterator[str]:
        within = self.host in ("127.0.0.1", "localhost", "::1")
        if self.openai_api and not within and not envs.get("VERL_SERVER_API_KEY"):
            yield (
                f"host={self.host!r}: whoever reaches that address could generate; set the environment variable "
                "VERL_SERVER_API_KEY, which clients send as their api_key, or listen on 127.0.0.1"
            )


@dataclass
class CheckpointEngineConfig(Config):
    """How weights get to rollout engines in other processes."""

    backend: str = opt(
        "auto",
        "shared_memory: on each machine, from the training worker in the same place; broadcast: from the first worker "
        "over a group of all; disk: through a directory; auto = shared_memory.",
        choices=("auto", "shared_memory", "broadcast", "disk"),
    )
    directory: str | None = opt(None, "Directory for backend=disk, which all machines see.", affects="place")


@dataclass
class RolloutConfig(Config):
    """Generation."""

    name: str = opt(
        "hf",
        "Rollout engine: 'hf' samples on the policy's own weights, 'vllm' runs vLLM inside the training processes, "
        "'sglang' an SGLang server beside each of them.",
    )
    mode: str = opt(
        "sync",
        "'sync': the engine lives in the training workers; 'async': in servers of its own beside them, which serve any "
        "number of callers at the same time.",
        choices=("sync", "async"),
        affects="speed",
    )
    num_replicas: int | None = opt(
        None,
        "Copies of the policy among the servers of mode=async; not given = as many as the workers have room for.",
        ge=1,
        affects="speed",
    )
    server: RolloutServerConfig = section(RolloutServerConfig, "The servers of mode=async.", affects="speed")
    checkpoint_engine: CheckpointEngineConfig = section(
        CheckpointEngineConfig, "How weights get to the servers of mode=async.", affects="speed"
    )
    n: int = opt(1, "Samples per prompt.", ge=1)
    over_sample_rate: float = opt(
        0.0,
        "Share of a step's samples that generation does not wait for: train_batch_size / (1 - over_sample_rate) "
        "prompts are in progress, and when train_batch_size of them are complete the others are stopped.",
        ge=0,
        le=0.9,
    )
    partial_rollout: bool = opt(
        False, "Carry samples that over_sample_rate stops to the next step, where they go on; False drops them."
    )
    max_staleness: int = opt(
        1, "Most steps that a prompt's samples are carried (partial_rollout); then generation waits for them.", ge=1
    )
    temperature: float = opt(1.0, "Sampling temperature, also applied to the training log-probabilities.", gt=0)
    top_p: float = opt(1.0, "Probability mass to sample from.", gt=0, le=1)
    top_k: int = opt(-1, "Number of most probable tokens to sample from; -1 = all.", ge=-1)
    repetition_penalty: float = opt(
        1.0,
        "Divides positive and multiplies negative logits of tokens that the prompt or the response has already; more "
        "than 1 = fewer repetitions.",
        gt=0,
    )
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
    max_num_seqs: int = opt(1024, "Largest number of sequences generated at once per rank.", ge=1, affects="speed")
    max_model_len: int | None = opt(
        None, "Largest number of prompt and response tokens; not given = prompt_length + response_length.", ge=1
    )
    free_cache_engine: bool = opt(
        True,
        "Give the key-value cache, and weights that can be restored, back after every generation phase.",
        affects="speed",
    )
    gpu_memory_utilization: float = opt(
        0.5,
        "Largest share of the GPU's memory that the rollout engine fills with weights and cache; on CPUs, share of the "
        "free memory for the cache, divided over the ranks.",
        gt=0,
        le=1,
        affects="speed",
    )
    tensor_model_parallel_size: int = opt(
        1,
        "Ranks of a machine that generate together with one split copy of the weights (vllm, sglang).",
        ge=1,
        affects="speed",
    )
    max_num_batched_tokens: int = opt(
        8192,
        "Largest number of tokens in one forward pass; where prompts are not cut into chunks, a whole prompt must fit, "
        "and the limit is raised to max_model_len.",
        ge=1,
        affects="speed",
    )
    enable_chunked_prefill: bool | None = opt(
        None,
        "Cut long prompts into chunks that run beside others' next tokens (vllm, sglang); not given = yes, except for "
        "vllm on CPUs.",
        affects="speed",
    )
    enable_prefix_caching: bool | None = opt(
        None, "Reuse the cache of equal beginnings of prompts (vllm, sglang); not given = yes.", affects="speed"
    )
    enforce_eager: bool | None = opt(
        None,
        "Run without CUDA graphs and compilation; not given = on CPUs only, and always with hf, where False compiles "
        "norms and feed-forward layers.",
        affects="speed",
    )
    pack_weights: bool | None = opt(
        None,
        "While generating, keep the weights of linear layers a second time, in the order in which the CPU's kernels "
        "read them: up to twice as fast with few sequences, for the memory of the copies (hf); not given = on CPUs.",
        affects="speed",
    )
    engine_kwargs: EngineKwargsConfig = section(
        EngineKwargsConfig, "Settings of the rollout engine under its own names."
    )
    server_urls: list[str] = opt(
        [],
        "Addresses of running SGLang servers (python -m verl.workers.rollout.sglang.server) that generate instead of "
        "servers of the workers' own; worker i uses number i, counted around.",
        affects="place",
    )
    update_weights_bucket_megabytes: int = opt(
        512,
        "Largest piece in which weights that cannot be shared are handed to the rollout engine, in MB.",
        ge=1,
        affects="speed",
    )
    lora_merge: bool | None = opt(
        None,
        "Of a policy with low-rank adapters (model.lora_rank), what generation gets: True = weights with the adapters "
        "added, a whole model at every update; False = the base model once and the adapters at every update; not given "
        "= the latter where the engine can.",
        affects="speed",
    )
    on_unchanged_weights: str = opt(
        "error",
        "When an optimizer step changed none of the weights that the rollout gets: error, warn, or ignore = do not "
        "look (looking reads every weight once).",
        choices=("error", "warn", "ignore"),
        affects="limit",
    )
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None,
        "Samples per rank in one forward pass for the old log-probabilities; not given = all at once.",
        ge=1,
        inherits=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        affects="speed",
    )
    log_prob_micro_batch_size: int | None = opt(
        None, "Old form of log_prob_micro_batch_size_per_gpu: samples over all ranks.", ge=1, affects="speed"
    )
    log_prob_use_dynamic_bsz: bool = opt(
        False,
        "Fill micro-batches up to log_prob_max_token_len_per_gpu tokens.",
        inherits=f"{ACTOR}.use_dynamic_bsz",
        affects="speed",
    )
    log_prob_max_token_len_per_gpu: int = opt(
        16384,
        "Tokens per rank in one forward pass with log_prob_use_dynamic_bsz.",
        ge=1,
        inherits=f"{ACTOR}.ppo_max_token_len_per_gpu",
        affects="speed",
    )
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "Sampling during validation.", affects="report")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "How the model talks with tools, users and environments.")
    agent: AgentConfig = section(AgentConfig, "Which agent loop handles a row, and within which limits.")

    @property
    def agent_loop(self) -> str | None:
        """The agent loop of rows that name none; None when rows do not go through agent loops."""
        agent = self.agent
        if agent.default_agent_loop is not None:
            return agent.default_agent_loop
        if agent.openai_agent.path is not None:
            return "openai_agent"
        if agent.multi_agent.env is not None:
            return "multi_agent"
        if self.multi_turn.enable:
            return "tool_agent"
        # what stops trajectories and lets them go on is the business of agent loops
        named = agent.agent_loop_config_path is not None or self.over_sample_rate > 0
        return "single_turn_agent" if named else None

    @property
    def rows_per_sample(self) -> int:
        """Training rows that each sample gives."""
        agent = self.agent
        if agent.rows_per_sample is not None:
            return agent.rows_per_sample
        return len(agent.multi_agent.trained_players) if agent.multi_agent.env is not None else 1

    @property
    def rows_per_prompt(self) -> int:
        """Training rows that the samples of a prompt give together; mini-batches count prompts."""
        return self.n * self.rows_per_sample

    def problems(self) -> Iterator[str]:
        if self.name not in ENGINES:
            yield (
                f"name={self.name!r}: there is no such rollout engine{suggestion(self.name, ENGINES)}; use one of "
                f"{', '.join(ENGINES)}"
            )
        yield from self._engine_problems()
        yield from self._server_problems()
        for where, top_k in (("top_k", self.top_k), ("val_kwargs.top_k", self.val_kwargs.top_k)):
            if top_k == 0:
                yield f"{where}=0: must be -1 (all tokens) or a positive number of tokens"
        if self.agent_loop is not None and self.mode == "sync" and self.tensor_model_parallel_size > 1:
            yield (
                f"tensor_model_parallel_size={self.tensor_model_parallel_size}: agent loops inside the training "
                "processes ask one rank at a time, which a split model cannot serve; use 1"
            )
        if self.partial_rollout and not self.over_sample_rate:
            yield (
                "partial_rollout=True: with over_sample_rate=0 every sample is completed in its step and none is "
                "carried; give over_sample_rate, for example 0.2"
            )
        if self.partial_rollout and self.rows_per_sample > 1:
            yield (
                f"partial_rollout=True: samples of {self.rows_per_sample} rows (agent.rows_per_sample, "
                "agent.multi_agent) are not carried; leave it out, which drops those that are stopped"
            )
        if self.max_staleness != 1 and not self.partial_rollout:
            yield f"max_staleness={self.max_staleness}: without partial_rollout=True no sample is carried; leave it out"
        need = self.prompt_length + self.response_length
        if self.max_model_len is not None and self.max_model_len < need:
            yield (
                f"max_model_len={self.max_model_len}: smaller than prompt_length + response_length = "
                f"{self.prompt_length} + {self.response_length} = {need}; raise it or leave it out"
            )

    def _server_problems(self) -> Iterator[str]:
        """Keys of servers without servers, and what one needs of another."""
        weights = self.checkpoint_engine
        if self.mode == "sync":
            changed = [key for key, value in (("num_replicas", self.num_replicas),) if value is not None]
            changed += [f"server.{key}" for key in _changed(self.server)]
            changed += [f"checkpoint_engine.{key}" for key in _changed(weights)]
            if changed:
                yield f"{', '.join(changed)}: for servers, and mode='sync' has none; leave out, or set mode=async"
            return
        if (weights.backend == "disk") != (weights.directory is not None):
            yield (
                f"checkpoint_engine.directory={weights.directory!r}: backend={weights.backend!r}; a directory is for "
                "backend=disk, which needs one"
            )

    def _engine_problems(self) -> Iterator[str]:
        """Keys that the chosen engine has no use for."""
        for engine in ("vllm", "sglang"):
            given = getattr(self.engine_kwargs, engine)
            if self.name == engine:
                yield from engine_key_problems(engine, given)
            elif given:
                yield (
                    f"engine_kwargs.{engine}={given!r}: is for rollout.name={engine}, and the name is {self.name!r}; "
                    f"leave it out, or set rollout.name={engine}"
                )
        if self.name == "hf":
            for key, harmless in _ENGINE_KEYS:
                value = getattr(self, key)
                if value not in harmless:
                    yield (
                        f"{key}={value!r}: is a setting of rollout.name=vllm and sglang; leave it out, or set one of "
                        "these"
                    )
        if self.pack_weights and self.name == "hf" and self.enforce_eager is False:
            yield "pack_weights=True: compiled layers (enforce_eager=False) take plain weights; leave one of them out"
        if self.pack_weights is not None and self.name != "hf":
            yield f"pack_weights={self.pack_weights!r}: is a setting of rollout.name=hf; leave it out"
        if self.server_urls and self.name != "sglang":
            yield f"server_urls={self.server_urls!r}: is for rollout.name=sglang; leave it out"
        for url in self.server_urls:
            if not url.startswith(("http://", "https://")):
                yield f"server_urls: {url!r} is no address; write http://host:port"

    def log_prob_micro_batch(self) -> MicroBatch:
        """Return how the policy splits a rank's batch when it recomputes log-probabilities."""
        if self.log_prob_use_dynamic_bsz:
            return MicroBatch(None, self.log_prob_max_token_len_per_gpu)
        return MicroBatch(self.log_prob_micro_batch_size_per_gpu, None)


def _changed(config: Config) -> list[str]:
    """Keys of a section that do not have their defaults."""
    return [item.name for item in fields(config) if getattr(config, item.name) != getattr(type(config)(), item.name)]
