"""The built-in reward function: picks the scorer by ``data_source``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from verl.errors import ConfigError, DataError
from verl.rewards import (
    code,
    countdown,
    dapo_math,
    geometry3k,
    gsm8k,
    ifeval,
    math,
    multiple_choice,
    reasoning_gym,
    search_qa,
)
from verl.rewards.references import reads_reference, rule_of

Scorer = Callable[..., Any]
"""Takes (solution_str, ground_truth); those of :data:`WITH_ROW` also ``extra_info``."""

SCORERS: dict[str, Scorer] = {
    # the number after ####
    "openai/gsm8k": gsm8k.compute_score,
    "gsm8k": gsm8k.compute_score,
    # the boxed answer
    "lighteval/MATH": math.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math.compute_score,
    "HuggingFaceH4/MATH-500": math.compute_score,
    "hendrycks/competition_math": math.compute_score,
    "EleutherAI/hendrycks_math": math.compute_score,
    "agentica-org/DeepScaleR-Preview-Dataset": math.compute_score,
    "math": math.compute_score,
    "math_verify": math.compute_score_symbolic,
    # +1 or -1
    "math_dapo": dapo_math.compute_score,
    "math_dapo_reasoning": dapo_math.compute_score,
    "BytedTsinghua-SIA/DAPO-Math-17k": dapo_math.compute_score,
    "hiyouga/geometry3k": geometry3k.compute_score,
    "geometry3k": geometry3k.compute_score,
    # programs
    "codecontests": code.compute_score,
    "deepmind/code_contests": code.compute_score,
    "apps": code.compute_score,
    "codeparrot/apps": code.compute_score,
    "codeforces": code.compute_score,
    "taco": code.compute_score,
    "BAAI/TACO": code.compute_score,
    "livecodebench": code.compute_score,
    "humaneval": code.compute_score,
    "openai/openai_humaneval": code.compute_score,
    "mbpp": code.compute_score,
    "google-research-datasets/mbpp": code.compute_score,
    # letters
    "multiple_choice": multiple_choice.compute_score,
    "cais/mmlu": multiple_choice.compute_score,
    "TIGER-Lab/MMLU-Pro": multiple_choice.compute_score,
    "Idavidrein/gpqa": multiple_choice.compute_score,
    "allenai/ai2_arc": multiple_choice.compute_score,
    "allenai/openbookqa": multiple_choice.compute_score,
    "tau/commonsense_qa": multiple_choice.compute_score,
    # rules
    "google/IFEval": ifeval.compute_score,
    "Jiayi-Pan/Countdown-Tasks-3to4": countdown.compute_score,
    "reasoning_gym": reasoning_gym.compute_score,
}
"""Scorer of each known ``data_source``."""

PREFIXES: dict[str, Scorer] = {
    "final_answer/": gsm8k.compute_score,
    "aime": dapo_math.compute_score,
    "amc": math.compute_score,
    "numina_": math.compute_score,
    "code/": code.compute_score,
    "mmlu": multiple_choice.compute_score,
    "gpqa": multiple_choice.compute_score,
    "searchr1_": search_qa.compute_score,
    "countdown": countdown.compute_score,
    "ifeval": ifeval.compute_score,
    "reasoning_gym/": reasoning_gym.compute_score,
}
"""Scorers of whole families of sources: of every ``data_source`` that starts so, in lower case."""

WITH_ROW = frozenset({ifeval.compute_score})
"""Scorers that also read the row's ``extra_info``."""


def scorer_of(data_source: str) -> Scorer:
    """The rule that a data source is known for.

    Raises:
        ConfigError: none is known.
    """
    scorer = SCORERS.get(data_source)
    if scorer is None:
        name = str(data_source).lower()
        scorer = next((by_family for prefix, by_family in PREFIXES.items() if name.startswith(prefix)), None)
    if scorer is None:
        known = ", ".join([*SCORERS, *(f"{prefix}*" for prefix in PREFIXES)])
        raise ConfigError(
            f"no built-in scorer for data_source={data_source!r}; set custom_reward_function.path to a Python file "
            f"with a function compute_score(data_source, solution_str, ground_truth, extra_info), or use one of: "
            f"{known}"
        )
    return scorer


def read_reference(ground_truth: Any, extra_info: Mapping[str, Any], data_source: Any, **_: Any) -> Any:
    """The reference as the rule of the row's data source reads it.

    Raises:
        DataError: no rule is known for the data source, or the reference is not what the rule needs.
    """
    try:
        scorer = scorer_of(data_source)
    except ConfigError as error:
        raise DataError(str(error)) from None
    rule = rule_of(scorer)
    if rule is None:
        return ground_truth
    try:
        return rule(ground_truth, extra_info, data_source)
    except DataError as error:
        raise DataError(f"data_source={data_source!r}: {error}") from None


@reads_reference(read_reference)
def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    *,
    sandbox: Mapping[str, Any] | None = None,
) -> Any:
    """Score a response with the rule that its data source is known for.

    Args:
        data_source: name of the data set, one of :data:`SCORERS` or of a family in :data:`PREFIXES`.
        solution_str: the response's text.
        ground_truth: the right answer, as the rule wants it.
        extra_info: the row's further columns.
        sandbox_fusion_url: where programs are run; not given = on this machine.
        concurrent_semaphore: held while a program is run.
        memory_limit_mb: of programs, in MiB.
        sandbox: further arguments of :func:`verl.rewards.code.compute_score`.

    Returns:
        A number, or a mapping with ``score``.

    Raises:
        ConfigError: no rule is known for the data source.
    """
    scorer = scorer_of(data_source)
    if scorer is reasoning_gym.compute_score:
        return scorer(solution_str, extra_info, data_source)
    if scorer is code.compute_score:
        options = dict(sandbox or {})
        if sandbox_fusion_url:
            options["url"] = sandbox_fusion_url
        if memory_limit_mb:
            options["memory_limit_mb"] = memory_limit_mb
        with concurrent_semaphore or nullcontext():
            return scorer(solution_str, ground_truth, extra_info, **options)
    if scorer in WITH_ROW:
        return scorer(solution_str, ground_truth, extra_info)
    return scorer(solution_str, ground_truth)
