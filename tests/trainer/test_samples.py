"""Samples that are written down: every reported value is there, under its own name or a distinct one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.data.collate import object_array
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import Scorer, apart, describe_samples, dump_samples, reported
from verl.utils.telling import BOUNDARY


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    BOUNDARY.start()
    yield
    BOUNDARY.start()


def batch(**columns: list[Any]) -> DataProto:
    tensors = {
        "prompts": torch.tensor([[1, 2], [1, 2]]),
        "responses": torch.tensor([[3, 4], [3, 4]]),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
    }
    names = {"uid": ["a", "b"], "reward_model": [{"ground_truth": "7"}] * 2, **columns}
    return DataProto.from_dict(tensors, {name: object_array(values) for name, values in names.items()})


def scored(rows: DataProto, **extra: list[Any]) -> DataProto:
    def reward(data: DataProto, return_dict: bool = True) -> dict[str, Any]:
        return {"reward_tensor": torch.ones(2, 2), "reward_extra_info": extra}

    Scorer(reward)(rows)
    return rows


def test_reported_names_that_columns_have_are_kept_apart() -> None:
    rows = scored(batch(reward_hint=["h", "h"]), model=["m", "m"], hint=["mine", "mine"], acc=[1, 0], baselines=[0, 0])
    assert rows.non_tensor_batch["reward_model"][0] == {"ground_truth": "7"}
    assert rows.non_tensor_batch["reward_hint"][0] == "h"
    found = {name: list(values) for name, values in reported(rows).items()}
    assert found["reported_model"] == ["m", "m"]
    assert found["reported_hint"] == ["mine", "mine"]
    assert found["reported_baselines"] == [0, 0]
    assert found["acc"] == [1, 0]
    assert BOUNDARY.counts == {}  # renamed, nothing lost


def test_a_column_of_the_wrong_length_is_reported() -> None:
    scored(batch(), acc=[1, 0], short=[1])
    assert BOUNDARY.counts == {"reported": 1}


def test_distinct_names_stay_distinct() -> None:
    extra = {"score": 1, "reported_score": 2, "other": 3}
    assert apart(extra, {"score"}) == {"reported_reported_score": 1, "reported_score": 2, "other": 3}


def test_a_reported_score_that_is_the_score_is_no_second_value() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: "x")
    (first, _) = describe_samples(tokenizer, batch(), [0.1, float("nan")], {"score": object_array([0.1, float("nan")])})
    assert first.keys() == {"uid", "input", "output", "gts", "score"}


def test_samples_are_strict_json_with_all_that_was_reported(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: "\ud83d\u2028x")
    extra = {
        name: object_array([value, value])
        for name, value in {
            "score": 0.25, "uid": "mine", "step": 9, "count": np.int64(3), "nan": float("nan"), "nested": {"a": {1}},
            "image": object(),
        }.items()
    }  # fmt: skip
    samples = describe_samples(tokenizer, batch(), [1.0, float("nan")], extra)
    dump_samples(tmp_path / "new", 4, samples)
    lines = (tmp_path / "new" / "4.jsonl").read_text("utf-8").splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["uid"], first["reported_uid"], first["score"], first["reported_score"]) == ("a", "mine", 1.0, 0.25)
    assert (first["step"], first["reported_step"], first["count"], first["nan"]) == (4, 9, 3, "NaN")
    assert first["nested"] == {"a": [1]}
    assert first["output"] == "\ufffd\u2028x"
    assert second["score"] == "NaN"
    assert BOUNDARY.counts["samples"] == 2  # the images
