"""The built-in engine's sampler inside SGLang.

SGLang's own sampler reports log-probabilities before top-k, top-p and min-p, and honours seeds only together with
batch-invariant GPU kernels. With this one both engines draw the same tokens from the same logits and seeds, and report
the same log-probabilities. It runs in SGLang's scheduler process, on the scheduler's device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from verl.workers.rollout.sampler import SamplingBatch, process_logits, sample
from verl.workers.rollout.uniforms import GOLDEN, mix

#: SGLang's name for the sampler that this one takes the place of; on CPUs SGLang allows no other name
BACKEND = "pytorch"
#: name of a request's repetition penalty in SGLang's ``custom_params``
PENALTY = "verl_repetition_penalty"

_SIGN = 1 << 63


# ---------------------------------------------------------------------------- random numbers


def stream_start(seed: int, prompt_length: int) -> int:
    """What goes to SGLang as a request's ``sampling_seed``.

    SGLang's sampler knows a token's position in the sequence, the built-in engine counts a completion's tokens. The
    start is moved by the prompt's length, so that both read the same number for the same token.

    Args:
        seed: of the completion, in [0, 2**64).
        prompt_length: tokens of the prompt.

    Returns:
        a signed 64-bit integer.
    """
    start = int(mix(np.asarray(seed, dtype=np.uint64))) + (2 - prompt_length) * int(GOLDEN)
    return _signed(start)


def uniforms_at(starts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The numbers of :func:`verl.workers.rollout.uniforms.uniforms` for one token of each row.

    Args:
        starts: (B,) int64 from :func:`stream_start`.
        positions: (B,) positions of the tokens that the next ones follow.

    Returns:
        (B,) float64 in [0, 1).
    """
    state = _mix(starts + positions.long() * _signed(int(GOLDEN)))
    return _shifted(state, 11).double() * 2.0**-53


def _mix(state: torch.Tensor) -> torch.Tensor:
    """:func:`verl.workers.rollout.uniforms.mix` on int64, whose products wrap around as they must."""
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >= _SIGN else value


def seed_of_name(name: str) -> int:
    """A seed for a request that brings none; every tensor-parallel rank finds the same one."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))


# ---------------------------------------------------------------------------- in SGLang


def settings_of(info: Any, vocabulary: int) -> SamplingBatch:
    """The settings of a batch of SGLang's requests.

    SGLang turns temperature 0 into top-k 1; such rows are greedy, with log-probabilities at temperature 1.

    Args:
        info: SGLang's ``SamplingBatchInfo``.
        vocabulary: number of logits per row.
    """
    greedy = (info.top_ks <= 1) if info.is_any_greedy else None

    def drawn(values: torch.Tensor, neutral: float) -> torch.Tensor:
        values = values.view(-1)
        return (values if greedy is None else values.masked_fill(greedy, neutral)).unsqueeze(1)

    limited = info.max_top_k is not None and greedy is None
    return SamplingBatch(
        greedy=greedy,
        all_greedy=bool(info.is_all_greedy),
        temperature=drawn(info.temperatures, 1.0),
        top_k=drawn(info.top_ks.long(), vocabulary) if info.need_top_k_sampling else None,
        max_top_k=info.max_top_k if limited else vocabulary,
        top_p=drawn(info.top_ps, 1.0) if info.need_top_p_sampling else None,
        min_p=drawn(info.min_ps, 0.0) if info.need_min_p_sampling else None,
        repetition_penalty=None,  # the logits have it already
    )


def replace_sampler(unsampled: Callable[[int], Sequence[int]]) -> None:
    """Let SGLang in this process sample with this sampler under ``sampling_backend=pytorch``.

    Args:
        unsampled: size of the vocabulary -> tokens that are never sampled.
    """
    from sglang.srt.layers.sampler import register_sampler_backend

    register_sampler_backend(BACKEND, lambda: _make_sampler(unsampled))


def deliver_seeds() -> None:
    """Hand the seeds of requests to the sampler; SGLang does so only for batch-invariant kernels."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def adjusted_from_schedule_batch(self: Any, batch: Any, vocab_size: int) -> None:
        original(self, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        self.sampling_seed = torch.tensor(
            [
                seed_of_name(request.rid) if seed is None else seed
                for seed, request in zip(seeds, batch.reqs, strict=True)
            ],
            dtype=torch.int64,
        ).to(self.device)

    original = SamplingBatchInfo.adjusted_from_schedule_batch
    SamplingBatchInfo.adjusted_from_schedule_batch = adjusted_from_schedule_batch


def penalise_prompts() -> None:
    """Let SGLang's repetition penalty count the prompt's tokens too, and take any value (it stops at 2)."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer as Penalizer

    def penalties(self: Any) -> list[float]:
        own = [(request.sampling_params.custom_params or {}).get(PENALTY) for request in self.orchestrator.reqs()]
        plain = [request.sampling_params.repetition_penalty for request in self.orchestrator.reqs()]
        return [value if mine is None else float(mine) for mine, value in zip(own, plain, strict=True)]

    def is_required(self: Any) -> bool:
        return any(value != 1.0 for value in penalties(self))

    def prepare_penalties(self: Any) -> None:
        prepare(self)
        values = torch.tensor(penalties(self), dtype=torch.float32, device=self.orchestrator.device)
        self.repetition_penalties = values.unsqueeze(1)
        for row, (request, value) in enumerate(zip(self.orchestrator.reqs(), values, strict=True)):
            there = [*request.origin_input_ids, *request.output_ids]
            self.cumulated_repetition_penalties[row, torch.tensor(there, device=values.device)] = value

    prepare = Penalizer._prepare
    Penalizer._is_required, Penalizer._prepare = is_required, prepare_penalties


def _make_sampler(unsampled: Callable[[int], Sequence[int]]) -> Any:
    from sglang.srt.layers.sampler import Sampler

    class VerlSampler(Sampler):
        never: torch.Tensor | None = None

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[Any],
            positions: torch.Tensor,
            **_: Any,
        ) -> torch.Tensor:
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            if self.never is None:
                self.never = torch.tensor(unsampled(logits.shape[1]), dtype=torch.long, device=logits.device)
            if len(self.never):
                logits = logits.index_fill(-1, self.never, float("-inf"))
            settings = settings_of(sampling_info, logits.shape[1])
            tokens, log_probs = sample(logits, settings, uniforms_at(sampling_info.sampling_seed, positions))
            if return_logprob:
                if any(top_logprobs_nums) or any(token_ids_logprobs):  # not asked for by the rollout engine
                    table = process_logits(logits.float(), settings).log_softmax(dim=-1)
                    result = self.output_logprob_processor.compute_logprobs(
                        table, top_logprobs_nums, token_ids_logprobs, tokens
                    )
                    result.write_output_to(logits_output)
                logits_output.next_token_logprobs = log_probs
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens.to(torch.int32)

    return VerlSampler()
