"""Generation from a data set, and the evaluation of what was generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.generation import EvalConfig, GenerationConfig, MetricsConfig
from verl.config.load import load_config
from verl.errors import ConfigError, DataError, RewardError
from verl.trainer import main_eval, main_generation
from verl.trainer.main_eval import evaluate, interval, summarise
from verl.trainer.main_generation import Generator, run_generation

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "boom":
        raise ValueError("no such answer")
    return {"score": float(len(solution_str) % 3), "acc": float(solution_str == ground_truth)}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [
        {
            "data_source": "a" if i % 2 else "b",
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(7)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    return str(tmp_path / "prompts.parquet")


def config(model: str, prompts: str, output: Path, *more: str) -> GenerationConfig:
    keys = [
        f"data.path={prompts}",
        f"data.output_path={output}",
        "data.n_samples=2",
        "data.batch_size=3",
        "data.max_prompt_length=24",
        "rollout.response_length=6",
        f"model.path={model}",
        "trainer.controller=local",
        "trainer.device=cpu",
    ]
    return load_config(GenerationConfig, "generation", [*keys, *more])


def responses(path: Path) -> list[list[str]]:
    if path.suffix == ".jsonl":
        return [json.loads(line)["responses"] for line in path.read_text().splitlines()]
    return pq.read_table(path).column("responses").to_pylist()


def test_rows_get_their_responses_whatever_the_batches_and_the_format(
    tiny_model_dir: str, prompts: str, tmp_path: Path
) -> None:
    run_generation(config(tiny_model_dir, prompts, tmp_path / "a.parquet"))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column("prompt").to_pylist() == pq.read_table(prompts).column("prompt").to_pylist()
    found = responses(tmp_path / "a.parquet")
    assert [len(answers) for answers in found] == [2] * 7
    assert len({text for answers in found for text in answers}) > 7
    assert all(0 < n <= 6 for row in table.column("response_lengths").to_pylist() for n in row)
    run_generation(config(tiny_model_dir, prompts, tmp_path / "b.jsonl", "data.batch_size=5"))
    assert responses(tmp_path / "b.jsonl") == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.jsonl", "prompts.parquet"]


def interrupt_the_second_batch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first rows of the batches that are asked for from now on; at the second one somebody presses Ctrl-C."""
    answer, asked = Generator._answer, []

    def dies_in_the_second(self: Generator, rollout: Any, numbers: range) -> Any:
        asked.append(numbers.start)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self, rollout, numbers)

    monkeypatch.setattr(Generator, "_answer", dies_in_the_second)
    return asked


def test_it_goes_on_after_the_last_whole_batch(
    tiny_model_dir: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_generation(config(tiny_model_dir, prompts, tmp_path / "whole.jsonl"))
    asked = interrupt_the_second_batch(monkeypatch)
    keys = (tiny_model_dir, prompts, tmp_path / "a.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_generation(config(*keys))
    assert not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ConfigError, match="holds batches of another configuration"):
        run_generation(config(*keys, "rollout.temperature=0.5"))
    run_generation(config(*keys))
    assert asked == [0, 3, 3, 6]
    assert responses(tmp_path / "a.jsonl") == responses(tmp_path / "whole.jsonl")
    with pytest.raises(ConfigError, match="is there already"):
        run_generation(config(*keys))


LINES = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\r\ni\nj"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_answers_with_other_ends_of_lines_are_joined_and_evaluated(
    tiny_model_dir: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    answer = Generator._answer

    def with_lines(self: Generator, rollout: Any, numbers: range) -> Any:
        return [{**row, "responses": [LINES, "x"]} for row in answer(self, rollout, numbers)]

    monkeypatch.setattr(Generator, "_answer", with_lines)
    output = tmp_path / f"a{suffix}"
    run_generation(config(tiny_model_dir, prompts, output))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return float(solution_str == {LINES!r})\n"
    )
    keys = [f"data.path={output}", f"custom_reward_function.path={tmp_path / 'reward.py'}"]
    result = evaluate(load_config(EvalConfig, "evaluation", keys))
    assert result["all"]["responses"] == 14
    assert result["all"]["score"]["mean"] == 0.5


def test_other_rows_are_not_mixed_with_answers_of_before(
    tiny_model_dir: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_the_second_batch(monkeypatch)
    keys = (tiny_model_dir, prompts, tmp_path / "a.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_generation(config(*keys))
    rows = pq.read_table(prompts).to_pylist()
    pq.write_table(pa.Table.from_pylist(rows[::-1]), prompts)
    with pytest.raises(ConfigError, match="holds batches of another configuration or data set"):
        run_generation(config(*keys))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = config(tiny_model_dir, str(tmp_path / "prompts.jsonl"), tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="holds batches of another configuration"):  # the path is one
        run_generation(changed)


def test_all_bad_prompts_are_named_before_a_model_is_loaded(prompts: str, tiny_model_dir: str, tmp_path: Path) -> None:
    rows = [{"prompt": "q"}, {"prompt": 3}, {"prompt": "long " * 20}, {"prompt": "\ud83d"}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="3 problems") as caught:
        run_generation(config(tiny_model_dir, str(tmp_path / "bad.jsonl"), tmp_path / "a.jsonl"))
    for words in ("line 2, column 'prompt'", "line 3, column 'prompt'", "line 4, column 'prompt'"):
        assert words in str(caught.value)
    (tmp_path / "twice.jsonl").write_text('{"prompt": "q", "responses": ["kept"]}\n')
    with pytest.raises(DataError, match="has a column 'responses' already.*data.response_key"):
        run_generation(config(tiny_model_dir, str(tmp_path / "twice.jsonl"), tmp_path / "a.jsonl"))
    assert not list(tmp_path.glob(".a.parts"))


def test_all_bad_rows_of_an_evaluation_are_named(tmp_path: Path) -> None:
    rows = [
        {"data_source": "openai/gsm8k", "responses": "x", "reward_model": '{"ground_truth": "1"}'},
        {"data_source": "openai/gsm8k", "responses": [], "reward_model": {"ground_truth": "1"}, "extra_info": "no"},
        {"data_source": "openai/gsm8k", "responses": "x", "reward_model": {"ground_truth": None}},
        {"data_source": ["a"], "responses": "x", "reward_model": "1"},
    ]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="5 problems") as caught:
        evaluate(load_config(EvalConfig, "evaluation", [f"data.path={tmp_path / 'bad.jsonl'}"]))
    for words in (
        "line 2, column 'responses' is [] (list); expected a text",
        "line 2, column 'extra_info' is 'no'",
        "line 3, columns 'data_source' and 'reward_model': data_source='openai/gsm8k': ground_truth=None",
        "line 4, column 'data_source'",
        "line 4, column 'reward_model'",
    ):
        assert words in str(caught.value)


def test_bad_input_is_named(tiny_model_dir: str, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.parquet, row 0, column 'prompt': the prompt has \d+ tokens"):
        run_generation(config(tiny_model_dir, prompts, tmp_path / "a.jsonl", "data.max_prompt_length=3"))
    with pytest.raises(ConfigError, match=r"must end in \.parquet or \.jsonl"):
        config(tiny_model_dir, prompts, tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"rollout\.name='vlm'.*did you mean 'vllm'"):
        config(tiny_model_dir, prompts, tmp_path / "a.jsonl", "rollout.name=vlm")
    with pytest.raises(ConfigError, match="all responses would be equal"):
        config(tiny_model_dir, prompts, tmp_path / "a.jsonl", "rollout.temperature=0")


# ---- evaluation --------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(tmp_path: Path) -> str:
    rows = [
        {"data_source": "a", "reward_model": {"ground_truth": "1"}, "responses": ["1", "x", "1", "xx"]},
        {"data_source": "a", "reward_model": {"ground_truth": "2"}, "responses": ["x", "x", "x", "x"]},
        {"data_source": "b", "reward_model": {"ground_truth": "3"}, "responses": ["3", "3", "3", "3"]},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return str(tmp_path / "answers.jsonl")


def eval_config(answers: str, *more: str) -> EvalConfig:
    reward = Path(answers).with_name("reward.py")
    return load_config(
        EvalConfig, "evaluation", [f"data.path={answers}", f"custom_reward_function.path={reward}", *more]
    )


def test_a_function_without_a_rule_takes_rows_without_a_reference(answers: str) -> None:
    row = {"data_source": "a", "reward_model": {"style": "rule", "ground_truth": None}, "responses": ["1", "x"]}
    Path(answers).write_text(json.dumps(row) + "\n")
    function = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    Path(answers).with_name("reward.py").write_text(f"{function}    return float(ground_truth is None)\n")
    assert evaluate(eval_config(answers))["a"]["score"]["mean"] == 1.0


def test_scores_and_pass_at_k_per_source(answers: str, tmp_path: Path) -> None:
    result = evaluate(
        eval_config(answers, f"data.output_path={tmp_path}/r.json", f"data.scores_path={tmp_path}/s.jsonl")
    )
    assert list(result) == ["a", "b", "all"]
    a = result["a"]
    assert (a["prompts"], a["responses"], a["without_score"]) == (2, 8, 0)
    assert a["score"]["mean"] == pytest.approx(((1 + 1 + 1 + 2) / 4 + 1) / 2)
    # two of four right: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6, pass@4 = 1; the other prompt never passes
    assert [a[f"pass@{k}"]["mean"] for k in (1, 2, 4)] == pytest.approx([0.25, 5 / 12, 0.5])
    assert result["b"]["pass@1"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert result["all"]["pass@4"]["mean"] == pytest.approx(2 / 3)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert [json.loads(line)["score"] for line in (tmp_path / "s.jsonl").open()][:4] == [1.0, 1.0, 1.0, 2.0]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    settings = MetricsConfig(confidence=0.9, resamples=400)
    covered = 0
    for _ in range(200):
        found = interval(list(rng.binomial(1, 0.4, 60).astype(float)), settings)
        covered += found["low"] <= 0.4 <= found["high"]
    assert 0.82 <= covered / 200 <= 0.97


def test_prompts_with_too_few_scores_leave_a_pass_at_k() -> None:
    passed = [[True, False, None], [True, True, True]]
    scores = [[1.0, 0.0, None], [1.0, 1.0, 1.0]]
    result = summarise(scores, passed, MetricsConfig(k=[2, 3]))
    assert result["without_score"] == 1
    assert result["pass@2"]["mean"] == 1.0
    assert result["pass@3"]["mean"] == 1.0
    with pytest.raises(ConfigError, match=r"metrics\.k=4: no prompt has so many"):
        summarise(scores, passed, MetricsConfig(k=[4]))


def test_no_score_at_all_is_no_result(answers: str, tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(
        "def compute_score(solution_str, **_):\n    raise ValueError('no such answer')\n"
    )
    keys = [f"custom_reward_function.path={tmp_path}/never.py", "reward.on_error=drop_sample"]
    with pytest.raises(RewardError, match=r"none of the 12 responses has a score.*answers\.jsonl, line 1: .*no such"):
        evaluate(eval_config(answers, *keys, f"data.output_path={tmp_path}/r.json"))
    assert not (tmp_path / "r.json").exists()


def test_a_response_that_cannot_be_scored_stops_or_counts_by_policy(answers: str) -> None:
    with Path(answers).open("a") as handle:
        row = {"data_source": "b", "reward_model": {"ground_truth": "x"}, "responses": ["boom", "x", "x", "x"]}
        handle.write(json.dumps(row) + "\n")
    with pytest.raises(RewardError, match=r"answers\.jsonl, line 4: (.|\n)*no such answer(.|\n)*reward\.on_error"):
        evaluate(eval_config(answers))
    dropped = evaluate(eval_config(answers, "reward.on_error=drop_sample"))
    assert dropped["b"]["without_score"] == 1
    assert dropped["b"]["pass@1"]["mean"] == 1.0
    penalised = evaluate(eval_config(answers, "reward.on_error=penalise"))
    assert penalised["b"]["pass@1"]["mean"] == pytest.approx((1 + 3 / 4) / 2)


def test_both_programs_from_the_command_line(
    tiny_model_dir: str, prompts: str, answers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.parquet"
    keys = ["data.max_samples=2", "data.max_prompt_length=24", "data.max_response_length=4", "trainer.controller=local"]
    words = [f"data.path={prompts}", f"data.output_path={output}", f"model.path={tiny_model_dir}", *keys]
    assert main_generation.main([*words, "trainer.device=cpu"]) == 0
    assert main_generation.main(words) == 2
    reward = Path(answers).with_name("reward.py")
    assert main_eval.main([f"data.path={output}", f"custom_reward_function.path={reward}"]) == 0
    assert "pass@1" in capsys.readouterr().out
    for program, example in ((main_generation, "verl generate data.path"), (main_eval, "verl eval data.path")):
        with pytest.raises(SystemExit) as caught:
            program.main(["--help"])
        assert caught.value.code == 0
        assert example in capsys.readouterr().out
