"""The self-test over everything that is registered: a fast part for every run, the whole of it marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from verl.selftest import run_selftest
from verl.selftest.report import Report

PLUG_IN = '''
import torch
from verl.algorithms.aggregate import agg_loss, keep_masked, masked_mean, masked_sum
from verl.algorithms.registry import register_adv_est, register_policy_loss
from verl.selftest import estimator_laws, loss_laws, register_field

@register_field("tool_cost")
def tool_cost(batch, generator):
    return torch.rand(len(batch["response_mask"]), generator=generator)

@register_adv_est("plug_in_estimator")
def estimator(token_level_rewards, response_mask, tool_cost, my_margin, index):
    score = masked_sum(token_level_rewards, response_mask, dim=-1) - 0.1 * tool_cost
    advantage = keep_masked((score - 0.5)[:, None] + 0.1 * my_margin, response_mask)
    return advantage, advantage.clone()

@register_adv_est("plug_in_by_place")
def by_place(token_level_rewards, response_mask):
    """Wrong: what a sample gets depends on where it stands in the batch."""
    place = torch.arange(len(response_mask), dtype=torch.float32)
    advantage = keep_masked(place[:, None] + token_level_rewards, response_mask)
    return advantage, advantage

@register_policy_loss("plug_in_loss")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    token = -advantages * (log_prob - old_log_prob).exp()
    metrics = {"my/mean": masked_mean(token.detach(), response_mask)}
    return agg_loss(token, response_mask, loss_agg_mode, **config.global_batch_info), metrics

@register_policy_loss("plug_in_local_mean")
def local_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    """Wrong: the mean over whatever tokens the micro-batch has."""
    return (-advantages * log_prob)[response_mask.bool()].mean(), {}

loss_laws("plug_in_loss", "minus-mean-advantage", "policy-gradient")
'''


def rows(report: Report) -> set[str]:
    return {finding.row for finding in report.findings}


def failed(report: Report, row: str) -> set[str]:
    return {finding.check for finding in report.failures if finding.row == row}


@pytest.mark.dist
def test_every_registered_name_is_exact_under_every_cut() -> None:
    report = run_selftest(device="cpu")
    assert report.ok, report.text()
    checked = rows(report)
    assert {f"estimator {name}" for name in ADV_ESTIMATORS} <= checked
    assert {f"loss {name}" for name in POLICY_LOSSES} <= checked
    assert {"value", "entropy", "kl k1", "kl k2+", "kl k3", "kl-reward abs", "sft", "implicit-reward"} <= checked
    assert report.checks()[-3:] == ["2 ranks", "first step", "laws"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_cuts_aggregations_and_rank_counts() -> None:
    report = run_selftest(full=True, device="cpu")
    assert report.ok, report.text()
    assert {"2 ranks", "4 ranks"} <= set(report.checks())
    assert {"kl low_var_kl+", "kl mse"} <= rows(report)


@pytest.mark.dist
def test_a_plug_in_is_covered_by_its_registration_alone(tmp_path: Path) -> None:
    """The right ones pass, on ranks too, with fields made up for parameters that nobody else knows."""
    file = tmp_path / "my_plug_in.py"
    file.write_text(PLUG_IN)
    report = run_selftest(plugins=[str(file)], only=["* plug_in_*"], device="cpu")
    text = report.text()
    assert rows(report) == {
        "estimator plug_in_estimator",
        "estimator plug_in_by_place",
        "loss plug_in_loss",
        "loss plug_in_local_mean",
    }
    assert not failed(report, "estimator plug_in_estimator"), text
    assert not failed(report, "loss plug_in_loss"), text
    assert failed(report, "estimator plug_in_by_place") == {"order", "2 ranks"}, text
    assert failed(report, "loss plug_in_local_mean") == {"micro-batch", "dynamic", "order", "2 ranks"}, text
    checks = {finding.check for finding in report.findings if finding.row == "loss plug_in_loss"}
    assert {"first step", "laws", "2 ranks"} <= checks
