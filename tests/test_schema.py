"""The field table and the check of a batch against a stage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.errors import SchemaError
from verl.schema import FIELDS, STAGES, check_batch

B, P, R = 2, 3, 4


def full_batch() -> DataProto:
    """Every tensor that a step with a critic, a reference and a process reward model makes."""
    responses = ("token_level_scores", "token_level_rewards", "old_log_probs", "entropys", "ref_log_prob")
    tensors = {name: torch.zeros(B, R) for name in (*responses, "values", "advantages", "returns", "rollout_log_probs")}
    tensors |= {
        "prompts": torch.zeros(B, P, dtype=torch.int64),
        "responses": torch.zeros(B, R, dtype=torch.int64),
        "input_ids": torch.zeros(B, P + R, dtype=torch.int64),
        "attention_mask": torch.ones(B, P + R, dtype=torch.int64),
        "position_ids": torch.zeros(B, P + R, dtype=torch.int64),
        "response_mask": torch.ones(B, R, dtype=torch.int64),
        "policy_version": torch.zeros(B, 2, dtype=torch.int32),
        "reward_baselines": torch.zeros(B),
        "rm_ref_log_prob": torch.zeros(B, R),
        "outcomes": torch.zeros(B),
    }
    objects = {"uid": ["a", "b"], "data_source": ["d", "d"], "reward_model": [{}, {}], "raw_prompt": [[], []]}
    return DataProto.from_dict(tensors, objects)


def problems_of(batch: object, stage: str, **kwargs: object) -> list[str]:
    with pytest.raises(SchemaError) as error:
        check_batch(batch, stage, **kwargs)
    head, *lines = str(error.value).splitlines()
    assert head == f"the batch does not fit stage {stage!r}:"
    return [line.removeprefix("  - ") for line in lines]


@pytest.mark.parametrize("stage", sorted(STAGES.keys() - {"prompts"}))
def test_a_full_batch_fits_every_stage(stage):
    batch = full_batch()
    assert check_batch(batch, stage) is batch
    if "raw_prompt" not in STAGES[stage]:
        assert check_batch(batch.batch, stage) is batch.batch
    mapping = {**dict(batch.batch.items()), **batch.non_tensor_batch}
    assert check_batch(mapping, stage) is mapping


def test_prompts_alone():
    prompts = {name: torch.zeros(B, P, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    check_batch(DataProto.from_dict(prompts), "prompts")


def test_every_field_of_a_stage_is_in_the_table():
    assert {name for needed in STAGES.values() for name in needed} <= FIELDS.keys()
    assert all(field.doc.endswith(".") and field.made_by and field.read_by for field in FIELDS.values())


def test_missing_fields_name_their_makers():
    batch = full_batch()
    batch.pop(batch_keys=["old_log_probs", "advantages"])
    assert problems_of(batch, "update_actor", require=["old_log_probs"]) == [
        "'advantages' (B, R) is missing; it is made by: estimator",
        "'old_log_probs' (B, R) is missing; it is made by: actor",
    ]


def test_fields_that_the_configuration_needs_besides():
    batch = full_batch()
    assert check_batch(batch, "advantage", require=["uid", "values"]) is batch
    batch.pop(batch_keys=["values"])
    assert problems_of(batch, "advantage", require=["values", "my_own"]) == [
        "'values' (B, R) is missing; it is made by: critic",
        "'my_own' is missing; it is not a field of the schema, so the run itself must add it",
    ]


def test_all_problems_at_once():
    batch = full_batch()
    batch.pop(batch_keys=["returns"])
    batch.batch["values"] = torch.zeros(B, R + 1)
    batch.batch["old_log_probs"] = torch.zeros(B, R, dtype=torch.bfloat16)
    batch.batch["advantages"] = torch.zeros(B)
    batch.batch["policy_version"] = torch.zeros(B, 3, dtype=torch.int32)
    assert problems_of(batch, "update_critic") == [
        "'returns' (B, R) is missing; it is made by: estimator",
        "'policy_version' has shape (2, 3), expected (B, 2)",
        "'old_log_probs' has dtype bfloat16, expected float32",
        "'values' has shape (2, 5), expected (B, R) with R=4 as in 'responses'",
        "'advantages' has shape (2,), expected (B, R) with B=2, R=4",
    ]


def test_a_sequence_is_prompt_and_response():
    batch = full_batch()
    batch.batch["prompts"] = torch.zeros(B, P + 2, dtype=torch.int64)
    assert problems_of(batch, "rollout") == [
        "'input_ids' has S=7 columns, expected P + R = 5 + 4 = 9 from 'prompts' and 'responses'"
    ]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_may_have_several_dtypes(dtype):
    batch = full_batch()
    batch.batch["response_mask"] = torch.ones(B, R).to(dtype)
    check_batch(batch, "update_actor")


def test_unknown_fields_are_left_alone_and_columns_of_numbers_are_objects():
    batch = full_batch()
    batch.batch["my_field"] = torch.zeros(B, 9)
    batch.non_tensor_batch["extra_info"] = np.arange(B)
    batch.non_tensor_batch["raw_prompt_ids"] = np.zeros((B, 5), dtype=int)
    check_batch(batch, "update_actor")


def test_unknown_stage():
    with pytest.raises(SchemaError, match="unknown stage 'train'; the stages are prompts, rollout"):
        check_batch(full_batch(), "train")
