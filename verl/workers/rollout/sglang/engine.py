"""SGLang as a rollout engine: a server of the worker's own beside it, or one that runs elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl import envs
from verl.config.engine_keys import SERVER_SETTINGS, engine_key_problems
from verl.errors import ConfigError, RolloutError, VerlError, WeightSyncError
from verl.models.lora import LoraSettings, is_adapter_name
from verl.utils.device import get_torch_device
from verl.utils.distributed import env_local_world_size, env_rank, env_world_size, free_port, init_process_group
from verl.workers.rollout.engine import RolloutEngine, run_blocking
from verl.workers.rollout.lora import adapter_for, merge_instead
from verl.workers.rollout.pausing import PauseController, check_ready, check_request, parts_of, with_partial
from verl.workers.rollout.policy_weights import LiveWeight, Named, WeightManifest, digest
from verl.workers.rollout.settings import max_model_len, resolve_dtype, special_tokens
from verl.workers.rollout.sglang.arguments import layers_of, server_arguments
from verl.workers.rollout.sglang.connection import Connection
from verl.workers.rollout.sglang.lora import ADAPTED_LAYERS, ADAPTER, SLOTS
from verl.workers.rollout.sglang.process import ServerProcess, require_sglang
from verl.workers.rollout.sglang.sampler import PENALTY, stream_start
from verl.workers.rollout.sglang.scheduler import DIGESTS, MEMORY
from verl.workers.rollout.sglang.weights import GroupChannel, HandleChannel, WeightChannel, pickled
from verl.workers.rollout.types import MEMORY_PARTS, Completion, GenerationRequest, MemoryPart, RolloutMemory

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

#: how long a server may take to start; large models are read and compiled for minutes
START_TIMEOUT_S = 1800.0
#: SGLang takes smaller temperatures for greedy
_LOWEST_TEMPERATURE = 1e-6
#: when to tell the server again that requests are to end; a request may still be on its way to the scheduler
_ABORT_PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HALT_TIMEOUT_S = 120.0


class SGLangRolloutEngine(RolloutEngine):
    """Generation by an SGLang server.

    A worker starts a server of its own on its own devices, or uses one of ``rollout.server_urls``. Either has verl's
    sampler: seeds and log-probabilities are those of the built-in engine. Weights are written in place, bucket by
    bucket.

    With ``rollout.tensor_model_parallel_size`` above 1, neighbouring ranks share a server that the first of them
    starts; so do ranks that are given the same address. Each asks for its own completions; sleep, wake and updates are
    then collective over these ranks.

    Args:
        model_config: the ``model`` section; ``path`` holds the model's configuration.
        rollout_config: the ``rollout`` section.
        device: ``"cpu"`` or ``"cuda"``.
        tokenizer: the policy's tokenizer, for its end-of-sequence and padding tokens; loaded from the model's
            directory when None and there is one.

    Raises:
        ConfigError: SGLang is missing or cannot serve the model, a server cannot be reached or is not meant for
            training, or an option has no meaning here.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        rollout_config: RolloutConfig,
        *,
        device: str = "cpu",
        tokenizer: Any | None = None,
    ) -> None:
        from verl.models.loading import load_hf_config, resolve_model_dir

        self.device = get_torch_device(device)
        self.dtype = resolve_dtype(rollout_config.dtype, self.device)
        config = load_hf_config(model_config)
        text_config = config.get_text_config()
        directory = resolve_model_dir(model_config.path, use_shm=model_config.use_shm)
        self.eos_token_ids, self.pad_token_id = special_tokens(model_config, directory, config, tokenizer)
        self.vocab_size = int(text_config.vocab_size)
        lora = adapter_for(model_config, rollout_config)
        self.manifest = WeightManifest(config, self.dtype, trust_remote_code=model_config.trust_remote_code, lora=lora)
        if unknown := layers_of(self.manifest.adapter) - ADAPTED_LAYERS:
            merge_instead(rollout_config, f"SGLang has no places for adapters on {', '.join(sorted(unknown))}")
            self.manifest.without_adapter()
        self.max_model_len = max_model_len(rollout_config, text_config)
        self.bucket_bytes = rollout_config.update_weights_bucket_megabytes << 20
        self.process: ServerProcess | None = None
        self._group = _sharing_ranks(rollout_config, device)
        self._leads = self._group is None or dist.get_rank(self._group) == 0
        if rollout_config.server_urls:
            urls = rollout_config.server_urls
            self.connection = Connection(urls[env_rank() % len(urls)], api_key=envs.get("VERL_SERVER_API_KEY"))
        else:
            arguments = server_arguments(
                model_config,
                rollout_config,
                directory=directory,
                text_config=text_config,
                architecture=None if config.architectures else self.manifest.architecture,
                device=self.device,
                dtype=self.dtype,
                local_world_size=env_local_world_size(),
                adapter=self.manifest.adapter,
            )
            self._start_server(arguments)
        self._finalizer = weakref.finalize(self, _close, self.process, self.connection)
        self._read_server(rollout_config)
        #: name of the policy's adapter on the server
        self._adapter: str | None = None
        if lora is not None and self.manifest.adapter:
            self._register_adapter(lora)
        self.supports_lora_update = self._adapter is not None
        self.pauses = PauseController("sglang", self.vocab_size)
        #: parts that the caller wants ready, and parts whose memory is really held
        self._awake: set[MemoryPart] = set(MEMORY_PARTS)
        self._resident: set[MemoryPart] = set(MEMORY_PARTS)
        self._version = -1
        self._next_version: int | None = None
        self._complete = False
        self._values = False  # the server's memory has the values of the last weight sync
        self._new_base = False  # the update that is running brings base weights
        self._arriving: dict[str, LiveWeight] | None = None
        self._live: dict[str, LiveWeight] | None = None
        self._running: dict[str, str] = {}  # name on the server -> request id
        self._unwanted: set[str] = set()
        if rollout_config.free_cache_engine:  # nobody needs it before the first weights and the first request
            run_blocking(self._release(drop_weights=True))

    # -- the server

    def _start_server(self, arguments: dict[str, Any]) -> None:
        """Start a server, or learn from the first rank that shares it where it is."""
        require_sglang()
        devices = [_visible_device(self.device)]
        if self._group is not None:
            everyone: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, devices[0], group=self._group)
            devices = everyone
        place: list[Any] = [None, None]
        if self._leads:
            place = [f"http://127.0.0.1:{free_port('127.0.0.1')}", secrets.token_urlsafe()]
            address = {"host": "127.0.0.1", "port": int(place[0].rpartition(":")[2]), "api_key": place[1]}
            environment = {
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # "are you there?" asks for no token
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare positions, which are never used
            }
            if self.device.type == "cpu":
                environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            else:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            self.process = ServerProcess({**arguments, **address}, environment)
        if self._group is not None:
            dist.broadcast_object_list(place, group=self._group, group_src=0)
        death = (lambda: None) if self.process is None else self.process.death
        self.connection = Connection(place[0], death=death, api_key=place[1])
        try:
            self.connection.wait_until_ready(START_TIMEOUT_S)
        except RolloutError as error:
            _close(self.process, self.connection)
            raise ConfigError(f"SGLang cannot be set up for rollout.name=sglang: {error}") from error

    def _read_server(self, config: RolloutConfig) -> None:
        """Learn what the server can do.

        Raises:
            ConfigError: it was not started for training, or has too few positions.
        """
        try:
            info = self.connection.ask_blocking("/server_info")
        except RolloutError as error:
            raise ConfigError(f"rollout.server_urls: {error}") from error
        try:
            answers = self._question(self.connection.call_blocking("/weights_checker", {"action": MEMORY}))
        except RolloutError as error:
            raise ConfigError(
                f"rollout.server_urls: the server at {self.connection.url} was not started for training; start it with "
                f"python -m verl.workers.rollout.sglang.server ({error})"
            ) from error
        positions = info.get("max_req_input_len") or info["context_length"]
        if config.server_urls and positions is not None and positions < self.max_model_len:
            raise ConfigError(
                f"rollout.server_urls: the server at {self.connection.url} serves {positions} tokens, sequences may "
                f"have {self.max_model_len}; start it with a larger --context-length"
            )
        if config.server_urls:
            given = {key: info[key] for key in SERVER_SETTINGS if info.get(key) not in (None, False, "auto", [], {})}
            if problem := next(engine_key_problems("sglang", given), None):
                raise ConfigError(
                    f"rollout.server_urls: the server at {self.connection.url} was started with "
                    f"{problem.removeprefix('engine_kwargs.sglang.')}"
                )
        cpu = info["device"] == "cpu"
        self._frees = cpu or bool(info["enable_memory_saver"])
        self._keeps_values = not cpu and bool(info["enable_weights_cpu_backup"])
        self._overlaps = not info["disable_overlap_schedule"]
        self._devices = int(info["tp_size"])
        if config.server_urls and self.manifest.adapter:
            self._check_adapter_room(config, info)
        sharing = 1 if self._group is None else dist.get_world_size(self._group)
        self._bytes = {key: sum(int(answer[key]) for answer in answers) // sharing for key in ("kv_cache", "weights")}
        self.channel: WeightChannel | None = None
        if not config.server_urls:
            own = self.connection if self._leads else None
            self.channel = HandleChannel(own, self._group, self.device)
        elif self._leads:
            self.channel = GroupChannel(self.connection, self._devices, self.device)

    def _check_adapter_room(self, config: RolloutConfig, info: Any) -> None:
        """Have the adapter merged where a server that runs elsewhere was started without room for it."""
        rank = next(shape[0] for name, shape in self.manifest.adapter.items() if name.endswith("lora_A"))
        layers = sorted(layers_of(self.manifest.adapter))
        room = set(info.get("lora_target_modules") or ())
        if not (info.get("enable_lora") and int(info.get("max_lora_rank") or 0) >= rank and room >= set(layers)):
            merge_instead(
                config,
                f"the server at {self.connection.url} was started without room for it; start it with --enable-lora "
                f"--max-lora-rank {rank} --max-loras-per-batch {SLOTS} --lora-target-modules {' '.join(layers)}",
            )
            self.manifest.without_adapter()

    def _register_adapter(self, lora: LoraSettings) -> None:
        """Make the policy's adapter known to the server, without matrices; updates bring these."""
        name: list[str] = [ADAPTER + secrets.token_hex(8)]
        if self._group is not None:
            dist.broadcast_object_list(name, group=self._group, group_src=0)
        if self._leads:
            description = {
                "peft_type": "LORA",
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "target_modules": sorted(layers_of(self.manifest.adapter)),
            }
            nothing = pickled({})
            self.connection.call_blocking(
                "/load_lora_adapter_from_tensors",
                {
                    "lora_name": name[0],
                    "config_dict": description,
                    "serialized_named_tensors": [nothing] * self._devices,
                },
            )
        self._adapter = name[0]

    @staticmethod
    def _question(answer: Any) -> list[dict[str, str]]:
        return [rank["checksums"] for rank in answer["ranks"]]

    async def _control(self, path: str, body: Any = None) -> None:
        """Tell the server to do something: the first rank that shares it, when all are here; all wait until it did."""
        if self._group is not None:
            dist.barrier(self._group)
        if self._leads:
            await self.connection.call(path, body)
        if self._group is not None:
            dist.barrier(self._group)

    # -- serving

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first complete update."""
        return self._version

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Serve requests together, in the order given. Equal beginnings of prompts share their cache."""
        return await self.pauses.run(self._serve, requests)

    async def _serve(self, requests: list[GenerationRequest]) -> list[Completion]:
        check_ready(updating=self._next_version is not None, complete=self._complete, awake=self._awake)
        for request in requests:
            self._check_request(request)
        if not requests:
            return []
        names = [secrets.token_hex(16) for _ in requests]
        body = {
            "rid": names,
            "input_ids": [request.context_ids for request in requests],
            "sampling_params": [self._sampling(request) for request in requests],
            "return_logprob": True,
        }
        if self._adapter is not None:
            body["lora_path"] = self._adapter
        self._running.update(zip(names, (request.request_id for request in requests), strict=True))
        try:
            answers = await self.connection.generate(body)
        except asyncio.CancelledError:
            self.connection.start(self._abort_until(names, lambda: False))
            raise
        finally:
            unwanted = self._unwanted.intersection(names)
            self._unwanted -= unwanted
            for name in names:
                self._running.pop(name, None)
        return [
            self._completion(request, answer, aborted=name in unwanted)
            for name, request, answer in zip(names, requests, answers, strict=True)
        ]

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now; they complete with the tokens so far and reason ``"abort"``."""
        wanted = None if request_ids is None else set(request_ids)
        self.pauses.abort(wanted)
        self._abort_here(wanted)

    async def halt(self) -> None:
        """End what is being computed; see :meth:`RolloutEngine.halt`.

        Raises:
            RolloutError: the server did not end it in time.
        """
        self._abort_here(None)
        end = time.monotonic() + _HALT_TIMEOUT_S
        while self._running:
            if time.monotonic() > end:
                raise RolloutError(f"{len(self._running)} requests were not ended within {_HALT_TIMEOUT_S:g} s")
            await asyncio.sleep(0.002)

    def _abort_here(self, wanted: set[str] | None) -> None:
        names = [name for name, request in self._running.items() if wanted is None or request in wanted]
        self._unwanted.update(names)
        if names:
            self.connection.start(self._abort_until(names, lambda: not self._unwanted.intersection(names)))

    async def _abort_until(self, names: Sequence[str], done: Callable[[], bool]) -> None:
        """Tell the server to abort, again and again: a request may still be on its way to the scheduler."""
        for pause in _ABORT_PAUSES_S:
            await asyncio.sleep(pause)
            if done():
                return
            await asyncio.gather(*(self.connection.post("/abort_request", {"rid": name}) for name in names))

    def _sampling(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        return {
            "max_new_tokens": request.remaining,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "custom_params": {PENALTY: sampling.repetition_penalty},
            "sampling_seed": stream_start(seed % (1 << 64), len(request.prompt_ids)),
            "stop_token_ids": sorted(stops),  # the server has none of its own
        }

    def _completion(self, request: GenerationRequest, answer: Any, *, aborted: bool) -> Completion:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length") and not aborted:
            why = meta["finish_reason"].get("message", reason)
            raise RolloutError(f"request {request.request_id!r}: the SGLang server ended it: {why}")
        tokens = list(answer.get("output_ids") or ())
        log_probs = [item[0] for item in (meta.get("output_token_logprobs") or ())[: len(tokens)]]
        if len(log_probs) != len(tokens) or None in log_probs:
            raise RolloutError(f"request {request.request_id!r}: the SGLang server left out log-probabilities")
        if request.sampling.top_k == 1 and not request.sampling.greedy:
            log_probs = [0.0] * len(tokens)  # SGLang takes such requests for greedy ones; the token is the only one
        return with_partial(request, Completion(tokens, log_probs, reason, self._version))

    def _check_request(self, request: GenerationRequest) -> None:
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        sampling = request.sampling
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise RolloutError(
                f"request {request.request_id!r}: temperature={sampling.temperature} is below SGLang's smallest, "
                f"{_LOWEST_TEMPERATURE}; use 0 (greedy) or at least that"
            )
        if sampling.repetition_penalty != 1.0 and self._overlaps:
            raise RolloutError(
                f"request {request.request_id!r}: repetition_penalty={sampling.repetition_penalty} needs every token "
                "before the next one, and the server works ahead; set rollout.repetition_penalty or "
                "rollout.engine_kwargs.sglang.disable_overlap_schedule=True"
            )

    def _require_idle(self, what: str, error: type[VerlError]) -> None:
        if self._running:
            raise error(f"{what}: {len(self._running)} requests are in flight; await them or abort() them first")

    # -- memory

    async def sleep(self) -> None:
        """Give back the memory of the cache, and of the weights where their values can be had again.

        Raises:
            RolloutError: requests are in flight.
        """
        self._require_idle("sleep", RolloutError)
        self._awake.clear()
        await self._release(drop_weights=self._can_reload())

    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        """Make ready again, weights before the cache; see :meth:`RolloutEngine.wake`.

        Raises:
            RolloutError: the weights were dropped and the training engine's have changed since.
        """
        wanted = parts_of(parts)
        await self._make_resident(wanted)
        self._awake.update(wanted)

    def memory(self) -> RolloutMemory:
        """Bytes that the server holds now, divided over the ranks that share it."""
        return RolloutMemory(
            kv_cache=self._bytes["kv_cache"] if "kv_cache" in self._resident else 0,
            owned_weights=self._bytes["weights"] if "weights" in self._resident else 0,
            aliased_weights=0,
        )

    async def _release(self, *, drop_weights: bool) -> None:
        parts = [part for part in MEMORY_PARTS if part in self._resident]
        if not self._keeps_values and not drop_weights:
            parts = [part for part in parts if part != "weights"]
        if not self._frees or not parts:
            return
        await self._control("/flush_cache?timeout=60")  # returns when the scheduler has really nothing left to do
        await self._control("/release_memory_occupation", {"tags": parts})
        self._resident.difference_update(parts)
        self._values &= "weights" not in parts or self._keeps_values

    async def _make_resident(self, parts: Iterable[MemoryPart], *, restore: bool = True) -> None:
        for part in parts:
            if part in self._resident:
                continue
            await self._control("/resume_memory_occupation", {"tags": [part]})
            self._resident.add(part)
            if part == "weights" and restore and self._complete and not self._values:
                await self._reload()

    def _can_reload(self) -> bool:
        return self._complete and self._unchanged(self._live)

    @staticmethod
    def _unchanged(live: Mapping[str, LiveWeight] | None) -> bool:
        """Whether these tensors of the training engine are what they were when they were synced."""
        return live is not None and all(item.unchanged for item in live.values())

    def _live_base(self) -> dict[str, LiveWeight] | None:
        return None if self._live is None else {n: item for n, item in self._live.items() if not is_adapter_name(n)}

    async def _reload(self) -> None:
        """Read the training engine's weights again after they were dropped here."""
        if not self._can_reload():
            self._complete = False
            raise RolloutError(
                f"the weights of version {self._version} were given back and the training engine's have changed since; "
                "sync the new ones (sync_weights) before generating"
            )
        assert self._live is not None
        await self._control("/begin_weight_update", {})
        await self._send([(name, item.tensor) for name, item in self._live.items()])
        await self._control("/end_weight_update", {})
        self._values = True

    # -- weights

    @property
    def needs_base_weights(self) -> bool:
        """See :meth:`RolloutEngine.needs_base_weights`: not while the base weights are there, or can be read again."""
        return not (self._values or self._unchanged(self._live_base()))

    async def begin_update(self, version: int) -> None:
        """Start to receive weights; see :meth:`RolloutEngine.begin_update`."""
        self._require_idle("begin_update", WeightSyncError)
        if self._next_version is not None:
            raise WeightSyncError(f"the update to version {self._next_version} is still running; end it first")
        await self._make_resident(["weights"], restore=False)
        self._awake.add("weights")
        self._complete = False
        self._arriving, self._new_base = {}, False
        self.manifest.begin()
        await self._control("/begin_weight_update", {})
        self._next_version = version

    async def load(self, bucket: Iterable[Named], *, live: bool = True) -> None:
        """Take some of the weights; see :meth:`RolloutEngine.load`. They are copied, whatever ``live`` says; it says
        whether they can be read again after the copy was given back."""
        if self._next_version is None:
            raise WeightSyncError("weights arrived outside of an update; call begin_update first")
        try:
            weights = list(self.manifest.accept(bucket, live=live))
            if any(not is_adapter_name(name) for name, _ in weights):
                self._new_base, self._values, self._live = True, False, None
            await self._send(weights)
        except BaseException as error:
            await self._cancel_update()
            if isinstance(error, RolloutError):
                raise WeightSyncError(f"SGLang did not take the weights: {error}") from error
            raise
        if not live:
            self._arriving = None
        elif self._arriving is not None:
            self._arriving.update({name: LiveWeight.of(tensor) for name, tensor in weights})

    async def end_update(self) -> None:
        """Finish the update; see :meth:`RolloutEngine.end_update`."""
        if self._next_version is None:
            raise WeightSyncError("no weight update is running; call begin_update first")
        version = self._next_version
        try:
            adapter_only = self.supports_lora_update and not self._new_base and not self.needs_base_weights
            self.manifest.end(adapter_only=adapter_only)
            if adapter_only and not self._values:
                await self._send([(name, item.tensor) for name, item in (self._live_base() or {}).items()])
        except BaseException:
            await self._cancel_update()
            raise
        if self._new_base:
            self._live = self._arriving
        elif self._live is not None:
            self._live = None if self._arriving is None else self._live | self._arriving
        self._values = True
        self._next_version = None
        await self._control("/end_weight_update", {})
        await self._control("/flush_cache?timeout=60")
        self._complete = True
        self._version = version

    async def _cancel_update(self) -> None:
        self._next_version = None
        await self._control("/end_weight_update", {})

    async def _send(self, weights: Sequence[Named]) -> None:
        if self.channel is None:  # another rank that shares the server sends them
            return
        for piece in _pieces(weights, self.bucket_bytes):
            await self.channel.send(piece, [self.manifest.dtype_of(name) for name, _ in piece])

    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per weight; see :meth:`RolloutEngine.checksums`."""
        answers = self._question(await self.connection.call("/weights_checker", {"action": DIGESTS}))
        reports = [{key: json.loads(value) for key, value in answer.items()} for answer in answers]
        known = {self.manifest.names_of(name)[0]: name for report in reports for name in report}
        if source is None:
            return {key: ":".join(report[name]["digest"] for report in reports) for key, name in known.items()}
        found: dict[str, str] = {}
        for name, tensor in source.items():
            key = self.manifest.names_of(name)[0]
            if key not in known and len(reports) > 1:
                raise WeightSyncError(
                    f"how SGLang splits {name!r} is known after the first update only; unset VERL_SYNC_CHECK"
                )
            parts = [report[known[key]]["parts"] for report in reports] if key in known else [None]
            if key not in found:
                found[key] = ":".join(self._digest(tensor, part) for part in parts)
        return found

    def _digest(self, tensor: torch.Tensor, parts: Sequence[Any] | None) -> str:
        whole = tensor.detach().contiguous()
        if parts is None:
            return digest([whole], self.dtype)
        start = whole.storage_offset()
        return digest([whole.as_strided(size, stride, start + offset) for size, stride, offset in parts], self.dtype)

    def close(self) -> None:
        """End the worker's own server; the engine cannot be used again."""
        self._finalizer()


def _close(process: ServerProcess | None, connection: Connection) -> None:
    if process is not None:
        process.stop()
    connection.close()


def _sharing_ranks(config: RolloutConfig, device: str) -> dist.ProcessGroup | None:
    """The ranks that share this rank's server; None when it has one alone. Collective over all ranks.

    Raises:
        ConfigError: the ranks cannot be divided as asked for.
    """
    size, local = env_world_size(), env_local_world_size()
    parallel = config.tensor_model_parallel_size
    if config.server_urls:
        count = min(len(config.server_urls), size)
        blocks = [list(range(first, size, count)) for first in range(count)]
    else:
        if size % parallel or local % parallel:
            raise ConfigError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide the {local} ranks of a "
                f"machine ({size} in all), so that the ranks that share a model are neighbours"
            )
        blocks = [list(range(first, first + parallel)) for first in range(0, size, parallel)]
    if all(len(block) == 1 for block in blocks):
        return None
    init_process_group(device)
    group, _ = dist.new_subgroups_by_enumeration(blocks, backend="gloo")
    return group


def _visible_device(device: torch.device) -> str:
    """The device under the name by which another process can be given it."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return visible[index] if index < len(visible) else str(index)


def _pieces(weights: Sequence[Named], limit: int) -> Iterator[list[Named]]:
    """Weights in buckets of at most ``limit`` bytes, or of one weight."""
    piece: list[Named] = []
    used = 0
    for name, tensor in weights:
        if piece and used + tensor.nbytes > limit:
            yield piece
            piece, used = [], 0
        piece.append((name, tensor))
        used += tensor.nbytes
    if piece:
        yield piece
