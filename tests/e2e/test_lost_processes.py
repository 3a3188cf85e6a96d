"""A process that dies or stops in the middle of a step changes nothing but the time that the run takes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chaos import RunningTrainer, metrics_by_step, steps_logged
from tests.e2e.conftest import merge_overrides
from tests.e2e.test_servers import samples
from verl.errors import LostProcessError

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]
R = "actor_rollout_ref.rollout"

#: answers as the built-in loop does, except that for the first calls a process ends: its own, or the server
LOOP = """
import os
import signal
from pathlib import Path

import ray

from verl.agent_loop.single_turn import SingleTurnAgentLoop


class Loop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **fields):
        victims = Path(__file__).with_name("victims")
        first, *rest = (victims.read_text().split() if victims.exists() else []) or [""]
        if first:
            victims.write_text(" ".join(rest))
        if first == "agent":
            os.kill(os.getpid(), signal.SIGKILL)
        if first == "server":
            for server in self.context.generator._generator.replicas:
                ray.kill(server, no_restart=False)
        return await super().run(sampling_params, **fields)
"""


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("victims", "restarts"),
    [
        pytest.param("agent", 0, marks=pytest.mark.slow),
        ("server", 0),
        pytest.param("agent agent", 1, marks=pytest.mark.slow),
    ],
)
def test_a_batch_is_generated_again(
    victims: str, restarts: int, run_training: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first death costs the batch; one in the second attempt too costs the steps since the last checkpoint."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: mine, _target_: '{tmp_path}/loop.py:Loop'}}")
    keys = [
        f"{R}.mode=async",
        f"{R}.agent.default_agent_loop=mine",
        f"{R}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{R}.agent.num_workers=1",
        f"{R}.server.retry_delay=0.1",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
    ]
    expected = run_training(*keys, f"trainer.rollout_data_dir={tmp_path}/whole")
    (tmp_path / "victims").write_text(victims)
    got = run_training(*keys, f"trainer.rollout_data_dir={tmp_path}/lost", f"trainer.max_restarts={restarts}")
    for row, whole in zip(got, expected, strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "agent/aborted_fraction"):
            assert row["data"][name] == pytest.approx(whole["data"][name], rel=1e-5, abs=1e-7)
    for step in (1, 2):
        assert samples(tmp_path / "lost", step) == samples(tmp_path / "whole", step)
    assert caplog.text.count("generating the batch again") == 1
    assert caplog.text.count("starting the workers again") == restarts
    assert (tmp_path / "victims").read_text() == ""


@pytest.mark.usefixtures("ray_local")
def test_without_restarts_the_second_death_ends_the_run(run_training: Run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: mine, _target_: '{tmp_path}/loop.py:Loop'}}")
    (tmp_path / "victims").write_text("agent agent")
    with pytest.raises(LostProcessError, match="agent loops of process 0 failed: its process died"):
        run_training(
            f"{R}.mode=async",
            f"{R}.agent.default_agent_loop=mine",
            f"{R}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
            f"{R}.agent.num_workers=1",
        )


@pytest.mark.slow
def test_a_worker_of_two_that_stops_is_named_and_replaced(
    run_training: Run, base_overrides: list[str], tmp_path: Path
) -> None:
    """It is not dead, and nothing but a time limit tells that it will not answer."""
    keys = ["trainer.save_freq=1", "trainer.total_training_steps=3"]
    expected = run_training(*keys, "trainer.controller=local")
    two = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2", "trainer.max_restarts=1"]
    limited = merge_overrides(base_overrides, keys, two, ["trainer.worker_timeout_s=45"])
    directory = tmp_path / "stuck"
    with RunningTrainer(limited, directory) as run:
        assert run.wait_until(lambda: steps_logged(directory) and len(run.workers()) == 2)
        os.kill(run.workers()[1], signal.SIGSTOP)
        assert run.finish(timeout_s=250) == 0, run.text()[-3000:]
        text = run.text()
    assert re.search(r"no result from ranks \[[01]\] within 45 s; they still run", text), text[-3000:]
    assert "if they are only slow, raise trainer.worker_timeout_s" in text
    assert "restart 1 of trainer.max_restarts=1" in text
    records = metrics_by_step(directory)
    for row in expected:
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            assert records[row["step"]][name] == pytest.approx(row["data"][name], rel=1e-5, abs=1e-6)
