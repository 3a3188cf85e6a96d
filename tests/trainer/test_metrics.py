from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.trainer.ppo.glossary import GLOSSARY, describe, undocumented
from verl.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.validation_metrics import (
    MAX_SUBSETS,
    expected_best,
    expected_majority,
    expected_worst,
    majority_value,
)
from verl.utils.metrics import mmean, msum

NAN = float("nan")


def batch(**changes: torch.Tensor) -> DataProto:
    """Three samples: full response with a tool token, short response, aborted response. P = 3, R = 4."""
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    fields: dict[str, torch.Tensor] = {
        "responses": torch.ones(3, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]),
        "response_mask": mask,
        "token_level_scores": torch.tensor([[0.0, NAN, 0.0, 2.0], [0.0, 1.0, NAN, NAN], [NAN] * 4]),
        "token_level_rewards": torch.tensor([[-0.5, NAN, 0.0, 2.0], [0.0, 0.5, NAN, NAN], [NAN] * 4]),
        "advantages": torch.tensor([[1.0, NAN, 2.0, 3.0], [-1.0, -5.0, NAN, NAN], [NAN] * 4]),
        "returns": torch.tensor([[1.0, NAN, 2.0, 3.0], [4.0, 5.0, NAN, NAN], [NAN] * 4]),
        "values": torch.tensor([[1.0, NAN, 2.0, 4.0], [4.0, 4.0, NAN, NAN], [NAN] * 4]),
        "entropys": torch.tensor([[0.5, NAN, 0.5, 1.0], [2.0, 1.0, NAN, NAN], [NAN] * 4]),
        "old_log_probs": torch.tensor([[0.5, NAN, 0.2, 0.1], [0.4, 0.3, NAN, NAN], [NAN] * 4]).log(),
        "rollout_log_probs": torch.tensor([[0.4, NAN, 0.2, 0.1], [0.4, 0.6, NAN, NAN], [NAN] * 4]).log(),
    }
    fields.update(changes)
    return DataProto.from_dict(fields, non_tensors={"__num_turns__": np.array([4, 2, 0], dtype=object)})


EXPECTED = {
    "critic/score/mean": 1.5,
    "critic/score/max": 2.0,
    "critic/score/min": 1.0,
    "critic/rewards/mean": 1.0,
    "critic/rewards/max": 1.5,
    "critic/rewards/min": 0.5,
    "critic/advantages/mean": 0.0,
    "critic/advantages/max": 3.0,
    "critic/advantages/min": -5.0,
    "critic/returns/mean": 3.0,
    "critic/returns/max": 5.0,
    "critic/returns/min": 1.0,
    "critic/values/mean": 3.0,
    "critic/values/max": 4.0,
    "critic/values/min": 1.0,
    "critic/vf_explained_var": 1 - 0.4 / 2.0,  # errors 0, 0, -1, 0, 1
    "actor/entropy": 1.0,
    "training/rollout_probs_diff_mean": 0.08,
    "training/rollout_probs_diff_max": 0.3,
    "training/rollout_probs_diff_std": float(np.std([0.1, 0, 0, 0, 0.3])),
    "response_length/mean": 2.0,
    "response_length/max": 4.0,
    "response_length/min": 0.0,
    "response_length/clip_ratio": 1 / 3,
    "response_length_non_aborted/mean": 3.0,
    "response_length_non_aborted/max": 4.0,
    "response_length_non_aborted/min": 2.0,
    "response_length_non_aborted/clip_ratio": 1 / 2,
    "response/aborted_ratio": 1 / 3,
    "prompt_length/mean": 2.0,
    "prompt_length/max": 3.0,
    "prompt_length/min": 1.0,
    "prompt_length/clip_ratio": 1 / 3,
    "num_turns/mean": 2.0,
    "num_turns/max": 4.0,
    "num_turns/min": 0.0,
}


def test_data_metrics_on_literal_numbers() -> None:
    assert compute_data_metrics(batch()) == pytest.approx(EXPECTED, abs=1e-6)


def test_a_response_without_a_verdict_does_not_lower_the_score() -> None:
    """An abstaining reward function empties the mask of a response that is there: it is not a score of 0."""
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    metrics = compute_data_metrics(batch(response_mask=mask))
    assert [metrics[f"critic/score/{name}"] for name in ("mean", "max", "min")] == [2.0, 2.0, 2.0]
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)


def test_without_a_critic_there_are_no_value_metrics() -> None:
    metrics = compute_data_metrics(batch(), use_critic=False)
    assert {name for name in EXPECTED if name not in metrics} == {
        *(f"critic/values/{stat}" for stat in ("mean", "max", "min")),
        "critic/vf_explained_var",
    }


def test_constant_returns_leave_nothing_to_explain() -> None:
    assert compute_data_metrics(batch(returns=torch.ones(3, 4)))["critic/vf_explained_var"] == 0.0


def test_a_batch_of_aborted_responses_gives_finite_numbers() -> None:
    empty = batch(
        response_mask=torch.zeros(3, 4, dtype=torch.int64),
        attention_mask=torch.tensor([[0, 1, 1, 0, 0, 0, 0]] * 3),
    )
    metrics = compute_data_metrics(empty)
    assert metrics["response/aborted_ratio"] == 1.0
    assert metrics["response_length/mean"] == 0.0
    assert np.isfinite(list(metrics.values())).all()
    assert not any(name.startswith("critic/") for name in metrics)


def test_timing_per_token_counts_sampled_tokens_for_gen_and_all_tokens_otherwise() -> None:
    metrics = compute_timing_metrics(batch(), {"gen": 0.5, "update_actor": 1.2, "reward": 3.0, "step": 9.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 0.5,
            "timing_s/update_actor": 1.2,
            "timing_s/reward": 3.0,
            "timing_s/step": 9.0,
            "timing_per_token_ms/gen": 500 / 5,
            "timing_per_token_ms/update_actor": 1200 / 12,
        }
    )


def test_throughput_is_per_second_and_device() -> None:
    assert compute_throughput_metrics(batch(), {"step": 2.0}, n_devices=3) == {
        "perf/total_num_tokens": 12.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 2.0,
    }


def test_step_metrics_are_all_documented() -> None:
    seconds = {"gen": 1.0, "step": 2.0}
    metrics = (
        compute_data_metrics(batch(), use_critic=True)
        | compute_timing_metrics(batch(), seconds)
        | compute_throughput_metrics(batch(), seconds, n_devices=1)
    )
    assert {*EXPECTED, "timing_s/gen", "timing_per_token_ms/gen", "perf/throughput"} <= set(metrics)
    assert undocumented(metrics) == []


def test_reduce_metrics_by_the_words_of_the_name() -> None:
    reduced = reduce_metrics(
        {
            "response_length/max": [1, 5, 3],
            "response_length/min": [4, 2],
            "perf/max_memory_allocated_gb": [1.0, 2.0],
            "global_seqlen/minmax_diff": [2.0, 4.0],
            "actor/pg_loss": [1.0, 2.0, 6.0],
            "scalar": 7,
            "empty": [],
            "weighted": [mmean(3.0, 1.0), mmean(1.0, 3.0)],
            "count": [msum(1), msum(2)],
        }
    )
    assert reduced == {
        "response_length/max": 5.0,
        "response_length/min": 2.0,
        "perf/max_memory_allocated_gb": 2.0,
        "global_seqlen/minmax_diff": 3.0,
        "actor/pg_loss": 3.0,
        "scalar": 7.0,
        "weighted": 1.0,
        "count": 3.0,
    }


# ---- validation --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=7), n=st.integers(1, 7))
def test_best_and_worst_are_averages_over_all_subsets(values: list[int], n: int) -> None:
    subsets = list(itertools.combinations(values, min(n, len(values))))
    assert expected_best(values, n) == pytest.approx(np.mean([max(s) for s in subsets]))
    assert expected_worst(values, n) == pytest.approx(np.mean([min(s) for s in subsets]))


def test_best_of_zero_one_values_is_pass_at_k() -> None:
    # 3 of 10 right: 1 - C(7, 4) / C(10, 4)
    assert expected_best([1.0] * 3 + [0.0] * 7, 4) == pytest.approx(1 - 35 / 210)


def test_majority_vote_and_its_ties() -> None:
    assert majority_value(["a", "b", "b"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_value(["a", "b"], [1.0, 0.0]) == 0.5
    assert majority_value(["a", "a", "b", "b", "c"], [1.0, 1.0, 0.0, 0.0, 9.0]) == 0.5


def test_majority_of_small_sets_is_exact() -> None:
    # subsets of {a, a, b}, 2 at a time: aa -> 1, ab and ab tie -> 0.5
    rng = np.random.default_rng(0)
    assert expected_majority(["a", "a", "b"], [1.0, 1.0, 0.0], 2, rng) == pytest.approx(2 / 3)


def test_majority_of_large_sets_is_drawn_from_the_seed_and_close() -> None:
    answers, values = ["a"] * 9 + ["b"] * 7, [1.0] * 9 + [0.0] * 7
    first, again = (expected_majority(answers, values, 8, np.random.default_rng(3)) for _ in range(2))
    assert first == again
    exact = np.mean(
        [majority_value([answers[i] for i in s], [values[i] for i in s]) for s in itertools.combinations(range(16), 8)]
    )
    assert first == pytest.approx(exact, abs=4 * 0.5 / MAX_SUBSETS**0.5)
    order = np.random.default_rng(0).permutation(16)
    shuffled = expected_majority([answers[i] for i in order], [values[i] for i in order], 8, np.random.default_rng(3))
    assert shuffled == first


def validation(**infos: list[Any]) -> dict[str, float]:
    return process_validation_metrics(["openai/gsm8k"] * 4, ["p", "p", "q", "q"], infos)


def test_validation_on_literal_numbers() -> None:
    metrics = validation(reward=[1.0, 0.0, 0.5, 0.5], pred=["7", "8", "9", "9"], length=[3, 5, 7, 9])
    prefix, aux = "val-core/openai/gsm8k/reward", "val-aux/openai/gsm8k"
    assert metrics == pytest.approx(
        {
            f"{prefix}/mean@2": 0.5,
            f"{prefix}/best@2": 0.75,
            f"{prefix}/maj@2": 0.5,
            f"{aux}/reward/std@2": 0.25,
            f"{aux}/reward/worst@2": 0.25,
            f"{aux}/length/mean@2": 6.0,
            f"{aux}/length/best@2": 7.0,
            f"{aux}/length/worst@2": 5.0,
            f"{aux}/length/std@2": 1.0,
            f"{aux}/length/maj@2": 6.0,
        }
    )
    assert undocumented(metrics) == []


def test_accuracy_is_the_core_variable_where_there_is_one() -> None:
    metrics = validation(reward=[1.0, 0.0, 0.5, 0.5], acc=[True, False, False, False])
    assert metrics["val-core/openai/gsm8k/acc/mean@2"] == 0.25
    assert metrics["val-aux/openai/gsm8k/reward/mean@2"] == 0.5
    assert not any(name.startswith("val-core/openai/gsm8k/reward") for name in metrics)


def test_one_sample_per_prompt_has_only_a_mean() -> None:
    metrics = process_validation_metrics(["a", "a", "b"], ["p", "q", "r"], {"reward": [1.0, 0.0, 3.0]})
    assert metrics == {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 3.0}


def test_intermediate_sizes_go_to_aux() -> None:
    metrics = process_validation_metrics(["a"] * 5, ["p"] * 5, {"reward": [0, 0, 0, 0, 1]})
    best = {name: value for name, value in metrics.items() if "/best@" in name}
    assert best == pytest.approx(
        {"val-aux/a/reward/best@2": 0.4, "val-aux/a/reward/best@4": 0.8, "val-core/a/reward/best@5": 1.0}
    )


def test_abstentions_are_left_out_and_text_is_no_variable() -> None:
    metrics = validation(reward=[1.0, None, NAN, None], comment=["x", "y", "z", "w"])
    assert metrics["val-core/openai/gsm8k/reward/mean@2"] == 1.0
    assert not any("comment" in name for name in metrics)


def test_sample_order_does_not_matter() -> None:
    sources, uids = ["s"] * 6, ["p", "p", "p", "q", "q", "q"]
    infos = {"reward": [1, 0, 2, 5, 3, 4], "pred": list("abacdc")}
    order = [2, 5, 0, 1, 4, 3]
    shuffled = {name: [column[i] for i in order] for name, column in infos.items()}
    expected = process_validation_metrics(sources, uids, infos)
    actual = process_validation_metrics(sources, [uids[i] for i in order], shuffled)
    assert actual == pytest.approx(expected)


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="reward has 1 entries for 2 samples"):
        process_validation_metrics(["a", "a"], ["p", "q"], {"reward": [1.0]})


# ---- glossary ----------------------------------------------------------------------------------------------


def test_glossary_covers_the_names_that_dashboards_rely_on() -> None:
    documented = [
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "critic/returns/mean",
        "critic/values/max",
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/vf_explained_var",
        "critic/grad_norm",
        "critic/lr",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/kl_loss",
        "actor/kl_coef",
        "actor/grad_norm",
        "actor/lr",
        "actor/reward_kl_penalty",
        "actor/reward_kl_penalty_coeff",
        "response_length/mean",
        "response_length/clip_ratio",
        "prompt_length/min",
        "prompt_length/clip_ratio",
        "response/aborted_ratio",
        "num_turns/max",
        "tool_call_counts/mean",
        "training/global_step",
        "training/epoch",
        "training/rollout_probs_diff_mean",
        "training/rollout_probs_diff_max",
        "training/rollout_probs_diff_std",
        "rollout_corr/kl",
        "timing_s/gen",
        "timing_s/update_critic",
        "timing_s/save_checkpoint",
        "timing_per_token_ms/gen",
        "perf/total_num_tokens",
        "perf/time_per_step",
        "perf/throughput",
        "perf/max_memory_allocated_gb",
        "perf/max_memory_reserved_gb",
        "perf/cpu_memory_used_gb",
        "perf/mfu/actor",
        "perf/mfu/critic",
        "global_seqlen/min",
        "global_seqlen/max",
        "global_seqlen/minmax_diff",
        "global_seqlen/balanced_min",
        "global_seqlen/balanced_max",
        "global_seqlen/mean",
        "val-core/openai/gsm8k/reward/mean@8",
        "val-core/x/acc/maj@4",
        "val-aux/a/b/c/reward/best@16",
    ]
    assert undocumented(documented) == []


def test_glossary_does_not_cover_everything() -> None:
    unknown = ["actor/pg_los", "critic/score/median", "val-core/x/reward/mean@", "xactor/lr", "perf/mfu/actor/x"]
    assert undocumented(unknown) == sorted(unknown)
    assert describe("actor/pg_los") is None


def test_each_pattern_has_a_sentence_that_its_names_find() -> None:
    for sentence in GLOSSARY.values():
        assert sentence[0].isupper()
        assert sentence.endswith(".")
    assert describe("response_length/max") == GLOSSARY["response_length/{mean|max|min}"]
