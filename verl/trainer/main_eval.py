"""Score generated responses: ``python -m verl.trainer.main_eval key=value ...``.

    verl eval data.path=answers.parquet data.output_path=result.json
    verl eval data.path=answers.parquet custom_reward_function.path=reward.py metrics.k=[1,8]

For each data source: the mean score and the unbiased pass@k, with bootstrap confidence intervals over the prompts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.cli import parse_cli
from verl.config.generation import EvalConfig, MetricsConfig
from verl.errors import ConfigError, DataError, RewardError
from verl.utils.exit_status import exit_code, start_program
from verl.utils.fs import atomic_write_text, ensure_writable_dir
from verl.utils.json_text import dumps_json, write_json
from verl.utils.output import write_result

if TYPE_CHECKING:
    from verl.data.files import Rows
    from verl.rewards.function import ScoreFunction
    from verl.rewards.outcome import RewardOutcome

logger = logging.getLogger(__name__)

Result = dict[str, dict[str, Any]]


def evaluate(config: EvalConfig) -> Result:
    """Score every response and summarise.

    Returns:
        Data source (and ``all``, where there are several) -> ``prompts``, ``responses``, ``without_score``, and
        ``score`` and ``pass@k`` as ``{"mean": ..., "low": ..., "high": ...}``.

    Raises:
        DataError: a file or a row is not as it must be.
        RewardError: a response could not be scored and ``reward.on_error`` or ``on_timeout`` is ``stop``; or no
            response at all has a score.
    """
    from verl.data.files import Rows
    from verl.rewards.loading import configured_function

    config.check_files()
    data = config.data
    for key in ("output_path", "scores_path"):  # before the scores are worked out
        if path := getattr(data, key):
            ensure_writable_dir(Path(path).expanduser().absolute().parent, purpose=f"directory of data.{key}")
    rows = Rows(data.path, required=[data.response_key, data.data_source_key, data.reward_model_key])
    function = configured_function(config.reward)
    function.check_signature()
    calls, owners = _calls(rows, config, function)
    scores, passed = _score(calls, owners, rows, config, function)
    if data.scores_path:
        lines = (
            dumps_json({"row": row, "data_source": call["data_source"], "score": score}) + "\n"
            for row, call, score in zip(owners, calls, scores, strict=True)
        )
        atomic_write_text(data.scores_path, "".join(lines))
    by_source: dict[str, dict[int, list[int]]] = {}
    for place, (row, call) in enumerate(zip(owners, calls, strict=True)):
        by_source.setdefault(str(call["data_source"]), {}).setdefault(row, []).append(place)
    groups = dict(sorted(by_source.items()))
    if len(groups) > 1:
        groups["all"] = {row: places for prompts in by_source.values() for row, places in prompts.items()}
    result = {
        source: summarise(
            [[scores[p] for p in places] for places in prompts.values()],
            [[passed[p] for p in places] for places in prompts.values()],
            config.metrics,
        )
        for source, prompts in groups.items()
    }
    if data.output_path:
        write_json(data.output_path, result, indent=2)
    return result


def _calls(rows: Rows, config: EvalConfig, function: ScoreFunction) -> tuple[list[dict[str, Any]], list[int]]:
    """What the reward function is called with, and the row of each call.

    Raises:
        DataError: rows or their references are not as the function needs them; names all of them.
    """
    from verl.data import forms
    from verl.data.row_gate import Column, Problems, RowGate
    from verl.rewards.references import row_problem

    data = config.data
    read = {"responses": data.response_key, "source": data.data_source_key, "reference": data.reward_model_key}
    forms_of = {"responses": forms.texts, "source": forms.source, "reference": forms.mapping}
    gate = RowGate(
        rows,
        [
            *(Column(column, forms_of[name], required=True, into=f"__{name}__") for name, column in read.items()),
            Column("extra_info", forms.extra_info, into="__extra_info__"),
        ],
    )
    calls: list[dict[str, Any]] = []
    owners: list[int] = []
    problems = Problems()
    for number, row in gate.passed(range(len(rows)), problems):
        if row is None:
            continue
        origin, reference, extra = row["__source__"], row["__reference__"], row.get("__extra_info__") or {}
        if problem := row_problem(function.reference_problem, origin, reference, extra):
            keys = f"columns {data.data_source_key!r} and {data.reward_model_key!r}"
            problems.add(DataError(f"{rows.place(number)}, {keys}: {problem}"))
            continue
        for text in row["__responses__"]:
            calls.append(
                {
                    "data_source": origin,
                    "solution_str": text,
                    "ground_truth": reference.get("ground_truth"),
                    "extra_info": dict(extra),
                }
            )
            owners.append(number)
    problems.stop()
    return calls, owners


def _score(
    calls: list[dict[str, Any]], owners: list[int], rows: Rows, config: EvalConfig, function: ScoreFunction
) -> tuple[list[float | None], list[bool | None]]:
    """Score of each response and whether it passes; None where the function abstained or failed by policy."""
    from verl.rewards.loading import scoring_options
    from verl.rewards.make_scorer import make_scorer
    from verl.rewards.missing_scores import Action, resolve
    from verl.rewards.outcome import checked_score

    options = scoring_options(config.reward)
    scorer = make_scorer(function, options)
    try:
        outcomes: list[RewardOutcome] = scorer.score(calls)
    finally:
        scorer.close()
    for owner, outcome in zip(owners, outcomes, strict=True):
        if outcome.fatal or options.action(outcome.kind) is Action.STOP:
            key = options.key(outcome.kind)
            raise RewardError(
                f"{rows.place(owner)}: {outcome.message.strip()}\n(reward.{key}=penalise or drop_sample goes on)"
            )
    scores = resolve(outcomes, [str(owner) for owner in owners], options)
    if scores and all(score is None for score in scores):
        told = outcomes[0].message.strip().rpartition("\n")[2]  # the error, below its traceback
        first = told or "the reward function returned no score"
        raise RewardError(
            f"none of the {len(scores)} responses has a score, so there is nothing to report; {rows.place(owners[0])}: "
            f"{first}"
        )
    threshold = config.metrics.threshold
    passed: list[bool | None] = []
    for owner, score, outcome in zip(owners, scores, outcomes, strict=True):
        verdict = outcome.extra.get("acc", score)
        passed.append(
            None
            if score is None
            else checked_score(verdict, f"{rows.place(owner)}: the reward function, as acc,") >= threshold
        )
    return scores, passed


def summarise(
    scores: Sequence[Sequence[float | None]], passed: Sequence[Sequence[bool | None]], config: MetricsConfig
) -> dict[str, Any]:
    """Numbers of one data source.

    Args:
        scores: for each prompt, the score of each response; None does not count.
        passed: the same, whether the response passes.
        config: k, confidence, resamples.
    """
    from verl.trainer.ppo.validation_metrics import pass_at_k

    kept = [[s for s in prompt if s is not None] for prompt in scores]
    verdicts = [[bool(p) for p in prompt if p is not None] for prompt in passed]
    most = max((len(prompt) for prompt in kept), default=0)
    result: dict[str, Any] = {
        "prompts": len(scores),
        "responses": sum(map(len, scores)),
        "without_score": sum(len(prompt) for prompt in scores) - sum(map(len, kept)),
    }
    means = [sum(prompt) / len(prompt) for prompt in kept if prompt]
    if not means:
        return result
    result["score"] = interval(means, config)
    for k in config.k or [2**i for i in range(most.bit_length()) if 2**i <= most]:
        enough = [v for v in verdicts if len(v) >= k]
        if not enough:
            raise ConfigError(f"metrics.k={k}: no prompt has so many scored responses; the most is {most}")
        result[f"pass@{k}"] = interval([pass_at_k(len(v), sum(v), k) for v in enough], config)
    return result


def interval(values: Sequence[float], config: MetricsConfig) -> dict[str, float]:
    """Mean over prompts with a percentile bootstrap interval: prompts are what a test set samples."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(config.seed)
    means = [float(array[rng.integers(0, len(array), len(array))].mean()) for _ in range(config.resamples)]
    tail = (1 - config.confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def table(result: Result, confidence: float) -> str:
    """The result for people."""
    lines = [f"mean over prompts [{confidence:.0%} confidence interval]"]
    for source, numbers in result.items():
        lines.append(f"{source}: {numbers['prompts']} prompts, {numbers['responses']} responses")
        if numbers["without_score"]:
            lines.append(f"  {numbers['without_score']} responses have no score")
        for name, value in numbers.items():
            if isinstance(value, dict):
                lines.append(f"  {name:<10} {value['mean']:.4f}  [{value['low']:.4f}, {value['high']:.4f}]")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit code 0 when done, 2 for a bad configuration or bad input, 1 for a failure."""
    start_program()
    config = parse_cli(EvalConfig, "evaluation", argv)

    def work() -> bool:
        result = evaluate(config)
        shown = table(result, config.metrics.confidence)
        if config.data.output_path:
            sys.stdout.write(shown)
            logger.info("the result is in %s", Path(config.data.output_path))
        else:
            write_result(shown)
        return True

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
