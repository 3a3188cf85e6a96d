"""The example programs, unchanged, are trained through the proxy: with generation in the workers and with servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny import make_tiny_model_dir
from tests.workers.rollout.helpers import missing_package
from verl.trainer.ppo.glossary import undocumented

pytestmark = pytest.mark.e2e

Run = Callable[..., list[dict[str, Any]]]
R = "actor_rollout_ref.rollout"

# a random model calls no tool: in this format about half of what it says is a call
FORMAT = """
from verl.tools.parsers import PARSERS, ParsedTurn, ToolCall, ToolParser, register_parser

if "by_chance" not in PARSERS:
    @register_parser("by_chance")
    class ByChance(ToolParser):
        def parse(self, text):
            if sum(map(ord, text)) % 2:
                return ParsedTurn(text)
            return ParsedTurn("", [ToolCall("calculator", {"expression": f"{len(text)}*{len(text)}"})])
"""
HF = [f"{R}.name=hf", "trainer.n_gpus_per_node=2"]
VLLM = [f"{R}.name=vllm", f"{R}.mode=async", f"{R}.update_weights_bucket_megabytes=1"]


@pytest.fixture(scope="session")
def served_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose attention heads have a size that vLLM serves on CPUs."""
    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "served", hidden=64, heads=2, kv_heads=2)


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or ""),
]


@pytest.mark.parametrize(
    ("program", "generation"),
    [
        pytest.param("openai_client", HF, id="client, hf in two workers", marks=pytest.mark.slow),
        pytest.param("openai_client", [*HF, f"{R}.mode=async"], id="client, hf servers"),
        pytest.param("openai_client", VLLM, id="client, vllm servers", marks=NEEDS_VLLM),
        pytest.param("agents_sdk", HF, id="framework, hf in two workers"),
        pytest.param("agents_sdk", [*HF, f"{R}.mode=async"], id="framework, hf servers", marks=pytest.mark.slow),
        pytest.param("agents_sdk", VLLM, id="framework, vllm servers", marks=NEEDS_VLLM),
    ],
)
def test_a_program_is_trained_as_it_is(
    program: str,
    generation: list[str],
    run_training: Run,
    served_model_dir: str,
    repo_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package, name in (("openai", "openai"), ("aiohttp", "aiohttp"), ("agents", "openai-agents")):
        if package != "agents" or program == "agents_sdk":
            pytest.importorskip(package, reason=f"the package {name} is not installed (requirements/dev.txt)")
    (tmp_path / "by_chance.py").write_text(FORMAT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = run_training(
        *generation,
        f"actor_rollout_ref.model.path={served_model_dir}",
        "actor_rollout_ref.model.external_lib=by_chance",
        "data.max_prompt_length=48",
        "data.max_response_length=96",
        f"{R}.multi_turn.format=by_chance",
        f"{R}.multi_turn.max_assistant_turns=3",
        f"{R}.agent.openai_agent.path={repo_root}/examples/agent/{program}.py",
        f"{R}.agent.timeout_s=120",
        f"{R}.agent.num_workers=2",
        f"{R}.agent.trace_dir={tmp_path}/traces",
        "trainer.total_training_steps=3",
    )
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        data = row["data"]
        assert undocumented(data) == []
        assert data["training/rollout_probs_diff_max"] < 1e-4  # the rows reproduce what was sampled
        assert data["agent/aborted_fraction"] == 0.0
        assert data["actor/grad_norm"] > 0
        assert data["weight_sync/version"] == row["step"]
    traces = [json.loads(line) for file in (tmp_path / "traces").glob("*.jsonl") for line in file.open()]
    assert len(traces) == 3 * 16
    assert any("<|tool|>" in trace["response"] for trace in traces)
