"""Images in supervised and preference training, and in generation from a data set."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests.fixtures.vision import COLOURS, make_image_processor, make_vision_model_dir, png, square
from tests.models.images import model_arguments
from tests.trainer import test_generation, test_preference, test_sft
from tests.workers.rollout.helpers import missing_package
from verl.config.load import load_config
from verl.errors import ConfigError, DataError
from verl.models.vision import ImageTokens
from verl.trainer import main_eval, preference_trainer, sft_trainer
from verl.trainer.main_generation import run_generation
from verl.utils.distributed import free_port

COLOUR = list(COLOURS.values())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_vision_model_dir(tmp_path_factory.mktemp("vision"))


@pytest.fixture(autouse=True)
def _log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))


def picture(number: int) -> dict[str, Any]:
    return {"bytes": png(square(COLOUR[number % 3], (8, 16, 24)[number % 3], 8 + 8 * (number % 2))), "path": None}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


# ---- supervised --------------------------------------------------------------------------------------------------


def conversations() -> list[dict[str, Any]]:
    """Two turns, each with images or none; the first and the fifth have the same image and other words."""
    rows = []
    for number in range(8):
        shown = [picture(number % 4), picture(number + 1)][: number % 3]
        marks = ["<image>" * (number % 3 > 0), "<image>" * (number % 3 > 1)]
        talk = [
            ("user", f"{marks[0]}{'abcd'[: 1 + number % 4]}"),
            ("assistant", "efgh"[: 1 + number % 3]),
            ("user", f"x{marks[1]}"),
            ("assistant", "hg"[: 1 + number % 2]),
        ]
        rows.append({"messages": [{"role": r, "content": c} for r, c in talk], "images": shown})
    return rows


class Plain:
    """Plain Transformers: a model, and examples one at a time."""

    def __init__(self, model_dir: str) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, attn_implementation="eager")
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.tokens = ImageTokens.of(self.model.config)
        self.processor = make_image_processor()

    def log_probs(self, text: str, images: list[dict[str, Any]], wanted: list[str]) -> torch.Tensor:
        """Of the tokens of each of the ``wanted`` pieces, which follow each other in ``text`` with others between."""
        from verl.data.images import ImageReader
        from verl.utils.tokenizer import ImageTextProcessor

        reader = ImageReader(ImageTextProcessor(self.processor, self.tokens.token_id))
        inputs = reader.read(images, Path()) if images else None
        ids: list[int] = []
        picked: list[int] = []
        rest = text
        for piece in [*wanted, None]:
            before, found, rest = rest.partition(piece) if piece is not None else (rest, "", "")
            ids += self.tokenizer(before)["input_ids"]
            part = self.tokenizer(found)["input_ids"]
            picked += [len(ids) + number for number in range(len(part))]
            ids += part
        if inputs is not None:
            copies = reader.copies(ids, inputs["image_grid_thw"])
            starts = [sum(copies[:number]) for number in range(len(copies) + 1)]
            ids, picked = reader.expand(ids, inputs["image_grid_thw"]), [starts[number] for number in picked]
        given = torch.tensor([ids])
        shown = model_arguments(given, inputs, self.tokens.token_id)
        logits = torch.log_softmax(self.model(input_ids=given, **shown).logits[0].float(), -1)
        return torch.stack([logits[place - 1, ids[place]] for place in picked])


def plain_sft_loss(plain: Plain, rows: list[dict[str, Any]]) -> torch.Tensor:
    values = []
    for row in rows:
        text, wanted = "", []
        for message in row["messages"]:
            content = message["content"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
            text += f"<|{message['role']}|>{content}<|end|>"
            if message["role"] == "assistant":
                wanted.append(f"{content}<|end|>")
        # a wanted piece is looked for behind the turn's opening alone
        values.append(plain.log_probs(text, row["images"], wanted))
    return -torch.cat(values).mean()


def sft_config(model_dir: str, file: str, root: Path, **more: Any) -> Any:
    settings = {"data__multiturn__enable": True, "data__max_length": 64, "data__shuffle": False, **more}
    return test_sft.config(model_dir, (file, file), root, **settings)


def test_supervised_steps_are_those_of_plain_transformers(model_dir: str, tmp_path: Path) -> None:
    rows = conversations()
    file = write(tmp_path / "train.parquet", rows)
    plain = Plain(model_dir)
    want = plain_sft_loss(plain, rows)
    want.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    for number, split in enumerate(
        [
            {},
            {"data__micro_batch_size_per_gpu": 4},
            {"data__use_dynamic_bsz": True, "data__max_token_len_per_gpu": 70},
            {"data__pad_mode": "right"},
        ]
    ):
        trainer = sft_trainer.build_trainer(sft_config(model_dir, file, tmp_path / str(number), **split))
        assert trainer.validate()["val/loss"] == pytest.approx(want.item(), rel=1e-5)
        metrics = trainer.train_step(next(iter(trainer.train_loader)))
        assert metrics["train/loss"] == pytest.approx(want.item(), rel=1e-5), split
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4), split


@pytest.mark.dist
def test_two_ranks_give_the_numbers_of_one(model_dir: str, tmp_path: Path) -> None:
    """Five validation rows on two ranks: a batch without an image, or without any row, on one of them."""
    files = write(tmp_path / "train.parquet", conversations()), write(tmp_path / "val.parquet", conversations()[:5])

    def run(name: str, world: int, **changes: Any) -> list[dict[str, Any]]:
        settings = {"data__multiturn__enable": True, "data__max_length": 64, "data__train_batch_size": 4, **changes}
        more = {"trainer__total_training_steps": 2, "trainer__test_freq": 1, "trainer__n_gpus_per_node": world}
        words = test_sft.overrides(model_dir, files, tmp_path / name, **settings, **more)
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={world}", f"--master_port={free_port()}"]
        command = [sys.executable, *(launcher if world > 1 else []), "-m", "verl.trainer.fsdp_sft_trainer", *words]
        log = tmp_path / f"{name}.jsonl"
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return test_sft.logged(log)

    one, two = run("one", 1), run("two", 2)
    shared = run("shared", 2, model__fsdp_config__ulysses_sequence_parallel_size=2)
    for name in ("train/loss", "val/loss", "train/grad_norm"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=2e-5), name
        assert [m[name] for m in shared] == pytest.approx([m[name] for m in one], rel=2e-5), name


def test_a_supervised_model_learns_to_look_and_loads_in_transformers(model_dir: str, tmp_path: Path) -> None:
    """The answer is in the image alone."""
    rows = [
        {
            "prompt": "<image>",
            "response": "rgb"[number % 3],
            "images": [{"bytes": png(square(COLOUR[number % 3], 8, 8))}],
        }
        for number in range(6)
    ]
    file = write(tmp_path / "train.parquet", rows)
    config = test_sft.config(
        model_dir,
        (file, file),
        tmp_path / "run",
        data__train_batch_size=6,
        trainer__total_training_steps=40,
        optim__lr=5e-3,
    )
    final = sft_trainer.run_sft(config)
    assert final is not None
    assert final["train/loss"] < 0.05
    plain = Plain(str(tmp_path / "run" / "huggingface"))
    for number, answer in enumerate("rgb"):
        text = f"<|user|><|vision_start|><|image_pad|><|vision_end|><|end|><|assistant|>{answer}<|end|>"
        got = plain.log_probs(text, [{"bytes": png(square(COLOUR[number], 8, 8))}], [f"{answer}<|end|>"])
        assert got.sum() > -0.2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "response": "a<image>"}, None),
        ({"prompt": "no mark", "response": "a"}, r"row \d: the messages have 0 place\(s\) for images.*1 image"),
        ({"prompt": "<image>" + "a" * 70, "response": "a"}, r"row \d: .*more than data.max_length=64.*are not cut"),
    ],
)
def test_supervised_rows_that_do_not_fit(
    model_dir: str, tmp_path: Path, row: dict[str, Any], message: str | None
) -> None:
    file = write(tmp_path / "train.parquet", [{**row, "images": [picture(0)]}] * 8)
    config = test_sft.config(model_dir, (file, file), tmp_path, data__max_length=64, data__truncation="left")
    trainer = sft_trainer.build_trainer(config)
    if message is None:  # a mark in an answer is text: images are the prompt's
        next(iter(trainer.train_loader))
        return
    with pytest.raises(DataError, match=message):
        next(iter(trainer.train_loader))


def test_an_image_in_an_assistants_turn_is_refused(model_dir: str, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<image>"}]
    file = write(tmp_path / "train.parquet", [{"messages": talk, "images": [picture(0)]}] * 8)
    trainer = sft_trainer.build_trainer(sft_config(model_dir, file, tmp_path))
    with pytest.raises(DataError, match=r"row \d: an image stands in a turn of the assistant"):
        next(iter(trainer.train_loader))


def test_engines_and_models_that_read_none_are_told_at_start_up(
    model_dir: str, tiny_model_dir: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "train.parquet", conversations())
    with pytest.raises(ConfigError, match=r"model\.strategy=megatron: trains on text alone; use fsdp2"):
        sft_trainer.build_trainer(sft_config(model_dir, file, tmp_path, model__strategy="megatron"))
    with pytest.raises(DataError, match="the model has no processor of images"):
        sft_trainer.build_trainer(sft_config(tiny_model_dir, file, tmp_path))


# ---- preference --------------------------------------------------------------------------------------------------


def pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{'<image>' * (number % 3)}{'abc'[: 1 + number % 3]}"}],
            "chosen": "efgh"[: 1 + number % 3],
            "rejected": "hg"[: 1 + number % 2],
            "images": [picture(number), picture(number + 1)][: number % 3],
        }
        for number in range(8)
    ]


def preference_config(model_dir: str, file: str, root: Path, objective: str, **more: Any) -> Any:
    return test_preference.config(model_dir, (file, file), root, objective, data__max_length=48, **more)


def test_dpo_on_images_is_that_of_plain_transformers(model_dir: str, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.parquet", pairs())
    trainer = preference_trainer.build_trainer(preference_config(model_dir, file, tmp_path / "run", "dpo"))
    plain = Plain(model_dir)

    def score(row: dict[str, Any], side: str) -> torch.Tensor:
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        text = f"<|user|>{row['prompt'][0]['content'].replace('<image>', mark)}<|end|><|assistant|>"
        return plain.log_probs(f"{text}{row[side]}<|end|>", row["images"], [f"<|assistant|>{row[side]}<|end|>"])[
            1:
        ].sum()

    sides = ("chosen", "rejected")
    with torch.no_grad():
        reference = [[score(row, side) for side in sides] for row in pairs()]
    losses = []
    for row, before in zip(pairs(), reference, strict=True):
        chosen, rejected = (
            test_preference.BETA * (score(row, side) - was) for side, was in zip(sides, before, strict=True)
        )
        losses.append(-logsigmoid(chosen - rejected))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    metrics = trainer.train_step(next(iter(trainer.train_loader)))
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert trainer.validate()["val/accuracy"] > 0.5


def test_a_reward_model_learns_to_look(model_dir: str, tmp_path: Path) -> None:
    """Which answer is better is in the image alone."""
    rows = [
        {
            "prompt": "<image>",
            "chosen": "ab"[number % 2],
            "rejected": "ba"[number % 2],
            "sure": 0.0,
            "images": [{"bytes": png(square(COLOUR[number % 2], 8, 8)), "path": None}],
        }
        for number in range(8)
    ]
    file = write(tmp_path / "pairs.parquet", rows)
    more = {"trainer__total_training_steps": 30, "optim__lr": 5e-3}
    config = preference_config(model_dir, file, tmp_path / "run", "reward_model", **more)
    final = preference_trainer.run_preference(config)
    assert final is not None
    assert final["train/accuracy"] == 1.0
    again = preference_config(str(tmp_path / "run" / "huggingface"), file, tmp_path / "again", "reward_model")
    assert preference_trainer.build_trainer(again).validate()["val/accuracy"] == 1.0


# ---- generation --------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write(
        tmp_path / "prompts.parquet",
        [
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": f"{'<image>' * (number % 3)}say {number}"}],
                "images": [picture(number), picture(number + 1)][: number % 3],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
            }
            for number in range(7)
        ],
    )


def generation(model_dir: str, prompts: str, output: Path, *more: str) -> Any:
    return test_generation.config(model_dir, prompts, output, "data.max_prompt_length=40", *more)


def test_generation_sees_the_images_and_goes_on_after_the_last_whole_batch(
    model_dir: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_generation(generation(model_dir, prompts, tmp_path / "whole.jsonl", "data.batch_size=5"))
    found = test_generation.responses(tmp_path / "whole.jsonl")
    asked = test_generation.interrupt_the_second_batch(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run_generation(generation(model_dir, prompts, tmp_path / "a.parquet"))
    run_generation(generation(model_dir, prompts, tmp_path / "a.parquet"))
    assert asked == [0, 3, 3, 6]
    assert test_generation.responses(tmp_path / "a.parquet") == found

    rows = pq.read_table(prompts).to_pylist()
    # images of a JSONL file are addresses that readers of images take
    written = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert base64.b64decode(written[1]["images"][0]["bytes"].partition(",")[2]) == rows[1]["images"][0]["bytes"]
    again = tmp_path / "again.jsonl"
    made = {"responses", "response_lengths"}
    again.write_text("".join(json.dumps({k: v for k, v in row.items() if k not in made}) + "\n" for row in written))
    monkeypatch.undo()
    run_generation(generation(model_dir, str(again), tmp_path / "b.jsonl"))
    assert test_generation.responses(tmp_path / "b.jsonl") == found

    for number, row in enumerate(rows):
        row["images"] = [picture(number + 1 + place) for place, _ in enumerate(row["images"])]
    run_generation(generation(model_dir, write(tmp_path / "other.parquet", rows), tmp_path / "c.jsonl"))
    others = test_generation.responses(tmp_path / "c.jsonl")
    assert [a == b for a, b in zip(found, others, strict=True)] == [row["images"] == [] for row in rows]

    (tmp_path / "reward.py").write_text(test_generation.REWARD)
    result = main_eval.evaluate(
        load_config(
            main_eval.EvalConfig,
            "evaluation",
            [f"data.path={tmp_path}/a.parquet", f"custom_reward_function.path={tmp_path}/reward.py"],
        )
    )
    assert result["squares"]["prompts"] == 7


@pytest.mark.vllm
@pytest.mark.skipif(
    bool(missing_package("vllm")) or importlib.util.find_spec("torchvision") is None,
    reason="vLLM reads images beside torchvision alone",
)
def test_greedy_answers_of_vllm_are_those_of_hf(prompts: str, tmp_path: Path) -> None:
    directory = make_vision_model_dir(tmp_path / "model", hidden=64, heads=2, vision_width=32)
    greedy = ["rollout.temperature=0", "data.n_samples=1", "rollout.max_num_seqs=16"]
    for name in ("hf", "vllm"):
        output = tmp_path / f"{name}.jsonl"
        run_generation(generation(directory, prompts, output, *greedy, f"rollout.name={name}"))
    assert test_generation.responses(tmp_path / "vllm.jsonl") == test_generation.responses(tmp_path / "hf.jsonl")


def test_what_generation_cannot_show_is_told_at_once(
    model_dir: str, tiny_model_dir: str, prompts: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"\n  - rollout\.name=sglang: is not given images; use hf or vllm"):
        run_generation(generation(model_dir, prompts, tmp_path / "a.jsonl", "rollout.name=sglang"))
    with pytest.raises(DataError, match="the model has no processor of images"):
        run_generation(generation(tiny_model_dir, prompts, tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"row 1, column 'prompt': .*prompts with images are not cut"):
        run_generation(
            generation(model_dir, prompts, tmp_path / "a.jsonl", "data.max_prompt_length=8", "data.truncation=left")
        )
