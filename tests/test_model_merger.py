"""Sharded checkpoints become models that plain Transformers loads, and are compared with them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.fixtures.vision import make_vision_model_dir
from tests.selftest.certificate.models import family
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import (
    POLICY,
    TEMPERATURE,
    VALUES,
    make_engine,
    policy_batch,
    policy_loss,
    value_loss,
)
from verl import model_merger
from verl.utils.tokenizer import load_processor
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine

TRAINED = frozenset({"model", "optimizer", "extra"})
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
WHOLE = MicroBatching()


def train(engine: FSDPEngine) -> None:
    engine.train_batch(policy_batch(), policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE)


def greedy(model: torch.nn.Module, tokenizer: object, text: str) -> str:
    ids = tokenizer(text, return_tensors="pt")  # type: ignore[operator]
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)  # type: ignore[operator]
    return tokenizer.decode(out[0])  # type: ignore[attr-defined]


def run(*words: str) -> int:
    return model_merger.main(list(words))


def saved_by_two(rank: int, model_dir: str, directory: str) -> None:
    engine = make_engine(model_dir)
    train(engine)
    engine.save(f"{directory}/actor", TRAINED | {"hf_model"})


@pytest.mark.dist
def test_shards_of_two_ranks_become_the_model_that_the_engine_exports(tiny_model_dir: str, tmp_path: Path) -> None:
    run_ranks(2, saved_by_two, tiny_model_dir, str(tmp_path))
    assert (
        run("merge", "--backend", "fsdp", "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "m"))
        == 0
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface", dtype=torch.float32).eval()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), exported.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert greedy(model, tokenizer, "sort 52") == greedy(exported, tokenizer, "sort 52")
    assert run("test", "--local_dir", str(tmp_path / "actor"), "--test_hf_dir", str(tmp_path / "m")) == 0


def test_adapters_are_added_to_their_base(
    tiny_model_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tiny_model_dir, model=LORA)
    for _ in range(2):
        train(engine)
    engine.save(tmp_path / "global_step_2" / "actor", TRAINED)
    # a step directory stands for its actor
    with caplog.at_level(logging.INFO, logger="verl"):
        target = model_merger.merge(tmp_path / "global_step_2", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, tensor in engine.named_tensors():
        torch.testing.assert_close(merged.get_parameter(name).data, tensor, rtol=0, atol=1e-7)
    count = len(list(merged.parameters()))
    assert model_merger.compare(tmp_path / "global_step_2", target) == count
    assert f"{count} tensors in {target}" in caplog.text


@pytest.mark.parametrize("name", ["apertus", "deepseek_v3"])
def test_numbers_that_are_no_parameters_come_from_the_base(name: str, tmp_path: Path) -> None:
    """An activation's constants, and corrections of a router, are buffers that the files hold."""
    family(name, tmp_path / "model")
    engine = make_engine(str(tmp_path / "model"), model=LORA)
    engine.save(tmp_path / "actor", TRAINED)
    merged = AutoModelForCausalLM.from_pretrained(
        model_merger.merge(tmp_path / "actor", tmp_path / "merged"), dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    stored = dict(base.named_buffers())
    names = [name for name in base.state_dict() if name in stored]
    assert names
    assert all(torch.equal(merged.get_buffer(name), stored[name]) for name in names)


def test_a_vision_language_model_keeps_its_processor(tmp_path: Path) -> None:
    engine = make_engine(make_vision_model_dir(tmp_path / "model"))
    train(engine)
    engine.save(tmp_path / "actor", TRAINED)
    target = model_merger.merge(tmp_path / "actor", tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    for name, tensor in engine.named_tensors():
        torch.testing.assert_close(merged.get_parameter(name).data, tensor, rtol=0, atol=0)
    assert model_merger.compare(tmp_path / "actor", target) == len(list(merged.parameters()))
    assert load_processor(str(target)).image_processor.patch_size == 4


@pytest.mark.parametrize("head", ["value", "classifier"])
def test_heads_of_vision_language_models_are_merged(head: str, tmp_path: Path) -> None:
    engine = make_engine(make_vision_model_dir(tmp_path / "model"), head=head)
    engine.save(tmp_path / "critic", TRAINED)
    target = model_merger.merge(tmp_path / "critic", tmp_path / "merged")
    tensors = dict(engine.named_tensors())
    assert model_merger.compare(tmp_path / "critic", target) == len(tensors)
    again = dict(make_engine(str(target), head=head, trained=False).named_tensors())
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_critic_is_merged_with_its_head(tiny_model_dir: str, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, head="value")
    engine.train_batch(policy_batch(), value_loss, want=VALUES, micro=WHOLE)
    engine.save(tmp_path / "critic", TRAINED)
    model_merger.merge(tmp_path / "critic", tmp_path / "merged")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.equal(critic.score.weight, engine.module.model.score.weight)
    assert critic.score.weight.abs().sum() > 0


def test_the_type_of_the_weights_can_be_chosen(tiny_model_dir: str, tmp_path: Path) -> None:
    make_engine(tiny_model_dir).save(tmp_path / "actor", TRAINED)
    model_merger.merge(tmp_path / "actor", tmp_path / "merged", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16
    assert model_merger.compare(tmp_path / "actor", tmp_path / "merged") > 0


def test_what_is_wrong_is_said(tiny_model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(tiny_model_dir)
    engine.save(tmp_path / "actor", TRAINED)
    assert run("merge", "--local_dir", str(tmp_path / "nowhere"), "--target_dir", str(tmp_path / "m")) == 1
    assert "there is no checkpoint directory" in capsys.readouterr().err
    assert run("merge", "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "actor")) == 2
    assert "is not empty" in capsys.readouterr().err
    model_merger.merge(tmp_path / "actor", tmp_path / "merged")
    train(engine)
    engine.save(tmp_path / "later", TRAINED)
    assert run("test", "--local_dir", str(tmp_path / "later"), "--test_hf_dir", str(tmp_path / "merged")) == 1
    assert "differs by up to" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run("merge", "--backend", "other", "--local_dir", "x", "--target_dir", "y")
    assert caught.value.code == 2
    assert not list(tmp_path.glob(".m*"))


def test_an_interrupted_export_leaves_nothing(
    tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine(tiny_model_dir).save(tmp_path / "actor", TRAINED)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_merger, "fsync_tree", fail)
    assert run("merge", "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "m")) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["actor"]


def test_megatron_checkpoints_are_read_from_their_export(
    tiny_model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(tiny_model_dir)
    train(engine)
    engine.save(tmp_path / "actor", TRAINED | {"hf_model"})
    words = ["merge", "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "m"), "--backend"]
    assert run(*words, "megatron") == 2
    assert "was written by fsdp2; use fsdp" in capsys.readouterr().err
    path = tmp_path / "actor" / "engine.json"
    marker = json.loads(path.read_text()) | {"engine": "megatron"}
    path.write_text(json.dumps(marker))
    shutil.rmtree(tmp_path / "actor" / "model")  # of another format there
    (tmp_path / "actor" / "model").mkdir()
    assert run(*words, "megatron") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    for name, tensor in engine.named_tensors():
        assert torch.equal(merged.get_parameter(name).data, tensor)
    path.write_text(json.dumps(marker | {"contents": ["model", "optimizer", "extra"]}))
    assert run(*words[:4], str(tmp_path / "n"), "--backend", "megatron") == 1
    assert "no export; save one with checkpoint.save_contents" in capsys.readouterr().err
