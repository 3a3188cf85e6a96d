"""The built-in rollout engine: generation inside the training process, on the policy's own weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch

from verl.errors import ConfigError, RolloutError, VerlError, WeightSyncError
from verl.models.decoder import compile_dense_parts, decoder_layers
from verl.models.families import must_verify, named_failures, require_agreement
from verl.models.probe import LONGEST, ProbeRow, make_probe, plain_log_probs
from verl.models.shape import cached_token_bytes
from verl.models.vision import ImageTokens
from verl.utils.device import empty_cache, get_torch_device
from verl.utils.distributed import get_world_size
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.hf.kv_budget import CacheBudget
from verl.workers.rollout.hf.kv_cache import RolloutCache
from verl.workers.rollout.hf.packed_linears import PackedLinears, packing_supported
from verl.workers.rollout.hf.runner import BatchRunner, FinishedSequence
from verl.workers.rollout.hf.scheduler import Scheduler, Sequence
from verl.workers.rollout.hf.weights import ModuleWeights, build_module
from verl.workers.rollout.lora import adapter_for
from verl.workers.rollout.pausing import Call, PauseController, check_ready, check_request, parts_of, with_partial
from verl.workers.rollout.settings import resolve_dtype, special_tokens, unsampled_of
from verl.workers.rollout.types import (
    MEMORY_PARTS,
    Completion,
    GenerationRequest,
    MemoryPart,
    RolloutMemory,
    SamplingParams,
    WeightPart,
)

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

#: fewer full-length sequences at a time than this are worth a warning
_FEW_ROWS = 8
#: tokens sampled behind each probe row
_VERIFIED_TOKENS = 8


class HFRolloutEngine(RolloutEngine):
    """Batched generation with any Hugging Face causal language model, and with images where those are read.

    The module's parameters are the training engine's own tensors wherever dtype and device allow it, so a weight
    update costs no memory. On CPUs large matrices are packed for the time of a generation phase
    (``rollout.pack_weights``). All work runs in the caller's thread and event loop; between tokens the loop gets a
    turn, so requests may arrive while others are running.

    Args:
        model_config: the ``model`` section; ``path`` holds the model's configuration.
        rollout_config: the ``rollout`` section.
        device: ``"cpu"`` or ``"cuda"``.
        tokenizer: the policy's tokenizer, for its end-of-sequence and padding tokens; loaded from the model's
            directory when None and there is one.

    Raises:
        ConfigError: the model cannot be served, or an option has no meaning here.
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
        self.model_type: str = config.model_type
        text_config = config.get_text_config()
        lora = adapter_for(model_config, rollout_config)
        self.supports_lora_update = lora is not None
        self.module = build_module(
            config, self.dtype, self.device, trust_remote_code=model_config.trust_remote_code, lora=lora
        )
        self.weights = ModuleWeights(self.module, self.dtype, self.device)
        compiled = rollout_config.enforce_eager is False
        if compiled:
            compile_dense_parts(decoder_layers(self.module, []))
        # the compiler does not know packed products
        self.packed = None if compiled else self._packed_linears(rollout_config.pack_weights)
        self.max_model_len: int | None = rollout_config.max_model_len or None
        self._row_tokens = int(rollout_config.prompt_length) + int(rollout_config.response_length)
        self._warned_of_memory = False
        self._memory_share = float(getattr(rollout_config, "gpu_memory_utilization", 0.5) or 0.5)
        bookkeeping = 8 + 4 + 8 + self.dtype.itemsize  # RowState
        with named_failures(config, "sizing its key-value cache"):
            self._bytes_per_token = cached_token_bytes(config, self.dtype.itemsize) + bookkeeping
        directory = resolve_model_dir(model_config.path, use_shm=model_config.use_shm)
        eos, pad = special_tokens(model_config, directory, config, tokenizer)
        self.pad_token_id = pad
        self.cache = RolloutCache(text_config.num_hidden_layers)
        self.cache_budget = CacheBudget()
        vocabulary = int(self.module.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._unsampled = unsampled_of(model_config, vocabulary, tokenizer)
        self.runner = BatchRunner(
            self.module,
            self.cache,
            self.cache_budget,
            device=self.device,
            dtype=self.dtype,
            eos_token_ids=eos,
            vocab_size=self.module.get_input_embeddings().weight.shape[0],  # type: ignore[operator]
            max_prefill_tokens=int(getattr(rollout_config, "max_num_batched_tokens", None) or 8192),
            image_tokens=ImageTokens.of(config),
            unsampled=self._unsampled,
        )
        self.scheduler = Scheduler(int(rollout_config.max_num_seqs), self.cache_budget)
        self._look = False  # there may be room that was not there before
        self.pauses = PauseController("hf", self.runner.vocab_size)
        self._awake: set[MemoryPart] = set(MEMORY_PARTS)
        self._version = -1
        self._next_version: int | None = None
        self._calls: dict[int, Call] = {}
        self._driver: asyncio.Task[None] | None = None
        self._check_room(self._cached_tokens_limit())
        self._unverified = must_verify(model_config, config)
        self._config = config

    def _packed_linears(self, wanted: bool | None) -> PackedLinears | None:
        """What packs the weights while generating, if they are to be packed."""
        supported = packing_supported(self.dtype, self.device)
        if wanted and not supported:
            raise ConfigError(
                f"rollout.pack_weights=True: there are no kernels for packed {self.dtype} weights on this "
                f"{self.device.type} device; leave it out"
            )
        return PackedLinears(self.module) if supported and wanted is not False else None

    # -- serving

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first complete update."""
        return self._version

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion unless ``ignore_eos`` is set."""
        return self.runner.eos_token_ids

    async def generate_many(self, requests: Seq[GenerationRequest]) -> list[Completion]:
        """Serve requests together, in the order given. Equal prompts are prefilled once."""
        return await self.pauses.run(self._serve, requests)

    async def _serve(self, requests: list[GenerationRequest]) -> list[Completion]:
        if not requests:
            return []
        check_ready(updating=self._next_version is not None, complete=self.weights.complete, awake=self._awake)
        for request in requests:
            check_request(
                request,
                vocab_size=self.runner.vocab_size,
                max_model_len=self.max_model_len,
                image_tokens=self.runner.image_tokens,
            )
        loop = asyncio.get_running_loop()
        call = Call(len(requests), loop.create_future())

        def deliver_to(index: int) -> Any:
            return lambda completion: call.deliver(index, completion)

        if self.packed is not None:
            self.packed.pack()
        if not self.scheduler.waiting and not self.runner.running:
            self.cache_budget.tokens = self._cached_tokens_limit()
        sequences = [Sequence(request, deliver_to(index)) for index, request in enumerate(requests)]
        self._check_lengths(sequences)
        self.scheduler.add(sequences)
        self._look = True
        self._calls[id(call)] = call
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return await call.future
        except asyncio.CancelledError:
            mine = {id(sequence) for sequence in sequences}
            self._abort(lambda sequence: id(sequence) in mine)
            raise
        finally:
            self._calls.pop(id(call), None)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now; they complete with the tokens so far and reason ``"abort"``."""
        wanted = None if request_ids is None else set(request_ids)
        self.pauses.abort(wanted)
        self._abort(lambda sequence: wanted is None or sequence.request.request_id in wanted)

    async def halt(self) -> None:
        """End what is being computed; see :meth:`RolloutEngine.halt`."""
        self._abort(lambda sequence: True)

    def _abort(self, unwanted: Any) -> None:
        for sequence in self.scheduler.remove(unwanted):
            self._deliver(sequence, sequence.completion([], [], "abort"))
        for sequence, completion in self.runner.abort(unwanted):
            self._look = True
            self._deliver(sequence, completion)

    async def _drive(self) -> None:
        """Run until nothing is left. Whatever goes wrong is raised by the calls in flight."""
        before = self.counters()
        try:
            while self.scheduler.waiting or self.runner.running:
                for sequence, completion in self._advance():
                    self._look = True
                    self.cache_budget.ended(len(completion.token_ids) + sequence.request.sampled, sequence.limit)
                    self._deliver(sequence, completion)
                await asyncio.sleep(0)
            self._log_preemptions(before)
        except Exception as error:  # noqa: BLE001 - raised again by every call in flight
            self._fail(error)
        except BaseException:  # cancelled with its loop: nobody waits any more
            self._forget_all()
            raise

    def _advance(self) -> list[FinishedSequence]:
        finished: list[FinishedSequence] = []
        if self.scheduler.waiting and (self._look or not self.runner.running):
            self._look = False
            if groups := self.scheduler.admit(self.runner.progress()):
                finished += self.runner.admit(groups)
        if self.runner.running:
            self.scheduler.put_back(self.runner.make_columns())
            finished += self.runner.step()
        return finished

    def counters(self) -> dict[str, int]:
        """See :meth:`RolloutEngine.counters`."""
        return {"preemptions": self.runner.preemptions, "recomputed_tokens": self.runner.recomputed_tokens}

    def _log_preemptions(self, before: Mapping[str, int]) -> None:
        preemptions, tokens = (value - before[name] for name, value in self.counters().items())
        if preemptions:
            logger.info(
                "the key-value cache of %d tokens was full: %d samples made room for others and were continued later, "
                "for which %d tokens were computed again. rollout.gpu_memory_utilization gives it more memory",
                self.cache_budget.tokens,
                preemptions,
                tokens,
            )

    def _deliver(self, sequence: Sequence, completion: Completion) -> None:
        sequence.deliver(with_partial(sequence.request, replace(completion, policy_version=self._version)))

    def _fail(self, error: Exception) -> None:
        calls = list(self._calls.values())
        self._forget_all()
        self.cache.release()  # it may hold values that are not finite
        self.runner.release()
        for call in calls:
            call.fail(error)

    def _forget_all(self) -> None:
        self.scheduler.remove(lambda sequence: True)
        self.runner.reset()

    # -- memory

    async def sleep(self) -> None:
        """Give back the cache and own copies of weights; aliased weights cost nothing and stay."""
        self._require_idle("sleep", RolloutError)
        self.runner.release()
        self._drop_packed()
        self.weights.release()
        self._awake.clear()
        empty_cache(self.device)

    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        """Make ready again; the cache's memory is taken when the first batch needs it."""
        wanted = parts_of(parts)
        if "weights" in wanted and "weights" not in self._awake:
            self.weights.restore()
        self._awake.update(wanted)

    def _drop_packed(self) -> None:
        if self.packed is not None:
            self.packed.drop()

    def memory(self) -> RolloutMemory:
        """Bytes held now, on the engine's device."""
        owned, aliased = self.weights.nbytes()
        if self.packed is not None:
            owned += self.packed.nbytes
        return RolloutMemory(kv_cache=self.cache.nbytes(), owned_weights=owned, aliased_weights=aliased)

    def _check_room(self, tokens: int) -> None:
        """One sample of full length must fit into the cache.

        Raises:
            ConfigError: it does not.
        """
        if tokens < self._row_tokens:
            raise ConfigError(
                f"rollout.gpu_memory_utilization={self._memory_share:g}: this share of the free memory holds keys and "
                f"values of {tokens} tokens, and one sample may have prompt_length + response_length = "
                f"{self._row_tokens}; raise it, free memory, or lower the lengths"
            )

    def _check_lengths(self, sequences: Iterable[Sequence]) -> None:
        """The same for the samples of a call and the memory that is free now."""
        tokens = self.cache_budget.tokens
        for sequence in sequences:
            if tokens is not None and sequence.total_length > tokens:
                raise RolloutError(
                    f"request {sequence.request.request_id!r} may have {sequence.total_length} tokens, and the "
                    f"key-value cache holds {tokens}; raise rollout.gpu_memory_utilization="
                    f"{self._memory_share:g}, free memory, or lower max_tokens"
                )

    def _cached_tokens_limit(self) -> int:
        """Tokens whose keys and values fit into ``gpu_memory_utilization`` of the free memory.

        Training shares the device: what its weights and optimizer hold is not free, whatever the total is.
        """
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            ranks = 1
        else:  # the other ranks of this machine look at the same free memory
            free = psutil.virtual_memory().available
            ranks = get_world_size()
        budget = (free + self.cache.nbytes()) * self._memory_share / ranks
        tokens = max(1, int(budget) // self._bytes_per_token)
        if tokens < _FEW_ROWS * self._row_tokens and not self._warned_of_memory:
            self._warned_of_memory = True
            logger.warning(
                "memory for the key-value cache holds %d tokens, %.1f sequences of %d: generation will be slow. "
                "%.1f GiB are free, of which %.0f%% may be used (rollout.gpu_memory_utilization); param_offload and "
                "optimizer_offload free memory while generating",
                tokens,
                tokens / self._row_tokens,
                self._row_tokens,
                free / 2**30,
                100 * self._memory_share,
            )
        return tokens

    # -- weights

    @property
    def needs_base_weights(self) -> bool:
        """See :meth:`RolloutEngine.needs_base_weights`."""
        return not self.weights.base_held

    async def begin_update(self, version: int) -> None:
        """Start to receive weights; see :meth:`RolloutEngine.begin_update`."""
        self._require_idle("begin_update", WeightSyncError)
        if self._next_version is not None:
            raise WeightSyncError(f"the update to version {self._next_version} is still running; end it first")
        self._drop_packed()
        # no restore of released copies: the update overwrites every one of them, or ends with it (an adapter alone)
        self._awake.add("weights")
        self.weights.begin()
        self._next_version = version

    async def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool = True) -> None:
        """Take some of the weights; see :meth:`RolloutEngine.load`."""
        try:
            self.weights.load(bucket, live=live)
        except BaseException:
            self._next_version = None
            self.weights.cancel()
            raise

    def shard_views(self, names: Iterable[str]) -> dict[str, list[WeightPart]]:
        """Every weight whole, in memory of the engine's own; see :meth:`RolloutEngine.shard_views`."""
        if self._next_version is None:
            raise WeightSyncError("weights are written outside of an update; call begin_update first")
        return self.weights.parts(names)

    def mark_loaded(self, names: Iterable[str]) -> None:
        """See :meth:`RolloutEngine.mark_loaded`."""
        self.weights.note(names)

    async def end_update(self) -> None:
        """Finish the update; see :meth:`RolloutEngine.end_update`."""
        version, self._next_version = self._next_version, None
        self.weights.end()
        assert version is not None
        self._version = version
        if self._unverified and self._awake == set(MEMORY_PARTS):
            self._unverified = False
            with named_failures(self._config, "generating with rollout.name=hf"):
                self._verify()

    def _verify(self) -> None:
        """Compare log-probabilities of a few samples with plain Transformers on the same weights.

        Raises:
            ConfigError: they differ.
        """
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None) or LONGEST
        probe = make_probe(
            self._config, excluded=self._unsampled, longest=min(LONGEST, int(positions) - _VERIFIED_TOKENS)
        )
        allowed = torch.ones(self.runner.vocab_size, dtype=torch.bool)
        allowed[list(self._unsampled)] = False
        self.cache_budget.tokens = self._cached_tokens_limit()
        found: dict[int, Completion] = {}
        settings = SamplingParams(_VERIFIED_TOKENS, seed=0, ignore_eos=True)
        for number, row in enumerate(probe.rows):
            request = GenerationRequest(list(row.token_ids), settings, f"probe-{number}")
            self.scheduler.add([Sequence(request, partial(found.__setitem__, number))])
        try:
            while self.scheduler.waiting or self.runner.running:
                for sequence, completion in self._advance():
                    sequence.deliver(completion)
        finally:
            self._forget_all()
            self.cache.release()
            self.runner.release()
        rows = tuple(
            ProbeRow(row.kind, (*row.token_ids, *found[number].token_ids), len(row.token_ids))
            for number, row in enumerate(probe.rows)
        )
        require_agreement(
            [torch.tensor(found[number].log_probs) for number in range(len(rows))],
            plain_log_probs(self.module, rows, allowed=allowed, device=self.device),  # type: ignore[arg-type]
            replace(probe, rows=rows),
            model_type=self.model_type,
            what="log-probabilities of rollout.name=hf",
            dtype=self.dtype,
            remedy=lambda: "Use rollout.name=vllm or sglang; model.verify=never generates with it all the same",
        )

    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per weight; see :meth:`RolloutEngine.checksums`."""
        return self.weights.checksums(source)

    def _require_idle(self, what: str, error: type[VerlError]) -> None:
        in_flight = self.scheduler.waiting + self.runner.running
        if in_flight:
            raise error(f"{what}: {in_flight} requests are in flight; await them or abort() them first")
