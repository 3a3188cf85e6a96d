"""Signs that a run goes wrong are reported once each, and a healthy run has none."""

from __future__ import annotations

import pytest

from verl.trainer.health import PATIENCE, HealthMonitor

GOOD = {
    "actor/grad_norm": 0.9,
    "actor/lr": 5e-4,
    "actor/entropy": 0.26,
    "actor/ppo_kl": 0.012,
    "actor/skipped_steps": 0.0,
    "critic/rewards/mean": 0.45,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0,
    "response_length/mean": 11.0,
    "response_length/clip_ratio": 0.01,
}


def run(*changes: dict[str, float], after: int = 3) -> HealthMonitor:
    """Healthy steps, then changed ones."""
    monitor = HealthMonitor()
    for step in range(1, after + 1):
        assert monitor.look(GOOD, step) == []
    for step, change in enumerate(changes, start=after + 1):
        monitor.look({**GOOD, **change}, step)
    return monitor


def causes(monitor: HealthMonitor) -> list[str]:
    return [finding.cause for finding in monitor.findings]


FLAT = {"actor/grad_norm": 0.0, "critic/rewards/max": 0.0, "critic/rewards/mean": 0.0}


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (FLAT, "no_signal", ["gradient is 0.000", "every reward is 0", "0.45 before", "optim.lr (now 0.0005)"]),
        ({"actor/grad_norm": 0.0}, "no_signal", ["same score", "rollout.n", "filter_groups"]),
        ({"actor/skipped_steps": 1.0, "actor/grad_norm": float("nan")}, "skipped", ["not finite", "optim.lr"]),
        ({"critic/skipped_steps": 2.0}, "skipped", ["updates of critic"]),
        ({"actor/ppo_kl": 0.3}, "large_steps", ["0.3, 0.3, 0.3", "optim.lr"]),
        ({"critic/rewards/mean": 0.1}, "reward_collapse", ["0.45", "0.1"]),
        ({"actor/entropy": 0.004}, "entropy_collapse", ["entropy_coeff"]),
        ({"actor/entropy": 1.2}, "entropy_explosion", ["0.26", "1.2"]),
        ({"response_length/clip_ratio": 0.7}, "length", ["70%", "max_response_length"]),
        ({"response_length/mean": 2.0}, "length", ["shrunk"]),
    ],
)
def test_a_sign_that_lasts_is_reported_once(change: dict[str, float], cause: str, words: list[str]) -> None:
    assert causes(run(*[change] * (PATIENCE - 1))) == []
    assert causes(run(change, change, {}, change, change)) == []
    monitor = run(*[change] * 10)
    found = [finding for finding in monitor.findings if finding.cause == cause]
    assert [finding.step for finding in found] == [3 + PATIENCE]
    for word in words:
        assert word in found[0].text, found[0].text


def test_a_run_that_never_has_a_signal_says_so_at_the_end() -> None:
    monitor = HealthMonitor()
    for step in range(1, 41):
        monitor.look({**GOOD, **(FLAT if step > 1 else {})}, step)
    lines = list(monitor.summary())
    assert lines[0] == "39 of 40 steps had no learning signal (gradient 0.000, or no update)"
    assert any(line.startswith("warning of step 4: no learning signal for 3 steps") for line in lines)
    from_the_start = HealthMonitor()
    for step in range(1, 5):
        from_the_start.look({**GOOD, **FLAT}, step)
    (finding,) = from_the_start.findings
    assert "reward.custom_reward_function.path" in finding.text


def test_warm_up_of_the_critic_and_validations_are_no_steps_without_signal() -> None:
    monitor = HealthMonitor()
    for step in range(1, 6):
        assert monitor.look({"critic/grad_norm": 1.0, "critic/rewards/mean": 0.0}, step) == []
    monitor.look({"val-core/x/reward/mean@1": 0.5}, 5)
    assert (monitor.steps, monitor.without_signal) == (0, 0)
    monitor.look({**GOOD, "actor/lr": 0.0, "actor/grad_norm": 0.0}, 6)
    assert monitor.without_signal == 0


#: first steps of ``make quickstart ARGS=actor_rollout_ref.actor.optim.lr=3e-3`` for two seeds:
#: mean reward, gradient, ppo_kl, entropy
HOT = {
    1: [(0.459, 0.8058, 0.2765, 0.2633), (0.1289, 0.4471, 0.2791, 0.2941), (0.03906, 0.2789, 0.3631, 0.3463)],
    2: [(0.4531, 0.6714, 0.4507, 0.2912), (0.06641, 0.3228, 0.7925, 0.3203), (0.02344, 0.1785, 0.3386, 0.5591)],
}


@pytest.mark.parametrize("seed", HOT)
def test_too_large_a_rate_is_reported_before_the_signal_is_gone(seed: int) -> None:
    monitor = HealthMonitor()
    for step, (reward, gradient, kl, entropy) in enumerate(HOT[seed], start=1):
        monitor.look(
            {
                **GOOD,
                "critic/rewards/mean": reward,
                "actor/grad_norm": gradient,
                "actor/ppo_kl": kl,
                "actor/entropy": entropy,
                "actor/lr": 3e-3,
            },
            step,
        )
    (finding,) = monitor.findings
    assert (finding.cause, finding.step) == ("large_steps", 3)
    assert "actor_rollout_ref.actor.optim.lr (now 0.003)" in finding.text


def test_supervised_runs_are_watched_too() -> None:
    monitor = HealthMonitor("optim.lr")
    for step in range(1, 10):
        monitor.look({"train/loss": 2.0 if step < 5 else 9.0, "train/grad_norm": 1.0, "train/lr": 0.1}, step)
    (finding,) = monitor.findings
    assert finding.cause == "loss"
    assert "optim.lr (now 0.1)" in finding.text
