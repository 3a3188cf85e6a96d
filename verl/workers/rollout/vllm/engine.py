"""vLLM as a rollout engine, in the training processes and on their devices.

Every rank runs vLLM's engine itself: its scheduler, its cache and its share of the weights live in the rank's own
process, so weights are synced by reference, whatever the training engine. With tensor parallelism, neighbouring
ranks run the same schedule over the same requests, which they exchange first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.errors import ConfigError, RolloutError, VerlError, WeightSyncError
from verl.models.lora import is_adapter_name
from verl.models.vision import ImageTokens
from verl.utils.device import get_torch_device
from verl.utils.distributed import env_local_world_size, get_world_size, init_process_group
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.lora import adapter_for, merge_instead
from verl.workers.rollout.pausing import Call, PauseController, check_ready, check_request, parts_of, with_partial
from verl.workers.rollout.policy_weights import LiveWeight, WeightManifest, split_adapter
from verl.workers.rollout.settings import resolve_dtype, special_tokens, unsampled_of
from verl.workers.rollout.types import (
    MEMORY_PARTS,
    Completion,
    FinishReason,
    GenerationRequest,
    MemoryPart,
    RolloutMemory,
    WeightPart,
)
from verl.workers.rollout.vllm.arguments import ADAPTER_ARGUMENTS, engine_arguments
from verl.workers.rollout.vllm.images import engine_input
from verl.workers.rollout.vllm.lora import MAX_RANKS, adapter_request
from verl.workers.rollout.vllm.process import own_random_state, require_vllm
from verl.workers.rollout.vllm.start import NoAdapterError, start_engine

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

#: vLLM raises smaller temperatures to this, which would be another distribution than the one asked for
_LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A request in flight that this rank has to answer."""

    request: GenerationRequest
    call: Call
    index: int


class VLLMRolloutEngine(RolloutEngine):
    """vLLM inside the training process.

    Weights are written in place, bucket by bucket; the randomness of a token is that of its request's seed and its
    position; log-probabilities are those of the distribution that was sampled from. All work runs in the caller's
    thread and event loop; between steps the loop gets a turn.

    With ``rollout.tensor_model_parallel_size`` above 1, ``generate_many`` is collective over the ranks that share the
    weights: each calls it with its own requests, possibly none, and gets its own completions. Where ``on_tp_work`` is
    set, this rank alone gets requests, whenever they come, and calls the others in by it; its event loop must live on.

    vLLM applies min-p before top-p, the built-in engine after it; with both filters set the kept tokens can differ.

    Args:
        model_config: the ``model`` section; ``path`` holds the model's configuration.
        rollout_config: the ``rollout`` section.
        device: ``"cpu"`` or ``"cuda"``.
        tokenizer: the policy's tokenizer, for its end-of-sequence and padding tokens; loaded from the model's
            directory when None and there is one.
        groups: ranks that share the weights, in the order of their parts; None: neighbours.

    Raises:
        ConfigError: vLLM is missing, cannot serve the model, or an option has no meaning here.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        rollout_config: RolloutConfig,
        *,
        device: str = "cpu",
        tokenizer: Any | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        require_vllm()
        from verl.models.loading import load_hf_config, resolve_model_dir

        self.device = get_torch_device(device)
        self.dtype = resolve_dtype(rollout_config.dtype, self.device)
        config = load_hf_config(model_config)
        text_config = config.get_text_config()
        directory = resolve_model_dir(model_config.path, use_shm=model_config.use_shm)
        self.eos_token_ids, self.pad_token_id = special_tokens(model_config, directory, config, tokenizer)
        self.vocab_size = int(text_config.vocab_size)
        self.image_tokens = ImageTokens.of(config)
        lora = adapter_for(model_config, rollout_config)
        if lora is not None and lora.rank > MAX_RANKS[-1]:
            merge_instead(rollout_config, f"model.lora_rank={lora.rank} is above vLLM's largest, {MAX_RANKS[-1]}")
            lora = None
        self.manifest = WeightManifest(config, self.dtype, trust_remote_code=model_config.trust_remote_code, lora=lora)
        init_process_group(device)  # where the trainer has none, vLLM would make one on a free port
        arguments = engine_arguments(
            model_config,
            rollout_config,
            directory=directory,
            text_config=text_config,
            reads_images=self.image_tokens is not None,
            architecture=None if config.architectures else self.manifest.architecture,
            device=self.device,
            dtype=self.dtype,
            world_size=get_world_size(),
            local_world_size=env_local_world_size(),
            adapter=self.manifest.adapter,
        )
        self.max_model_len: int = arguments["max_model_len"]
        self.frees_memory = bool(rollout_config.free_cache_engine)
        try:
            self.engine = start_engine(arguments, self.device, groups)
        except NoAdapterError as error:
            merge_instead(rollout_config, str(error))
            self.manifest.without_adapter()
            arguments = {key: value for key, value in arguments.items() if key not in ADAPTER_ARGUMENTS}
            self.engine = start_engine(arguments, self.device, groups)
        self._check_head_size()
        self._group = _parallel_group()
        pack = self.device.type == "cpu" and bool(arguments["enforce_eager"])
        in_place = self._rpc("verl_attach", self.manifest, self.dtype, pack)
        if self.device.type == "cpu" and not in_place:  # the reload that serves them on GPUs does not pack again here
            raise ConfigError(
                f"{self.manifest.architecture} has layers (experts, latent attention, quantisation) whose weights vLLM "
                "converts after loading and cannot replace on CPUs; set actor_rollout_ref.rollout.name=hf"
            )
        if unsampled := unsampled_of(model_config, self.vocab_size, tokenizer):
            self._rpc("verl_never_sample", unsampled)
        #: what requests say to be served with the policy's adapter
        self._adapter: Any = None
        if lora is not None and self.manifest.adapter:
            problem = self._rpc("verl_attach_adapter", self.manifest.adapter, lora.scaling, self.dtype)
            if problem is None:
                self._adapter = adapter_request()
            else:
                merge_instead(rollout_config, problem)
                self.manifest.without_adapter()
        self.supports_lora_update = self._adapter is not None
        self.pauses = PauseController("vllm", self.vocab_size)
        #: parts that the caller wants ready, and parts whose memory is really held
        self._awake: set[MemoryPart] = set(MEMORY_PARTS)
        self._resident: set[MemoryPart] = set(MEMORY_PARTS)
        self._version = -1
        self._next_version: int | None = None
        self._complete = False
        self._values = False  # memory of the weights has the values of the last weight sync
        self._live: dict[str, LiveWeight] | None = None
        #: of the update that is running: what may become ``_live``, and which parts have begun to arrive
        self._arriving: dict[str, LiveWeight] | None = None
        self._begun: set[str] = set()
        self._tickets: dict[str, _Ticket] = {}
        self._inbox: list[tuple[_Ticket, GenerationRequest]] = []
        self._unwanted: set[str] = set()
        self._number = 0
        self._driver: asyncio.Task[None] | None = None
        if self.frees_memory:  # nobody needs it before the first weights and the first request
            self._release(keep_weights=False)

    # -- serving

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first complete update."""
        return self._version

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Serve requests together, in the order given. Equal prompts share their cache where blocks are full."""
        return await self.pauses.run(
            self._serve, requests, collective=self._group is not None and self.on_tp_work is None
        )

    async def tp_step(self) -> None:
        """Serve with the rank that has ``on_tp_work`` until nothing is left; to be called whenever that is."""
        await self._serve([])

    async def _serve(self, requests: list[GenerationRequest]) -> list[Completion]:
        problem: Exception | None = None
        try:
            check_ready(updating=self._next_version is not None, complete=self._complete, awake=self._awake)
            for request in requests:
                self._check_request(request)
        except RolloutError as error:
            if self._group is None or self.on_tp_work is not None:
                raise
            # the other ranks wait for this one: take part without requests, then complain
            problem, requests = error, []
        if not requests and self._group is None:
            return []
        self._make_resident(MEMORY_PARTS)
        loop = asyncio.get_running_loop()
        call = Call(len(requests), loop.create_future())
        mine: list[str] = []
        for index, request in enumerate(requests):
            self._number += 1
            key = f"{dist.get_rank()}-{self._number}"
            mine.append(key)
            self._tickets[key] = _Ticket(request, call, index)
            self._inbox.append((self._tickets[key], _with_seed(request, key)))
        if self._driver is None or self._driver.done():
            if self.on_tp_work is not None:
                self.on_tp_work()
            self._driver = loop.create_task(self._drive())
        try:
            completions = await call.future if requests else []
            if self._group is not None and self.on_tp_work is None:
                await asyncio.shield(self._driver)  # the other ranks need this one until the last of their requests
        except asyncio.CancelledError:
            self._unwanted.update(mine)
            raise
        if problem is not None:
            raise problem
        return completions

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now; they complete with the tokens so far and reason ``"abort"``."""
        wanted = None if request_ids is None else set(request_ids)
        self.pauses.abort(wanted)
        self._abort_here(wanted)

    async def halt(self) -> None:
        """End what is being computed; see :meth:`RolloutEngine.halt`."""
        self._abort_here(None)
        if self._group is not None and self._driver is not None:  # the ranks agree on it at their next step
            await asyncio.shield(self._driver)

    def _abort_here(self, wanted: set[str] | None) -> None:
        self._unwanted.update(
            key for key, ticket in self._tickets.items() if wanted is None or ticket.request.request_id in wanted
        )
        if self._group is None:
            self._abort_unwanted(self._unwanted)

    async def _drive(self) -> None:
        """Run until nothing is left, here and on the ranks that share the weights."""
        try:
            while self._take_in():
                for output in self._step():
                    self._deliver(output)
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - raised again by every call in flight
            self._fail(error)
        except BaseException:  # cancelled with its loop: nobody waits any more
            self._forget_all()
            raise

    def _step(self) -> list[Any]:
        with own_random_state(self.device.type == "cuda"):
            outputs: list[Any] = self.engine.step()
        return outputs

    def _take_in(self) -> bool:
        """Give new requests and aborts to vLLM; whether there is work. Collective where the weights are shared."""
        arrived = [(request.request_id, request) for _, request in self._inbox]
        unwanted, self._inbox, self._unwanted = self._unwanted, [], set()
        if self._group is not None:
            news = torch.tensor([len(arrived) + len(unwanted)])
            dist.all_reduce(news, group=self._group)
            if int(news):
                gathered: list[Any] = [None] * dist.get_world_size(self._group)
                dist.all_gather_object(gathered, (arrived, sorted(unwanted)), group=self._group)
                arrived = [item for requests, _ in gathered for item in requests]
                unwanted = {key for _, keys in gathered for key in keys}
        for key, request in arrived:
            prompt = engine_input(request, self.image_tokens, self._version)
            self.engine.add_request(key, prompt, self._sampling(request), lora_request=self._adapter)
        self._abort_unwanted(unwanted)
        return bool(self.engine.has_unfinished_requests())

    def _sampling(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        return VLLMSamplingParams(
            max_tokens=request.remaining,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=None if sampling.greedy else sampling.seed,
            stop_token_ids=sorted(stops),
            ignore_eos=True,  # the tokens that end a sequence are all in stop_token_ids
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _deliver(self, output: Any) -> None:
        ticket = self._tickets.pop(output.request_id, None)
        if ticket is None or not output.finished:
            return
        (result,) = output.outputs
        if result.finish_reason not in ("stop", "length"):
            raise RolloutError(
                f"request {ticket.request.request_id!r}: vLLM ended it with reason {result.finish_reason!r}"
            )
        self._answer(ticket, result.token_ids, result.logprobs, result.finish_reason)

    def _answer(self, ticket: _Ticket, token_ids: Sequence[int], log_probs: Any, reason: FinishReason) -> None:
        values = [] if log_probs is None else [log_probs.logprobs[start] for start in log_probs.start_indices]
        sampled = Completion(list(token_ids), values, reason, self._version)
        ticket.call.deliver(ticket.index, with_partial(ticket.request, sampled))

    def _abort_unwanted(self, keys: Iterable[str]) -> None:
        keys = set(keys)
        self._unwanted -= keys
        waiting = [item for item in self._inbox if item[1].request_id in keys]
        self._inbox = [item for item in self._inbox if item[1].request_id not in keys]
        for ticket, request in waiting:
            self._tickets.pop(request.request_id, None)
            self._answer(ticket, [], None, "abort")
        states = self.engine.output_processor.request_states
        running = {state.external_req_id: state for state in states.values() if state.external_req_id in keys}
        for key, state in running.items():
            if key in self._tickets:  # else another rank answers it
                tokens, log_probs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                self._answer(self._tickets.pop(key), tokens, log_probs, "abort")
        if running:
            self.engine.abort_request(sorted(running))

    def _fail(self, error: Exception) -> None:
        calls = {id(ticket.call): ticket.call for ticket in self._tickets.values()}
        self._forget_all()
        for call in calls.values():
            call.fail(error)

    def _forget_all(self) -> None:
        keys = list({state.external_req_id for state in self.engine.output_processor.request_states.values()})
        self._tickets.clear()
        self._inbox.clear()
        self._unwanted.clear()
        if keys:
            self.engine.abort_request(keys)

    def _check_request(self, request: GenerationRequest) -> None:
        check_request(
            request,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            image_tokens=self.image_tokens,
        )
        sampling = request.sampling
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise RolloutError(
                f"request {request.request_id!r}: temperature={sampling.temperature} is below vLLM's smallest, "
                f"{_LOWEST_TEMPERATURE}; use 0 (greedy) or at least that"
            )

    def _require_idle(self, what: str, error: type[VerlError]) -> None:
        if self._tickets or self.engine.has_unfinished_requests():
            raise error(f"{what}: {len(self._tickets)} requests are in flight; await them or abort() them first")

    # -- memory

    async def sleep(self, *, level: int | None = None) -> None:
        """Give back the memory of the cache and of the weights.

        Args:
            level: 1 keeps the weights' values (on GPUs in the host's memory, on CPUs where they are), 2 drops them,
                and the next wake needs an update first. None drops them when they can be read from the training
                engine again, and else keeps them.

        Raises:
            RolloutError: requests are in flight.
        """
        if level not in (None, 1, 2):
            raise RolloutError(f"sleep: level={level}; use 1 (keep the weights' values), 2 (drop them) or None")
        self._require_idle("sleep", RolloutError)
        self._awake.clear()
        if level == 2:
            self._live = None
        self._release(keep_weights=level == 1 or (level is None and not self._can_reload()))
        if level == 2 and "weights" not in self._resident:
            self._complete = False

    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        """Make ready again, weights before the cache; see :meth:`RolloutEngine.wake`.

        Raises:
            RolloutError: the weights were dropped and the training engine's have changed since.
        """
        wanted = parts_of(parts)
        self._make_resident(wanted)
        self._awake.update(wanted)

    def memory(self) -> RolloutMemory:
        """Bytes held now, on the engine's device and by this rank."""
        cache, weights = self._rpc("verl_memory")
        if weights is None:  # vLLM does not say what converted weights take
            weights = self.manifest.nbytes // (1 if self._group is None else dist.get_world_size(self._group))
        return RolloutMemory(
            kv_cache=cache if "kv_cache" in self._resident else 0,
            owned_weights=weights if "weights" in self._resident else 0,
            aliased_weights=0,
        )

    def _release(self, *, keep_weights: bool) -> None:
        """Free what is held; ``_resident`` keeps what could not be freed."""
        self._drop_cache(RolloutError)
        if self.device.type == "cpu":
            if "kv_cache" in self._resident and self._rpc("verl_release_cache"):
                self._resident.discard("kv_cache")
            if "weights" in self._resident and not keep_weights and self._rpc("verl_release_weights"):
                self._resident.discard("weights")
                self._values = False
        elif self.frees_memory and self._resident:
            if len(self._resident) < len(MEMORY_PARTS):  # vLLM goes to sleep as a whole
                self.engine.wake_up([part for part in MEMORY_PARTS if part not in self._resident])
            self.engine.sleep(level=1 if keep_weights else 2)
            self._resident.clear()
            self._values &= keep_weights

    def _make_resident(self, parts: Iterable[MemoryPart], *, restore: bool = True) -> None:
        for part in parts:
            if part in self._resident:
                continue
            if self.device.type != "cpu":
                self.engine.wake_up([part])
            elif part == "kv_cache":
                self._rpc("verl_restore_cache")
            if part == "weights" and restore and self._complete and not self._values:
                self._reload()
            self._resident.add(part)

    def _can_reload(self) -> bool:
        return self._complete and self._live is not None and all(item.unchanged for item in self._live.values())

    def _reload(self) -> None:
        """Read the training engine's weights again after they were dropped here."""
        if not self._can_reload():
            self._complete = False
            raise RolloutError(
                f"the weights of version {self._version} were given back and the training engine's have changed since; "
                "sync the new ones (sync_weights) before generating"
            )
        self._read_base()
        _, adapter = split_adapter(self._live_tensors())
        if adapter:
            self._rpc("verl_begin_adapter")
            self._rpc("verl_load_adapter", adapter)

    def _read_base(self) -> None:
        """Bring the training engine's base weights into memory that has lost their values."""
        weights, _ = split_adapter(self._live_tensors())
        self._rpc("verl_begin_update")
        self._rpc("verl_load", weights)
        self._rpc("verl_end_update")
        self._values = True

    def _live_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, item.tensor) for name, item in (self._live or {}).items()]

    # -- weights

    @property
    def needs_base_weights(self) -> bool:
        """See :meth:`RolloutEngine.needs_base_weights`: not while the base weights are here, or can be read again."""
        if self._values:
            return False
        return self._live is None or not all(
            item.unchanged for name, item in self._live.items() if not is_adapter_name(name)
        )

    async def begin_update(self, version: int) -> None:
        """Start to receive weights; see :meth:`RolloutEngine.begin_update`."""
        self._require_idle("begin_update", WeightSyncError)
        if self._next_version is not None:
            raise WeightSyncError(f"the update to version {self._next_version} is still running; end it first")
        self._make_resident(["weights"], restore=False)
        self._awake.add("weights")
        self._complete = False
        self._arriving = {}
        self._begun = set()
        self.manifest.begin()
        self._next_version = version
        if not self.supports_lora_update:
            self._begin("weights")

    def _begin(self, part: str) -> None:
        """Make room for what begins to arrive: the weights, or the adapter."""
        if part in self._begun:
            return
        self._begun.add(part)
        if part == "weights":
            self._values, self._live = False, None
        self._rpc("verl_begin_update" if part == "weights" else "verl_begin_adapter")

    async def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool = True) -> None:
        """Take some of the weights; see :meth:`RolloutEngine.load`."""
        if self._next_version is None:
            raise WeightSyncError("weights arrived outside of an update; call begin_update first")
        try:
            arrived = list(self.manifest.accept(bucket, live=live))
            weights, adapter = split_adapter(arrived)
            if weights:
                self._begin("weights")
                self._rpc("verl_load", weights)
            if adapter:
                self._begin("adapter")
                self._rpc("verl_load_adapter", adapter)
        except BaseException as error:
            self._cancel_update()
            if isinstance(error, VerlError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"vLLM did not take the weights: {type(error).__name__}: {error}") from error
        if not live:
            self._arriving = None
        elif self._arriving is not None:
            self._arriving.update({name: LiveWeight.of(tensor) for name, tensor in arrived})

    def shard_views(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None:
        """This rank's share of the weights; see :meth:`RolloutEngine.shard_views`."""
        if self._next_version is None:
            raise WeightSyncError("weights are written outside of an update; call begin_update first")
        self._begin("weights")
        parts: dict[str, list[WeightPart]] | None = self._rpc("verl_parts", list(names))
        return parts

    def mark_loaded(self, names: Iterable[str]) -> None:
        """See :meth:`RolloutEngine.mark_loaded`."""
        self.manifest.note(names)
        self._arriving = None

    async def end_update(self) -> None:
        """Finish the update; see :meth:`RolloutEngine.end_update`."""
        if self._next_version is None:
            raise WeightSyncError("no weight update is running; call begin_update first")
        version = self._next_version
        try:
            new_base = "weights" in self._begun
            self.manifest.end(adapter_only=self.supports_lora_update and not new_base and not self.needs_base_weights)
            self._drop_cache(WeightSyncError)
            if new_base:
                self._rpc("verl_end_update")
                self._values = True
            elif not self._values:
                self._read_base()
        except BaseException:
            self._cancel_update()
            raise
        self._next_version = None
        if new_base:
            self._live = self._arriving
        elif self._live is not None:
            self._live = None if self._arriving is None else self._live | self._arriving
        self._complete = True
        self._version = version

    def _drop_cache(self, error: type[VerlError]) -> None:
        """Forget the keys and values of all prompts. vLLM says no while anything still holds blocks.

        Raises:
            VerlError: of the given type: they are still there.
        """
        if self.engine.reset_prefix_cache() or self.engine.reset_prefix_cache(reset_running_requests=True):
            return
        raise error(
            "vLLM kept keys and values of older weights: blocks of its cache are still held; leave out settings of "
            "rollout.engine_kwargs.vllm, or set rollout.enable_prefix_caching=False"
        )

    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per weight of this rank's part; see :meth:`RolloutEngine.checksums`."""
        digests: dict[str, str] = self._rpc("verl_digests", source)
        return digests

    def _cancel_update(self) -> None:
        self._next_version = None
        if "weights" in self._begun:
            self._rpc("verl_cancel_update")

    # -- vLLM

    def _rpc(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, which lives in this process; arguments are passed by reference."""
        (result,) = self.engine.collective_rpc(method, args=arguments)
        return result

    def _check_head_size(self) -> None:
        """vLLM's CPU attention has fixed head sizes and says so only when it runs."""
        if self.device.type != "cpu" or self.engine.model_config.use_mla:
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, served = self.engine.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if size not in served:
            raise ConfigError(
                f"the model's attention heads have {size} values; on CPUs vLLM serves {', '.join(map(str, served))}: "
                "set actor_rollout_ref.rollout.name=hf"
            )


def _parallel_group() -> dist.ProcessGroup | None:
    """The group of ranks that share the weights; None when this rank has them alone."""
    from vllm.distributed.parallel_state import get_tp_group

    group: Any = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def _with_seed(request: GenerationRequest, key: str) -> GenerationRequest:
    """The request under the engine's own name; ranks that share the weights must draw the same seed."""
    sampling = request.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(62))
    return replace(request, sampling=sampling, request_id=key)
