"""Checks of the rollout engine: what it samples, from which distribution, and how a sample ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.protocol import DataProto
from verl.selftest.certificate.bench import Bench
from verl.selftest.certificate.engines import MAX_TOKENS
from verl.selftest.certificate.outcome import TEMPERATURE, TRANSFORMERS, Measure
from verl.selftest.certificate.rows import pad_rows
from verl.selftest.compare import Deviation
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.batch import batch_from_completions
from verl.workers.rollout.types import Completion

SAMPLING, FILTERS, AGREEMENT, STOPS, VOCABULARY = (
    "sampling",
    "filters",
    "rollout = trainer",
    "stop tokens",
    "vocabulary",
)
#: what a probability may be off before it counts as on the other side of a filter's border
_BORDER = 1e-5
#: temperatures at which every token comes up; vLLM and SGLang take none above 2
_HOT = {"hf": 50.0}
_WARM = 2.0


def log_prob_measure(
    bench: Bench,
    check: str,
    case: str,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    want: Sequence[Tensor],
    against: str = TRANSFORMERS,
) -> Measure:
    """The sampled token whose log-prob is furthest from the reference."""
    allowed = bench.tolerances.log_probs
    worst, where, first = 0.0, "", ""
    for number, (completion, expected) in enumerate(zip(completions, want, strict=True)):
        if len(completion.log_probs) != len(completion.token_ids):
            return Measure(
                check,
                case,
                against,
                error=f"sample {number}: {len(completion.token_ids)} tokens, {len(completion.log_probs)} log-probs",
            )
        for place, (value, reference) in enumerate(zip(completion.log_probs, expected.tolist(), strict=True)):
            figure = 0.0 if value == reference else abs(value - reference)
            length = len(prompts[number])
            text = f"sample {number} (prompt of {length}), token {place}: {value:.6g} against {reference:.6g}"
            if not first and not figure <= allowed:
                first = text
            if not figure <= worst or not where:
                worst, where = figure, text
    return Measure(check, case, against, Deviation("log-probs", worst, allowed), first or where)


def sampling(bench: Bench) -> Iterator[Measure]:
    """The log-prob of every sampled token is that of plain Transformers at the temperature of sampling."""
    prompts = bench.rows.prompts
    for number, temperature in enumerate((TEMPERATURE, 1.0, 1.5, 0.0)):
        done = bench.generator.generate(prompts, seed=bench.seed + number, temperature=temperature, ignore_eos=True)
        # a greedy choice reports the log-prob at temperature 1
        want = [
            bench.plain.token_log_probs(prompt, item.token_ids, temperature or 1.0)
            for prompt, item in zip(prompts, done, strict=True)
        ]
        case = f"temperature {temperature:g}" if temperature else "greedy"
        yield log_prob_measure(bench, SAMPLING, case, prompts, done, want)
        if not temperature:
            yield _greedy(bench, prompts, done)


def _greedy(bench: Bench, prompts: Sequence[list[int]], done: Sequence[Completion]) -> Measure:
    """How much likelier the most likely token is than the greedy one."""
    worst, where = 0.0, ""
    for number, (prompt, item) in enumerate(zip(prompts, done, strict=True)):
        with torch.no_grad():
            log_p = bench.plain.distributions(prompt, item.token_ids, 1.0)
        margins = log_p.max(-1).values - bench.plain.of_tokens(log_p, item.token_ids)
        if not where or float(margins.max()) > worst:
            place = int(margins.argmax())
            worst, where = float(margins.max()), f"sample {number}, token {place}: token {item.token_ids[place]}"
    deviation = Deviation("margin of a likelier token", worst, bench.tolerances.log_probs)
    return Measure(SAMPLING, "greedy", TRANSFORMERS, deviation, where)


def filters(bench: Bench) -> Iterator[Measure]:
    """With top-p and top-k a log-prob is that of the filtered distribution, which is renormalised."""
    prompts = bench.rows.prompts
    for number, (top_k, top_p) in enumerate(((-1, 0.7), (5, 1.0), (7, 0.8))):
        done = bench.generator.generate(
            prompts, seed=bench.seed + 10 + number, temperature=TEMPERATURE, top_k=top_k, top_p=top_p, ignore_eos=True
        )
        want = []
        for prompt, item in zip(prompts, done, strict=True):
            with torch.no_grad():
                log_p = bench.plain.distributions(prompt, item.token_ids, TEMPERATURE).double().cpu()
                chosen = bench.plain.of_tokens(log_p.to(bench.device), item.token_ids).cpu()
            want.append(
                torch.tensor(
                    [
                        filtered(row, float(value), top_k, top_p, nearest=reported)
                        for row, value, reported in zip(log_p, chosen, item.log_probs, strict=True)
                    ]
                )
            )
        case = ", ".join([*([f"top_k {top_k}"] if top_k > 0 else []), *([f"top_p {top_p:g}"] if top_p < 1 else [])])
        yield log_prob_measure(bench, FILTERS, case, prompts, done, want)


def filtered(log_p: Tensor, value: float, top_k: int, top_p: float, *, nearest: float) -> float:
    """Log-prob of a token after top-k and top-p in the plainest form.

    Where a token stands on the border of a filter, both answers are right; the one nearer to ``nearest`` counts.

    Args:
        log_p: (V,) float64 log-probabilities before the filters.
        value: of the token, one of them.
        top_k: most likely tokens to keep; below 1 all.
        top_p: probability to keep.
        nearest: what an engine reports.
    """
    ordered = log_p.sort(descending=True).values
    answers = []
    kept = ordered[:top_k] if top_k > 0 else ordered
    kept = kept - torch.logsumexp(kept, 0)
    before = kept.exp().cumsum(0) - kept.exp()
    for border in {0.0, _BORDER, -_BORDER} if top_p < 1 else {0.0}:
        count = max(1, int((before < top_p + border).sum())) if top_p < 1 else len(kept)
        total = torch.logsumexp(ordered[:count], 0)
        # ties with the last token that is kept are kept too
        answers.append(value - float(total) if value >= float(ordered[count - 1]) - _BORDER else float("-inf"))
    return min(answers, key=lambda answer: abs(answer - nearest))


def agreement(bench: Bench) -> Iterator[Measure]:
    """The trainer computes the log-probs that the rollout engine reports, token by token, in the batch it is given."""
    prompts = bench.rows.prompts
    done = bench.generator.generate(prompts, seed=bench.seed + 20, temperature=TEMPERATURE)
    batch = rollout_batch(bench, prompts, done)
    lengths = [len(item.token_ids) for item in done]
    mask = batch["response_mask"]
    wrong = sum(int(got) != want for got, want in zip(mask.sum(-1), lengths, strict=True))
    yield bench.exact(AGREEMENT, "mask", "samples whose mask has another number of tokens", wrong)
    for layout, packed in bench.layouts.items():
        with bench.trainer.packed(packed):
            got = bench.trainer.forward(batch, MicroBatching(), TEMPERATURE)
        yield from bench.compare_outputs(
            AGREEMENT,
            layout,
            {"log_probs": got["log_probs"]},
            {"log_probs": batch["rollout_log_probs"]},
            against=f"rollout ({bench.setup.rollout})",
            mask=mask,
        )


def rollout_batch(bench: Bench, prompts: Sequence[list[int]], done: Sequence[Completion]) -> TensorDict:
    """Completions as the batch that a run trains on."""
    asked = pad_rows([(prompt, [bench.rows.pad]) for prompt in prompts], bench.rows.pad)
    tensors = {name: asked[name][:, :-1] for name in ("input_ids", "attention_mask", "position_ids")}
    made = batch_from_completions(DataProto.from_dict(tensors=tensors), done, MAX_TOKENS, bench.rows.pad)
    assert made.batch is not None
    return made.batch


def stop_tokens(bench: Bench) -> Iterator[Measure]:
    """A stop token ends a sample, belongs to it and to the mask; without one a sample has its full length."""
    prompts = bench.rows.prompts
    options: dict[str, Any] = {"seed": bench.seed + 30, "temperature": 1.2, "ignore_eos": True}
    free = bench.generator.generate(prompts, **options)
    bad = [
        number
        for number, item in enumerate(free)
        if len(item.token_ids) != MAX_TOKENS or item.finish_reason != "length"
    ]
    yield bench.exact(STOPS, "none", "samples that end early", len(bad), _samples(bad))
    if bad:
        return
    # every sample stops at a token that it is known to sample
    stops = [item.token_ids[MAX_TOKENS // 2] for item in free]
    stopped = bench.generator.generate(prompts, stops=stops, **options)
    batch = rollout_batch(bench, prompts, stopped)
    short, reasons, masks = [], [], []
    for number, (stop, before, done) in enumerate(zip(stops, free, stopped, strict=True)):
        expected = before.token_ids[: before.token_ids.index(stop) + 1]
        short += [] if done.token_ids == expected else [number]
        reasons += [] if done.finish_reason == "stop" and not bool(batch["overlong"][number]) else [number]
        masks += [] if int(batch["response_mask"][number].sum()) == len(expected) else [number]
    yield bench.exact(STOPS, "stop token", "samples that do not end with it", len(short), _samples(short))
    yield bench.exact(STOPS, "stop token", "samples with another finish reason", len(reasons), _samples(reasons))
    yield bench.exact(STOPS, "stop token", "samples whose mask leaves it out", len(masks), _samples(masks))
    yield from _end_of_sequence(bench)


def _end_of_sequence(bench: Bench) -> Iterator[Measure]:
    """The model's own end tokens stop a sample, wherever they are sampled."""
    ends = bench.special[0]
    known = getattr(bench.generator.engine, "eos_token_ids", None)
    if known is not None:
        missing = sorted(ends ^ frozenset(known))
        yield bench.exact(STOPS, "end tokens", "end tokens that the engine has otherwise", len(missing), str(missing))
    many = [prompt for prompt in bench.rows.prompts[1:] for _ in range(6)]
    done = bench.generator.generate(many, seed=bench.seed + 31, temperature=_HOT.get(bench.setup.rollout, _WARM))
    wrong = []
    for number, item in enumerate(done):
        at = next((place for place, token in enumerate(item.token_ids) if token in ends), None)
        expected = ("length", MAX_TOKENS) if at is None else ("stop", at + 1)
        if (item.finish_reason, len(item.token_ids)) != expected:
            wrong.append(number)
    stopped = sum(item.finish_reason == "stop" for item in done)
    where = _samples(wrong) or f"{stopped} of {len(done)} samples met one"
    yield bench.exact(STOPS, "end of sequence", "samples that do not end there, or end elsewhere", len(wrong), where)


def vocabulary(bench: Bench) -> Iterator[Measure]:
    """Tokens that the tokenizer does not have are never sampled, and rollout and trainer renormalise without them."""
    if bench.subject.tokenizer is None:
        yield Measure(VOCABULARY, "", reason="the directory has no tokenizer")
        return
    allowed = bench.allowed
    if allowed is None:
        yield Measure(VOCABULARY, "", reason=f"the tokenizer has all {bench.subject.vocabulary} tokens of the model")
        return
    prompts = [prompt for prompt in bench.rows.prompts[1:] for _ in range(6)]
    hot = _HOT.get(bench.setup.rollout, _WARM)
    done = bench.generator.generate(prompts, seed=bench.seed + 40, temperature=hot, ignore_eos=True)
    foreign = [
        (number, place, token)
        for number, item in enumerate(done)
        for place, token in enumerate(item.token_ids)
        if not bool(allowed[token])
    ]
    count = sum(len(item.token_ids) for item in done)
    where = f"sample {foreign[0][0]}, token {foreign[0][1]}: id {foreign[0][2]}" if foreign else f"{count} tokens"
    case = f"{int((~allowed).sum())} ids without text"
    yield bench.exact(VOCABULARY, case, "sampled tokens without text", len(foreign), where)
    if foreign:
        return
    want = [
        bench.plain.token_log_probs(prompt, item.token_ids, hot) for prompt, item in zip(prompts, done, strict=True)
    ]
    yield log_prob_measure(bench, VOCABULARY, "rollout", prompts, done, want, against=f"{TRANSFORMERS}, renormalised")
    got = bench.trainer.forward(bench.rows.batch, MicroBatching(), hot)
    expected = bench.plain.forward(bench.rows.batch, hot)
    yield from bench.compare_outputs(VOCABULARY, "trainer", got, expected, against=f"{TRANSFORMERS}, renormalised")


def _samples(numbers: Sequence[int]) -> str:
    return f"sample {', '.join(map(str, numbers[:5]))}" if numbers else ""
