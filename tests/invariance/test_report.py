"""What the self-test compares, how it judges, and how the command answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verl import cli
from verl.algorithms.registry import POLICY_LOSSES, register_adv_est
from verl.errors import ConfigError
from verl.selftest import estimator_laws, loss_laws
from verl.selftest.backends import PlainBackend
from verl.selftest.batches import ROWS, make_batch
from verl.selftest.checks import Finding
from verl.selftest.compare import Deviation, worst
from verl.selftest.entries import Entry, Outcome, complete_base, enumerate_entries, prepare, run
from verl.selftest.model import save_tiny_models
from verl.selftest.report import Report
from verl.selftest.splits import Cut, apply_cut, rank_cuts, single_process_cuts, undo

ENTRY = Entry("loss", "vanilla")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainBackend:
    return PlainBackend(save_tiny_models(tmp_path_factory.mktemp("models")), "cpu")


def distance(expected: Outcome, actual: Outcome) -> Deviation:
    return worst(ENTRY, "micro-batch", expected, actual)


def test_numbers_are_compared_relatively_and_small_ones_as_a_tenth() -> None:
    assert distance(Outcome({"loss": 2.0}), Outcome({"loss": 2.00003})).value == pytest.approx(1.5e-5)
    assert not distance(Outcome({"loss": 2.0}), Outcome({"loss": 2.00003})).ok
    assert distance(Outcome({"loss": 0.01}), Outcome({"loss": 0.0100005})).value == pytest.approx(5e-6)
    assert distance(Outcome({"loss": 0.01}), Outcome({"loss": 0.0100005})).ok


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"loss": 1.0}, {"loss": math.nan}),
        ({"loss": math.nan}, {"loss": math.nan}),
        ({"loss": 1.0}, {"loss": math.inf}),
        ({"loss": 1.0, "m": 1.0}, {"loss": 1.0}),
        ({"loss": 1.0}, {"loss": 1.0, "m": 1.0}),
    ],
)
def test_nan_and_missing_metrics_fail(expected: dict[str, float], actual: dict[str, float]) -> None:
    assert not distance(Outcome(expected), Outcome(actual)).ok


def test_fields_and_gradients_that_differ_in_shape_value_or_name_fail() -> None:
    two, three = torch.ones(2, 2), torch.ones(2, 3)
    assert distance(Outcome(fields={"a": two}), Outcome(fields={"a": two.clone()})).value == 0
    assert not distance(Outcome(fields={"a": two}), Outcome(fields={"a": three})).ok
    assert not distance(Outcome(fields={"a": two}), Outcome(fields={"a": two * math.nan})).ok
    big, small = torch.tensor([3.0, 4.0]), torch.tensor([1e-4, 0.0])
    grads = {"w": big, "b": small}
    assert distance(Outcome(gradient=grads), Outcome(gradient={"w": big, "b": small + 1e-7})).ok  # 1e-7 of 0.05
    off = distance(Outcome(gradient=grads), Outcome(gradient={"w": big * 1.001, "b": small}))
    assert off.quantity == "gradient of w"
    assert off.value == pytest.approx(1e-3, rel=1e-3)
    assert not distance(Outcome(gradient=grads), Outcome()).ok  # a step that the engine skipped


def test_cuts_change_how_a_batch_looks_and_undo_finds_it_again() -> None:
    batch = make_batch()
    mask = batch["response_mask"]
    cut = Cut("", "", left=3, right=2, order=(3, 0, 7, 5, 1, 6, 2, 4), garbage=math.nan)
    changed = apply_cut(batch, cut)
    assert changed["input_ids"].shape == (ROWS, batch["input_ids"].shape[1] + 5)
    assert changed["prompts"].shape[1] == batch["prompts"].shape[1] + 3
    assert list(changed["uid"]) == [batch["uid"][i] for i in cut.order]
    rewards = changed["token_level_rewards"]
    assert torch.equal(rewards.isnan(), changed["response_mask"] == 0)
    assert int(changed["input_ids"][changed["attention_mask"] == 0].min()) == 10**6
    back = undo(rewards, cut)
    assert torch.equal(back[mask != 0], batch["token_level_rewards"][mask != 0])
    assert not batch["token_level_rewards"].isnan().any()  # the batch itself is left alone


def test_cuts_cover_every_size_and_ranks_without_tokens() -> None:
    full = single_process_cuts(full=True)
    assert {cut.micro.size for cut in full if cut.check == "micro-batch"} == set(range(1, ROWS + 1))
    for world in (2, 4):
        for cut in rank_cuts(world, full=True):
            assert len(cut.spread) == world // cut.sequence
            assert sum(cut.spread) == ROWS
    batch = apply_cut(make_batch(), rank_cuts(4, full=True)[-1])
    assert int(batch["response_mask"][-1].sum()) == 0


def test_the_batch_is_ragged_with_a_hole_an_empty_row_and_a_lone_sample() -> None:
    batch = make_batch()
    tokens = batch["response_mask"].sum(-1).tolist()
    assert tokens == [3, 5, 1, 6, 2, 5, 0, 4]
    assert batch["response_mask"][1].tolist() == [1, 1, 0, 0, 1, 1, 1]
    uids = list(batch["uid"])
    assert sorted(uids.count(uid) for uid in set(uids)) == [1, 2, 2, 3]


def test_a_name_registered_a_moment_ago_has_a_row() -> None:
    assert not enumerate_entries(only=["estimator late"])

    @register_adv_est("late")
    def late(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards, token_level_rewards

    assert [entry.row for entry in enumerate_entries(only=["estimator late"])] == ["estimator late"]


@pytest.mark.parametrize(
    "name", ["vanilla", "gspo", "gspo_token", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov"]
)
def test_what_a_loss_is_about_happens_in_the_batch(name: str, plain: PlainBackend) -> None:
    """A trust region that no token leaves would make the check of that loss one of plain policy gradient."""
    base = complete_base(plain, make_batch())
    (entry,) = enumerate_entries(only=[f"loss {name}"])
    scalars = run(entry, plain, prepare(entry, base)).scalars
    assert 0.0 < scalars["actor/pg_clipfrac"] < 1.0
    if name == "vanilla":
        assert scalars["actor/pg_clipfrac_lower"] > 0.0
    if name.endswith("_cov"):
        assert scalars["actor/cov_selected"] > 0.0


def test_every_loss_has_a_gradient_in_the_batch(plain: PlainBackend) -> None:
    base = complete_base(plain, make_batch())
    for name in POLICY_LOSSES:
        (entry,) = enumerate_entries(only=[f"loss {name}"])
        assert run(entry, plain, prepare(entry, base)).scalars["grad_norm"] > 0.1, name


def test_unknown_laws_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown law sideways"):
        estimator_laws("grpo", "sideways")
    with pytest.raises(ConfigError, match="unknown law shift"):
        loss_laws("vanilla", "shift")


def test_the_report_says_which_case_of_what_failed_and_by_how_much(tmp_path: Path) -> None:
    good = Finding("loss a", "micro-batch", "3 rows", Deviation("loss", 2e-6, 1e-5))
    bad = Finding("loss b", "2 ranks", "uneven", Deviation("actor/ppo_kl", 0.25, 1e-5))
    broken = Finding("loss c", "plain model", "", None, "KeyError: 'x'")
    nothing = Finding("loss b", "micro-batch", "3 rows", Deviation("loss", math.nan, 1e-5))
    report = Report([good, bad, broken, nothing], ["a note"], 1.0)
    assert not report.ok
    assert report.checks() == ["plain model", "micro-batch", "2 ranks"]
    lines = report.text().splitlines()
    assert lines[1].split() == ["loss", "a", ".", "2.0e-06", "."]
    assert lines[2].split() == ["loss", "b", ".", "nan", "FAIL", "2.5e-01", "FAIL"]
    assert lines[3].split() == ["loss", "c", "ERROR", ".", "."]
    assert "  loss b, 2 ranks (uneven): actor/ppo_kl is off by 2.5e-01, allowed 1e-05" in lines
    assert "  loss c, plain model: KeyError: 'x'" in lines
    assert lines[-1] == "FAILED: 3 of 4 comparisons in 1 s"
    report.write_json(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert [finding["ok"] for finding in document["findings"]] == [True, False, False, False]
    assert document["findings"][3]["deviation"] is None
    assert Report([good], [], 1.0).text().endswith("passed 1 comparisons in 1 s")
    assert not Report([], [], 0.0).ok


@pytest.fixture
def selftest(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*words: str) -> tuple[int, str]:
        code = cli.main(["selftest", "--device", "cpu", "--ranks", "0", *words])
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return call


def test_the_command_answers_with_its_exit_code(selftest: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, text = selftest("--only", "loss vanilla", "--json", str(tmp_path / "out.json"))
    assert code == 0, text
    assert "loss vanilla" in text
    assert json.loads((tmp_path / "out.json").read_text())["ok"]
    code, text = selftest("--only", "loss vanilla", "--plant", "local-denominators")
    assert code == 1
    assert "loss vanilla, micro-batch (" in text
    code, text = selftest("--only", "loss vanila")
    assert (code, text) == (2, "verl selftest: no row matches loss vanila; --list shows them\n")
    code, text = selftest("--plugin", str(tmp_path / "nowhere.py"))
    assert code == 2
    assert "nowhere.py" in text


def test_the_command_lists_rows_and_bugs(selftest: Callable[..., tuple[int, str]]) -> None:
    code, text = selftest("--list", "--only", "loss *")
    assert code == 0
    assert "  loss vanilla\n" in text
    assert "  estimator grpo\n" not in text
    assert "  local-denominators" in text
