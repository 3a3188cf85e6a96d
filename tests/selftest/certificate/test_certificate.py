"""The certificate of a model: what it compares, what it says, and how the command ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.selftest.certificate.models import MODELS, family
from verl import cli
from verl.selftest.certificate import CHECKS, certify
from verl.selftest.certificate.generation import filtered
from verl.selftest.certificate.outcome import Measure, Tolerances
from verl.selftest.certificate.report import Certificate, describe
from verl.selftest.certificate.routes import Choices, compare_choices
from verl.selftest.certificate.subject import cut_layers, open_subject
from verl.selftest.certificate.suite import START
from verl.selftest.compare import Deviation


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("certified") / "tiny"
    MODELS["tiny"](directory)
    return str(directory)


def test_a_sound_model_passes_every_check_that_applies(tiny: str) -> None:
    certificate = certify(tiny, device="cpu", ranks=0)
    assert certificate.verdict == "passed", certificate.text()
    assert list(certificate.checks) == [START, *CHECKS]
    idle = {check for check in CHECKS if certificate.verdict_of(check) == "not applicable"}
    assert idle == {"routing", "sequence parallel", "vocabulary", "adapters", "adapter files"}
    # packed and padded, whole, in pieces and dynamic
    assert len({measure.case for measure in certificate.checks["log-probs"]}) == 6


def test_adapters_and_more_rows_than_tokens(tmp_path: Path) -> None:
    MODELS["padded"](tmp_path)
    certificate = certify(str(tmp_path), device="cpu", ranks=0, lora=True)
    assert certificate.verdict == "passed", certificate.text()
    assert certificate.verdict_of("vocabulary") == certificate.verdict_of("adapters") == "passed"


def test_the_start_up_alone_builds_both_engines(tiny: str) -> None:
    certificate = certify(tiny, device="cpu", ranks=0, only=[START])
    assert [measure.case for measure in certificate.measures] == ["training (fsdp)", "rollout (hf)"]


@pytest.mark.dist
def test_processes_that_share_sequences(tiny: str) -> None:
    certificate = certify(tiny, device="cpu", only=["sequence parallel"])
    assert certificate.verdict_of("sequence parallel") == "passed", certificate.text()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["selftest", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_the_command_writes_a_record_that_a_program_can_keep(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records" / "certificate.json"
    checks = [word for name in ("log-probs", "sampling") for word in ("--only", name)]
    code, out, _ = run(capsys, "--model", tiny, "--device", "cpu", *checks, "--json", str(file))
    assert code == 0
    assert "passed" in out.splitlines()[-1]
    record = json.loads(file.read_text("utf-8"))
    assert record["verdict"] == "passed"
    assert set(record["checks"]) == {START, "log-probs", "sampling"}
    assert set(record["model"]["files"]) == {item.name for item in Path(tiny).iterdir()}
    weights = record["model"]["files"]["model.safetensors"]
    assert weights["bytes"] == os.path.getsize(Path(tiny) / "model.safetensors")
    assert len(weights["sha256"]) == 64
    assert record["versions"]["torch"] == torch.__version__
    assert record["tolerances"] == {"log_probs": 5e-5, "gradients": 1e-4, "exact": 0.0, "routing": 1e-3}
    for measure in record["checks"]["log-probs"]["measures"]:
        assert 0 <= measure["figure"] <= measure["tolerance"]
        assert measure["where"].startswith("row ")


def test_a_failure_ends_with_1_and_says_where(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", tiny, "--device", "cpu", "--only", "sampling", "--plant", "rounded-log-probs")
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "FAILED: sampling" in out
    assert "sampling (temperature 0.8): log-probs off by" in out
    assert "token 0:" in out


def test_a_refusal_ends_with_2_and_is_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODELS["sparse"](tmp_path / "model")
    file = tmp_path / "c.json"
    words = ("--model", str(tmp_path / "model"), "--device", "cpu", "--json", str(file))
    code, out, _ = run(capsys, *words, "--only", "log-probs", "--only", "sampling")
    assert code == 2
    assert "refused at start-up: model type 'deepseek_v32'" in out
    record = json.loads(file.read_text("utf-8"))
    assert record["verdict"] == "refused"
    # the trainer was checked all the same
    assert {name: check["verdict"] for name, check in record["checks"].items()} == {
        START: "refused",
        "log-probs": "passed",
        "sampling": "not applicable",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--lora"], "--lora belongs to the certificate of a model"),
        (["--model", "TINY", "--full"], "--full belongs to the self-test of estimators"),
        (["--model", "TINY", "--only", "log-prob"], "--only='log-prob' is no check of the certificate"),
        (["--model", "TINY", "--plant", "nonsense"], "unknown bug 'nonsense'"),
        (["--model", "TINY", "--layers", "0"], "--layers=0"),
        (["--model", "TINY", "--ranks", "2,4"], "--ranks=2,4: with --model give one number"),
        (["--model", "TINY", "--engine", "deepspeed"], "invalid choice: 'deepspeed'"),
    ],
)
def test_bad_words_end_with_2(
    words: list[str], message: str, tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run(capsys, *(tiny if word == "TINY" else word for word in words))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


# ---- a copy of a few layers -----------------------------------------------------------------------------------------


def test_a_copy_of_a_few_layers_has_their_weights_and_sizes(tmp_path: Path) -> None:
    source, target = tmp_path / "whole", tmp_path / "cut"
    kinds = ["sliding_attention", "full_attention"] * 3
    family("gpt_oss", source, num_hidden_layers=6, layer_types=kinds)
    assert cut_layers(source, target, 3) == []
    config = json.loads((target / "config.json").read_text("utf-8"))
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == kinds[:3]
    whole, cut = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert set(cut) == {name for name in whole if not any(f"layers.{number}." in name for number in (3, 4, 5))}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())
    certificate = certify(str(source), device="cpu", ranks=0, layers=3)
    assert certificate.verdict == "passed", certificate.text()
    assert (certificate.subject["layers"], certificate.subject["all_layers"]) == (3, 6)
    assert certificate.notes[0] == "3 of 6 layers, with the model's own sizes and weights"


def test_kinds_of_layers_that_a_copy_lacks_are_said(tmp_path: Path) -> None:
    source = tmp_path / "deepseek"
    family("deepseek_v3", source, num_hidden_layers=4, first_k_dense_replace=2)
    with open_subject(str(source), layers=2) as subject:
        assert subject.notes[1] == "the first 2 layers have no experts, so the copy has none: use --layers 3"
    family("gpt_oss", tmp_path / "gpt", num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    with open_subject(str(tmp_path / "gpt"), layers=2) as subject:
        assert subject.notes[1] == "the copy has no layer of kind full_attention: use --layers 4 or more"


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_filters_in_their_plainest_form() -> None:
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()

    def probability(token: int, top_k: int = -1, top_p: float = 1.0) -> float:
        value = filtered(log_p, float(log_p[token]), top_k, top_p, nearest=-1.0)
        return float(torch.tensor(value).exp())

    assert probability(0) == pytest.approx(0.5)
    assert probability(0, top_k=2) == pytest.approx(0.5 / 0.8)
    assert probability(2, top_k=2) == 0
    assert probability(1, top_p=0.7) == pytest.approx(0.3 / 0.8)
    assert probability(2, top_p=0.7) == 0
    # top-p looks at what top-k left: 0.5/0.8 is less than 0.7, so that both stay
    assert probability(1, top_k=2, top_p=0.7) == pytest.approx(0.3 / 0.8)
    # on the border both answers are right, and the nearer one counts
    assert filtered(log_p, float(log_p[0]), -1, 0.8, nearest=-0.47) == pytest.approx(-0.47, abs=1e-3)
    assert filtered(log_p, float(log_p[0]), -1, 0.8, nearest=-0.64) == pytest.approx(-0.6419, abs=1e-3)


def test_choices_are_compared_token_by_token() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    one, other = Choices(), Choices()
    with one.recording():
        torch.topk(scores, 2)
    with other.recording():
        scores[1, 1] = 9.0
        scores.topk(2, -1)
    assert list(compare_choices(one, one)) == [("experts", 0.0, "2 choices")]
    ((kind, share, where),) = compare_choices(other, one)
    assert (kind, share) == ("experts", 0.5)
    assert where == "choice 0, token 1: [1, 3] against [2, 3]"


def made(*measures: Measure, **changes: Any) -> Certificate:
    subject = {"model_type": "x", "layers": 1, "all_layers": 1}
    setup = {"engine": "fsdp", "rollout": "hf", "lora": False, "device": "cpu"}
    return Certificate(subject, Path("m"), setup, Tolerances(), list(measures), [], 1.0, {}, **changes)


def test_verdicts() -> None:
    good = Measure("a", "", deviation=Deviation("q", 1.0, 2.0))
    bad = Measure("b", "", deviation=Deviation("q", 3.0, 2.0))
    lost = Measure("b", "", deviation=Deviation("q", float("nan"), 2.0))
    broken = Measure("b", "", error="KeyError: 'x'")
    idle = Measure("c", "", reason="no experts")
    refused = Measure(START, "", error="no such family", refused=True)
    assert (made(good, idle).verdict, made(good, idle).exit_code) == ("passed", 0)
    for wrong in (bad, lost, broken):
        assert (made(good, wrong, idle).verdict, made(wrong).failed) == ("failed", ["b"])
    assert (made(refused, good).verdict, made(refused, good).exit_code) == ("refused", 2)
    assert (made(refused, bad).verdict, made(refused, bad).exit_code) == ("failed", 1)
    assert made(lost).document(hashes=False)["checks"]["b"]["measures"][0]["figure"] is None
    assert describe(broken) == "  b: KeyError: 'x'"
