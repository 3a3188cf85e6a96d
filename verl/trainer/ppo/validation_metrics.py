"""Summary of a validation run: mean, best and worst of n, pass@k and majority vote over each prompt's samples."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Up to this many subsets, every one is counted; beyond, this many are drawn.
MAX_SUBSETS = 1000


def expected_best(values: Sequence[float], n: int) -> float:
    """Expected largest of ``n`` values drawn without replacement: the unbiased "best of n" (pass@n for 0/1 values).

    Sorted ascending, the value at rank k (from 0) is the largest of C(k, n - 1) of the C(N, n) subsets.
    """
    ordered = sorted(values)
    n = min(n, len(ordered))
    weighted = math.fsum(value * math.comb(rank, n - 1) for rank, value in enumerate(ordered))
    return weighted / math.comb(len(ordered), n)


def expected_worst(values: Sequence[float], n: int) -> float:
    """Expected smallest of ``n`` values drawn without replacement."""
    return -expected_best([-value for value in values], n)


def pass_at_k(total: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is right: ``1 - C(total - correct, k) / C(total, k)``.

    The unbiased estimate from ``total`` samples of which ``correct`` are right (Chen et al. 2021, arXiv:2107.03374);
    ``k`` beyond ``total`` counts as ``total``.
    """
    k = min(k, total)
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def majority_value(answers: Sequence[str], values: Sequence[float]) -> float:
    """Mean value of the most frequent answer; answers that tie for most frequent share equally.

    A sample without an answer (an empty text) has no vote; where nobody has one, all count.
    """
    grouped: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, values, strict=True):
        if answer or not any(answers):
            grouped[answer].append(value)
    most = max(len(group) for group in grouped.values())
    winners = [math.fsum(group) / len(group) for group in grouped.values() if len(group) == most]
    return math.fsum(winners) / len(winners)


def expected_majority(answers: Sequence[str], values: Sequence[float], n: int, rng: np.random.Generator) -> float:
    """Expected :func:`majority_value` of ``n`` samples drawn without replacement.

    Exact when there are at most :data:`MAX_SUBSETS` subsets, otherwise the mean over that many random ones.
    """
    pairs = sorted(zip(answers, values, strict=True))  # the order of the samples must not matter to the draw
    n = min(n, len(pairs))
    subsets: Iterable[Sequence[int]]
    if math.comb(len(pairs), n) <= MAX_SUBSETS:
        subsets = itertools.combinations(range(len(pairs)), n)
    else:
        subsets = rng.permuted(np.tile(np.arange(len(pairs)), (MAX_SUBSETS, 1)), axis=1)[:, :n].tolist()
    results = [majority_value([pairs[i][0] for i in subset], [pairs[i][1] for i in subset]) for subset in subsets]
    return math.fsum(results) / len(results)


def _sizes(n: int) -> list[int]:
    """2, 4, 8, ... below ``n``, and ``n``."""
    return [*(2**k for k in range(1, n.bit_length()) if 2**k < n), n] if n > 1 else []


def _number(value: Any) -> float | None:
    """``value`` as a float, ``None`` for text, missing and NaN values."""
    if isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating):
        number = float(value)
        return None if math.isnan(number) else number
    return None


def _answer(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def _prompt_metrics(
    values: Sequence[float], answers: Sequence[str] | None, n: int, rng: np.random.Generator, *, verdict: bool
) -> dict[str, float]:
    """Metrics of one variable over one prompt's samples.

    Args:
        values: of the samples that have one.
        answers: what they voted for.
        n: the number of samples that was asked for.
        rng: draws subsets where there are too many.
        verdict: the variable says right (1) or wrong (0).
    """
    array = np.asarray(values, dtype=np.float64)
    metrics = {f"mean@{n}": float(array.mean())}
    if n > 1:
        metrics[f"std@{n}"] = float(array.std())
    for size in _sizes(n):
        metrics[f"best@{size}"] = expected_best(values, size)
        metrics[f"worst@{size}"] = expected_worst(values, size)
        if answers is not None:
            metrics[f"maj@{size}"] = expected_majority(answers, values, size, rng)
    for size in [1, *_sizes(n)] if verdict and n > 1 else []:
        metrics[f"pass@{size}"] = pass_at_k(len(values), round(sum(values)), size)
    return metrics


class ValidationRecord:
    """Collects batches of samples; the summary does not depend on how they were cut into batches."""

    def __init__(self) -> None:
        self.data_sources: list[str] = []
        self.uids: list[str] = []
        self._columns: dict[str, list[Any]] = {}

    def add(self, data_sources: Sequence[str], uids: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
        """Append a batch; a variable that only some batches report is missing in the others.

        Raises:
            ValueError: lists of different lengths.
        """
        before, count = len(self.uids), len(uids)
        for name, column in {"data_sources": data_sources, **values}.items():
            if len(column) != count:
                raise ValueError(f"{name} has {len(column)} entries for {count} samples; give one per sample")
        self.data_sources += list(data_sources)
        self.uids += list(uids)
        for name, column in values.items():
            self._columns.setdefault(name, [None] * before).extend(column)
        for column in self._columns.values():
            column += [None] * (before + count - len(column))

    def metrics(self, seed: int = 42) -> dict[str, float]:
        """:func:`process_validation_metrics` of all that was added."""
        return process_validation_metrics(self.data_sources, self.uids, self._columns, seed)


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, float]:
    """Summarise validation samples by data source.

    For each numeric variable (``reward``, ``acc``, whatever the reward function returns) and each prompt with N
    samples: ``mean@N``, and for N > 1 ``std@N``, ``best@n`` and ``worst@n`` for n = 2, 4, ... N, and ``maj@n`` when
    the reward function returns the parsed answers as ``pred`` (``None`` or an empty text: no answer, no vote). A
    variable that is 0 or 1 everywhere, such as ``acc``, then also has the unbiased ``pass@k``, k = 1, 2, 4, ... N.
    Prompts of a data source then average.

    ``best`` and ``worst`` are exact expectations over subsets without replacement, so ``best@N`` is the largest of
    the N; ``maj`` is exact up to 1000 subsets and otherwise drawn from ``seed``. Values that are missing (``None``,
    NaN: the reward function abstained) are left out; N still counts them.

    Args:
        data_sources: data source of each sample.
        sample_uids: prompt of each sample.
        infos_dict: values by variable, one per sample.
        seed: of the random subsets.

    Returns:
        ``val-core/<data_source>/<variable>/{mean,maj,best}@N`` for the main variable (``acc`` if there is one, else
        ``reward``) at its largest N, and everything else below ``val-aux/``.

    Raises:
        ValueError: lists of different lengths.
    """
    count = len(data_sources)
    for name, column in {"sample_uids": sample_uids, **infos_dict}.items():
        if len(column) != count:
            raise ValueError(f"{name} has {len(column)} entries for {count} samples; give one per sample")

    rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of[str(source)][uid].append(row)
    numbers = {name: [_number(value) for value in column] for name, column in infos_dict.items()}
    preds = infos_dict.get("pred")

    metrics: dict[str, float] = {}
    for source, prompts in rows_of.items():
        collected: dict[tuple[str, str], list[float]] = defaultdict(list)
        verdicts = {
            name
            for name, column in numbers.items()
            if all(column[row] in (None, 0.0, 1.0) for rows in prompts.values() for row in rows)
        }
        for ordinal, rows in enumerate(prompts.values()):
            for name, column in numbers.items():
                kept = [(row, value) for row in rows if (value := column[row]) is not None]
                # A prediction is an answer to vote on, also when it looks like a number; it is not a measurement.
                if not kept or name == "pred":
                    continue
                answers = None if preds is None else [_answer(preds[row]) for row, _ in kept]
                rng = np.random.default_rng([seed, ordinal])
                values = [value for _, value in kept]
                summary = _prompt_metrics(values, answers, len(rows), rng, verdict=name in verdicts)
                for stat, value in summary.items():
                    collected[name, stat].append(value)
        core = "acc" if any(name == "acc" for name, _ in collected) else "reward"
        largest = max(len(rows) for rows in prompts.values())
        for (name, stat), of_prompts in collected.items():
            is_core = name == core and stat in {f"{kind}@{largest}" for kind in ("mean", "maj", "best")}
            section = "val-core" if is_core else "val-aux"
            metrics[f"{section}/{source}/{name}/{stat}"] = math.fsum(of_prompts) / len(of_prompts)
    return metrics
