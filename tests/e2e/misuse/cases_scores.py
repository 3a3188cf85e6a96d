"""References that no answer can equal, and reward functions that end, leave or confuse a run."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.misuse.case import Case, Place


def _rows(*references: Any, source: str = "openai/gsm8k", column: str | None = None) -> Any:
    """Write rows with these references, each twice as many as a batch needs."""

    def prepare(place: Place) -> None:
        rows = []
        for number in range(16):
            reference = references[number % len(references)]
            row: dict[str, Any] = {"data_source": source, "prompt": [{"role": "user", "content": "ab"}]}
            row["reward_model"] = {"style": "rule", "ground_truth": reference}
            if column is not None:
                row[column] = row.pop("reward_model")
            rows.append(row)
        (place.tmp / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        answers = [{**row, "responses": ["#### 1"]} for row in rows]
        (place.tmp / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))

    return prepare


def _reward(body: str) -> Any:
    """Write a reward function."""

    def prepare(place: Place) -> None:
        head = "import math, os\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        (place.tmp / "reward.py").write_text(f"{head}    {body}\n")

    return prepare


BUILT_IN = ["custom_reward_function.path=None!", "data.train_files={tmp}/rows.jsonl", "data.val_files={tmp}/rows.jsonl"]
OWN = ["custom_reward_function.path={tmp}/reward.py"]
EVAL = ["custom_reward_function.path=None!", "data.path={tmp}/answers.jsonl"]

#: a run that has begun says in its directory what ran
BEGUN = ["*", ".*"]

CASES = [
    Case(
        "a reference that is null",
        "train",
        BUILT_IN,
        prepare=_rows("1", None),
        words=["rows.jsonl", "line 2", "reward_model"],
    ),
    Case(
        "a reference that is NaN",
        "train",
        BUILT_IN,
        prepare=_rows(5.0, float("nan")),
        words=["rows.jsonl", "line 2", "reference is missing"],
    ),
    Case("an empty reference", "train", BUILT_IN, prepare=_rows("  "), words=["line 1", "reference is missing"]),
    Case("a list with a gap", "train", BUILT_IN, prepare=_rows(["1", None]), words=["line 1", "ground_truth[1]"]),
    Case(
        "a reference without a number",
        "train",
        BUILT_IN,
        prepare=_rows("seven"),
        words=["line 1", "'seven' is no number"],
    ),
    Case("a truth value as reference", "train", BUILT_IN, prepare=_rows(True), words=["line 1", "True (bool)"]),
    Case(
        "a choice that does not exist",
        "train",
        BUILT_IN,
        prepare=_rows("1", source="cais/mmlu"),
        words=["line 1", "is not a choice"],
    ),
    Case(
        "countdown without numbers",
        "train",
        BUILT_IN,
        prepare=_rows({"target": 3}, source="countdown"),
        words=["line 1", "needs 'target' and 'numbers'"],
    ),
    Case(
        "an instruction that no rule knows",
        "train",
        BUILT_IN,
        prepare=_rows({"instruction_id_list": ["keywords:existance"], "kwargs": [{}]}, source="google/IFEval"),
        words=["line 1", "keywords:existance"],
    ),
    Case(
        "tests without outputs",
        "train",
        BUILT_IN,
        prepare=_rows({"inputs": ["1"], "outputs": []}, source="taco"),
        words=["line 1", "describes no tests"],
    ),
    Case("a source without a rule", "train", BUILT_IN, prepare=_rows("1", source="gsm9k"), words=["line 1", "gsm9k"]),
    Case("evaluation of a NaN reference", "eval", EVAL, prepare=_rows(float("nan")), words=["answers.jsonl, line 1"]),
    Case(
        "evaluation of a reference without a number",
        "eval",
        EVAL,
        prepare=_rows("1", "one"),
        words=["answers.jsonl, line 2", "'one' is no number"],
    ),
    Case(
        "a score that is NaN",
        "train",
        OWN,
        code=1,
        leaves=BEGUN,
        prepare=_reward("return math.nan"),
        words=["RewardError", "nan", "finite number"],
    ),
    Case(
        "a score beyond float32",
        "train",
        OWN,
        code=1,
        leaves=BEGUN,
        prepare=_reward("return 1e39"),
        words=["RewardError", "1e+39", "finite number"],
    ),
    Case(
        "a reward function that leaves the process",
        "train",
        OWN,
        code=3,
        leaves=BEGUN,
        prepare=_reward("os._exit(3)"),
        words=["the process ended while the reward function compute_score", "scored sample 0", "reward.num_workers=2"],
    ),
]
