"""Probe rows: a few rows of token ids that any difference between two forms of one model has to show on.

The rows are longer than every window, chunk and top-k of the model's configuration, at any depth of it. They have
ragged lengths and a common prompt, so that packing has something to do, and the padding token inside a row. Three
functions make a comparison of them:

- :func:`make_probe` makes the rows from a Transformers configuration,
- :func:`plain_log_probs` gives their log-probabilities in plain Transformers: eager attention, one row at a time, no
  padding, no cache, and a float32 softmax,
- :func:`compare` finds the largest difference of two such results and says whether it is rounding.

The signatures of these functions and the fields of their results are stable: the start-up check of the training
engines and ``verl selftest`` both build on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl.errors import ConfigError

#: rows are never longer than this: windows of more tokens are named as not reached
LONGEST = 4608
#: a row goes this many tokens behind the last limit
_BEHIND = 8
_SHORTEST = 24

# Values that count tokens. What ends otherwise (max_window_layers, sliding_window_pattern, norm_topk_prob) does not.
_SPANS = re.compile(
    r"(^|_)(sliding_window|sliding_window_size|window_size|attention_window|local_attention|attention_chunk_size|"
    r"chunk_size|chunk_length|block_size|local_blocks|index_topk|index_top_k|conv_kernel|conv_kernel_size|"
    r"conv_kernel_dim|d_conv|l_cache|conv_window|lag|floor_scale|"
    r"max_local_position|context_left|left_context|swa_window|keep_window_size)s?$",
    re.IGNORECASE,
)
# Lengths that matter only where rotary embeddings or the scale of attention change with what is read.
_ROTARY_SPANS = {
    "dynamic": re.compile(r"(^|_)max_position_embeddings$"),
    "longrope": re.compile(r"(^|_)original_max_position_embeddings$"),
    "scaled": re.compile(r"(^|_)original_max_position_embeddings$"),
}
_SCALED_BY_LENGTH = re.compile(r"(scaling_beta|attn_temperature_tuning)$")
# Top-k over blocks or compressed tokens: it reaches the product of both.
_BLOCK_TOPK = re.compile(r"(index_topk_blocks|index_topk|index_top_k|topk_blocks)$")
_BLOCK_SIZE = re.compile(r"(index_block_size|compress_ratio|compress_rate|compress_ratios|compress_rates)s?$")
_SPECIAL = re.compile(r"(_token_id|_token_ids|_token_index|_token_indices|_tokens_ids)$")


@dataclass(frozen=True)
class Limit:
    """A number of tokens from which on a model may compute differently.

    Attributes:
        name: where the configuration has it, such as ``text_config.sliding_window``.
        tokens: the number.
    """

    name: str
    tokens: int


@dataclass(frozen=True)
class ProbeRow:
    """One row.

    Attributes:
        kind: what is particular about it, for messages: ``"long"``, ``"padding token inside"``, ``"short"``, ...
        token_ids: prompt and response.
        prompt_length: tokens of the prompt; at least 1.
    """

    kind: str
    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def response_length(self) -> int:
        """Tokens whose log-probabilities are compared."""
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class Probe:
    """Rows to compare a model with itself.

    Attributes:
        rows: the rows; the first two have the same prompt.
        reached: limits of the configuration that a row's response goes beyond.
        not_reached: limits that no row reaches, because rows of that length would cost too much.
    """

    rows: tuple[ProbeRow, ...]
    reached: tuple[Limit, ...] = ()
    not_reached: tuple[Limit, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)

    def batch(self, pad_token_id: int = 0) -> dict[str, Tensor]:
        """The rows as a training batch: prompts padded on the left, responses on the right.

        Args:
            pad_token_id: the number at padding, which nothing may depend on.
        """
        left = max(row.prompt_length for row in self.rows)
        right = max(row.response_length for row in self.rows)
        ids = torch.full((len(self.rows), left + right), pad_token_id)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(self.rows):
            start = left - row.prompt_length
            ids[number, start : start + len(row.token_ids)] = torch.tensor(row.token_ids)
            mask[number, start : start + len(row.token_ids)] = 1
        return {
            "prompts": ids[:, :left].clone(),
            "responses": ids[:, left:].clone(),
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask[:, left:].clone(),
        }

    def split(self, values: Tensor) -> list[Tensor]:
        """Results (rows, R) of :meth:`batch` as one tensor per row, without padding."""
        return [values[number, : row.response_length] for number, row in enumerate(self.rows)]


def token_limits(config: PreTrainedConfig) -> tuple[Limit, ...]:
    """The numbers of tokens in a configuration, from the smallest to the largest, each value once.

    Read at any depth of the text model's part: windows, chunks, top-k of sparse attention (times the size of a block
    or the rate of compression, where the choice is among blocks), kernels of convolutions, original lengths of rotary
    embeddings, lengths from which attention is scaled.
    """
    values = config.get_text_config().to_dict()
    by_length = [_ROTARY_SPANS[kind] for kind in sorted(_length_kinds(values))]
    found: dict[int, str] = {}
    chosen: list[int] = []
    sizes: list[int] = [1]
    for name, value in _numbers(values):
        leaf = re.sub(r"(\.\d+)+$", "", name).rpartition(".")[2]
        if value > 1 and (_SPANS.search(leaf) or any(span.search(leaf) for span in by_length)):
            found.setdefault(value, name)
        if _BLOCK_TOPK.search(leaf):
            chosen.append(value)
        if _BLOCK_SIZE.search(name.rpartition(".")[0] or name) or _BLOCK_SIZE.search(leaf):
            sizes.append(value)
    for k in chosen:
        if (product := k * max(sizes)) > 1:
            found.setdefault(product, f"top-k {k} of blocks of {max(sizes)}")
    return tuple(Limit(name, tokens) for tokens, name in sorted(found.items()))


def _length_kinds(values: Any) -> set[str]:
    """In which ways rotary embeddings or the scale of attention change with the length, by a configuration's values."""
    if not isinstance(values, Mapping):
        return set()
    kinds = {str(values.get(key)) for key in ("rope_type", "type")} & set(_ROTARY_SPANS)
    if any(value and _SCALED_BY_LENGTH.search(str(key)) for key, value in values.items()):
        kinds.add("scaled")
    return kinds.union(*map(_length_kinds, values.values()))


def _numbers(values: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Whole numbers at any depth of a mapping, with their dotted names."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _numbers(value, f"{name}.{number}")
    elif isinstance(values, int) and not isinstance(values, bool):
        yield name, values


def make_probe(
    config: PreTrainedConfig,
    *,
    vocab_size: int | None = None,
    pad_token_id: int | None = None,
    excluded: Collection[int] = (),
    seed: int = 0,
    longest: int = LONGEST,
) -> Probe:
    """Rows for a model; equal arguments give equal rows.

    Args:
        config: of the model; its text model is read.
        vocab_size: tokens are below this; None: the configuration's.
        pad_token_id: goes inside a row; None: the configuration's, or token 0.
        excluded: tokens that no row has, such as those without text. Placeholders of images and sounds, which the
            configuration names, are left out in any case.
        seed: of the draw.
        longest: no row has more tokens. Limits beyond are listed as not reached.

    Raises:
        ConfigError: fewer than two tokens are left to draw from.
    """
    text = config.get_text_config()
    size = int(vocab_size or text.vocab_size)
    pad = pad_token_id
    if pad is None:
        stated = getattr(text, "pad_token_id", None)
        pad = stated if isinstance(stated, int) and 0 <= stated < size else 0
    places = getattr(text, "max_position_embeddings", None)
    if isinstance(places, int) and places > 1 and not getattr(text, "rope_parameters", None):  # learned positions
        longest = min(longest, places)
    limits = token_limits(config)
    reached = tuple(limit for limit in limits if limit.tokens + 2 <= longest)
    largest = max((limit.tokens for limit in reached), default=0)
    length = min(max(largest + max(_BEHIND, largest // 8), _SHORTEST), longest)

    special = {value for part in (config, text) for value in _special_tokens(part)} | set(excluded)
    drawn_from = [token for token in range(size) if token not in special and token != pad]
    if len(drawn_from) < 2:
        raise ConfigError(f"a vocabulary of {size} tokens without {len(special)} special ones leaves nothing to probe")
    choices = torch.tensor(drawn_from)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return choices[torch.randint(len(choices), (count,), generator=generator)].tolist()

    prompt_length = max(1, min(2 * length // 3, length - _BEHIND))
    prompt = draw(prompt_length)
    long_row = prompt + draw(length - prompt_length)
    # A padding token after the first response token, twice in a row, and as the last one (where pad is eos).
    padded = prompt + draw(length - prompt_length - 1)
    for place in (prompt_length + 1, prompt_length + 3, prompt_length + 4, len(padded) - 1):
        if prompt_length < place < len(padded):
            padded[place] = pad
    middle = draw(max(6, length // 2 - 1))
    middle[len(middle) // 3] = pad  # in the prompt
    short = draw(5)
    rows = (
        ProbeRow("long", tuple(long_row), prompt_length),
        ProbeRow("padding token inside the response, prompt of the first row", tuple(padded), prompt_length),
        ProbeRow("padding token inside the prompt", tuple(middle), max(1, len(middle) // 2)),
        ProbeRow("short", tuple(short), 2),
    )
    beyond = {limit for limit in reached if limit.tokens < length}
    return Probe(
        rows,
        tuple(limit for limit in limits if limit in beyond),
        tuple(limit for limit in limits if limit not in beyond),
    )


def _special_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """Tokens that a configuration gives a meaning to."""
    for name, value in config.to_dict().items():
        if _SPECIAL.search(name) and name != "pad_token_id":
            for token in value if isinstance(value, list | tuple) else [value]:
                if isinstance(token, int) and not isinstance(token, bool):
                    yield token


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Within the context a model computes attention with its own plain code, ``eager``.

    Transformers' ``sdpa`` is no reference: it silently leaves out what a family adds to attention, such as the soft cap
    of Gemma 2.

    Args:
        model: a Transformers model, or a module that holds some.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before: dict[int, tuple[Any, Any]] = {}
    for part in models:
        for config in _configs(part.config):
            if id(config) not in before:
                before[id(config)] = (config, config._attn_implementation_internal)
                config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _configs(part)


@torch.no_grad()
def plain_log_probs(
    model: PreTrainedModel,
    rows: Sequence[ProbeRow],
    *,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Log-probabilities of each row's response in plain Transformers.

    The model's own ``forward`` runs to its logits, one row at a time and without padding, in the numeric type that the
    model has and in evaluation mode; softmax is float32.

    Args:
        model: a causal language model; its parameters stay as they are.
        rows: of :func:`make_probe`.
        temperature: divides the logits.
        allowed: (V,) bool, tokens that may be sampled; the probabilities of the others are 0. None: all.
        device: of the input; None: that of the parameters.

    Returns:
        For each row (response_length,) float32 on the CPU.
    """
    if device is None:
        device = next(model.parameters()).device
    training = model.training
    model.eval()
    results = []
    try:
        with plain_attention(model):
            for row in rows:
                ids = torch.tensor(row.token_ids, device=device)[None]
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
                logits = logits[0, row.prompt_length - 1 : -1].float() / temperature
                if allowed is not None:
                    logits = logits.masked_fill(~allowed.to(device), float("-inf"))
                log_p = torch.log_softmax(logits, -1)
                results.append(log_p.gather(1, ids[0, row.prompt_length :, None])[:, 0].cpu())
    finally:
        model.train(training)
    return results


@dataclass(frozen=True)
class Tolerance:
    """Differences that are rounding.

    Attributes:
        largest: of a single token.
        mean: of all tokens of a row.
    """

    largest: float
    mean: float


#: numeric type of the less exact side -> what is rounding; log-probabilities are absolute, so these are too
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-6, 1e-7),
    torch.float32: Tolerance(2e-4, 2e-5),
    torch.float16: Tolerance(0.1, 0.01),
    torch.bfloat16: Tolerance(0.5, 0.06),
}


@dataclass(frozen=True)
class Comparison:
    """The largest difference of two sets of numbers for the same rows.

    Attributes:
        difference: the largest one; infinite where a number is not finite on one side only.
        mean: the largest mean of a row.
        row: number of the row with the largest difference.
        position: place of the token in that row, its prompt included.
        kind: of that row.
        got, want: the two numbers there.
        tolerance: what counts as rounding.
    """

    difference: float
    mean: float
    row: int
    position: int
    kind: str
    got: float
    want: float
    tolerance: Tolerance

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding."""
        return self.difference <= self.tolerance.largest and self.mean <= self.tolerance.mean

    def __str__(self) -> str:
        where = f"row {self.row} ({self.kind}), token {self.position}"
        return f"{self.got:.6g} instead of {self.want:.6g}, a difference of {self.difference:.2g}, at {where}"


def compare(
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    rows: Sequence[ProbeRow],
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: Tolerance | None = None,
) -> Comparison:
    """Compare numbers of the same rows, such as log-probabilities of their responses.

    Args:
        got: of each row (response_length,).
        want: the same, of what is trusted.
        rows: what the numbers belong to.
        dtype: of the less exact computation.
        tolerance: what counts as rounding; None: what ``dtype`` allows.

    Raises:
        ValueError: the numbers of a row are not as many as its response has tokens.
    """
    worst = (-1.0, 0, 0)
    mean = 0.0
    for number, (one, other, row) in enumerate(zip(got, want, rows, strict=True)):
        if one.shape != other.shape or len(one) != row.response_length:
            raise ValueError(
                f"row {number} has {row.response_length} response tokens, but numbers {tuple(one.shape)} are compared "
                f"with {tuple(other.shape)}"
            )
        if not len(one):
            continue
        a, b = one.detach().double().cpu(), other.detach().double().cpu()
        error = torch.where(a == b, torch.zeros_like(a), (a - b).abs()).nan_to_num(nan=math.inf)
        place = int(error.argmax())
        mean = max(mean, float(error.mean()))
        if float(error[place]) > worst[0]:
            worst = (float(error[place]), number, place)
    difference, number, place = worst
    row = rows[number]
    return Comparison(
        difference=max(difference, 0.0),
        mean=mean,
        row=number,
        position=row.prompt_length + place,
        kind=row.kind,
        got=float(got[number][place]),
        want=float(want[number][place]),
        tolerance=tolerance or TOLERANCES[dtype],
    )
