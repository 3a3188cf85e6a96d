"""Runs whose prompts have images: the same numbers however they are cut, learning, and what is refused at start-up."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.e2e.test_equivalence import comparable
from tests.fixtures.vision import (
    COLOURS,
    make_image_processor,
    make_vision_model_dir,
    make_vision_tokenizer,
    png,
    square,
)
from tests.models.images import model_arguments
from tests.workers.rollout.helpers import missing_package
from verl.config import ModelConfig
from verl.data.images import ImageReader
from verl.errors import ConfigError
from verl.models.loading import load_classifier
from verl.single_controller.ray import fields
from verl.utils.tokenizer import ImageTextProcessor

pytestmark = pytest.mark.e2e


COLOUR_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the colour's letter, a little for another colour's, so that a random policy finds the letters."""
    return 1.0 if solution_str == ground_truth else 0.1 if solution_str in "rgb" and solution_str else 0.0
'''


def write_rows(path: Path, count: int, seed: int) -> None:
    """Squares of three colours and several sizes; every fourth row has two of them, every fifth none."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        shown = 0 if number % 5 == 4 else 2 if number % 4 == 3 else 1
        sizes = [(rng.choice((8, 16, 24)), rng.choice((8, 16))) for _ in range(shown)]
        images = [{"bytes": png(square(rng.choice(list(COLOURS.values())), *size)), "path": None} for size in sizes]
        text = "<image>" * shown + "0123456789"[: rng.randint(1, 9)]
        rows.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": text}],
                "images": images,
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"index": number},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and rows for it, as overrides."""
    directory = tmp_path_factory.mktemp("squares")
    model = make_vision_model_dir(directory / "model")
    write_rows(directory / "train.parquet", 20, seed=0)
    write_rows(directory / "val.parquet", 6, seed=1)
    return [
        f"data.train_files={directory}/train.parquet",
        f"data.val_files={directory}/val.parquet",
        "data.max_prompt_length=48",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
    ]


PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_mini_batch_size=4"]
CUTS = {
    "local, packed, dynamic": [
        "trainer.controller=local",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
    ],
    "ray, 2 workers, packed, dynamic, checkpointing": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
    ],
    "ray, 2 workers, padded, one row at a time": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ],
    "ray, 2 workers that share sequences": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
    ],
}


@pytest.mark.usefixtures("ray_local")
def test_every_cut_gives_the_same_numbers(
    squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    reference = run_training(*squares, "trainer.controller=local", "actor_rollout_ref.model.use_remove_padding=False")
    assert [row["step"] for row in reference] == [1, 2, 3]
    for row in reference:
        assert row["data"]["actor/grad_norm"] > 0
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
    for name, cut in CUTS.items():
        rows = run_training(*squares, *cut)
        for expected, actual in zip(reference, rows, strict=True):
            assert comparable(actual) == pytest.approx(comparable(expected), rel=1e-5, abs=1e-6), (name, actual["step"])


@pytest.mark.usefixtures("ray_local")
def test_pixels_are_put_once_for_all_stages_of_a_step(
    squares: list[str], run_training: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation, three forward passes and two updates read them."""
    put: list[tuple[int, int]] = []
    read: list[int] = []
    real_put, real_place = fields.FieldStore._put, fields.FieldStore.place_inside

    def watched_put(self: fields.FieldStore, tensors: Any) -> Any:
        put.extend((id(value), value.nbytes) for name, value in tensors.items() if name == "tensor")
        return real_put(self, tensors)

    def watched_place(self: fields.FieldStore, batch: Any) -> fields.Shard:
        column = batch.non_tensor_batch.get("multi_modal_inputs", [])
        read.append(
            sum(value.nbytes for row in {id(row): row for row in column if row}.values() for value in row.values())
        )
        return real_place(self, batch)

    monkeypatch.setattr(fields, "LARGE", 1)
    monkeypatch.setattr(fields.FieldStore, "_put", watched_put)
    monkeypatch.setattr(fields.FieldStore, "place_inside", watched_place)
    run_training(*squares, *PPO, "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1")
    assert len(dict(put)) == len(put) > 0
    assert sum(read) >= 6 * sum(size for _, size in put)


@pytest.mark.usefixtures("ray_local")
def test_served_generation_gives_the_same_numbers(
    squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    """Images travel to rollout servers, each once for all samples of its prompt."""
    short = [*squares, "trainer.total_training_steps=1"]
    (reference,) = run_training(*short, "trainer.controller=local")
    (served,) = run_training(*short, "actor_rollout_ref.rollout.mode=async")
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
        assert served["data"][name] == pytest.approx(reference["data"][name], rel=1e-5), name


with_vllm = pytest.mark.skipif(
    bool(missing_package("vllm")) or importlib.util.find_spec("torchvision") is None,
    reason="vLLM reads images beside torchvision alone",
)


def vllm_settings(directory: Path) -> list[str]:
    """vLLM, with a model of sizes that it serves."""
    model = make_vision_model_dir(directory / "model", hidden=64, heads=2, vision_width=32)
    return [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_num_seqs=16",
    ]


@pytest.mark.vllm
@with_vllm
@pytest.mark.usefixtures("ray_local")
def test_vllm_generates_on_one_and_two_ranks(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    settings = [*squares, *vllm_settings(tmp_path), "trainer.total_training_steps=2"]
    one = run_training(*settings, "trainer.controller=local")
    two = run_training(*settings, "trainer.n_gpus_per_node=2")
    for expected, actual in zip(one, two, strict=True):
        assert expected["data"]["training/rollout_probs_diff_max"] < 1e-5
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert actual["data"][name] == pytest.approx(expected["data"][name], rel=1e-4, abs=1e-6), name


def test_a_policy_learns_to_look(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    """The colour is in the image alone: without seeing it a third of the answers are right at most."""
    rng = random.Random(0)
    for name, count in (("train", 64), ("val", 30)):
        rows = []
        for _ in range(count):
            colour = rng.choice(list(COLOURS))
            size = (rng.choice((8, 16)), 8)
            rows.append(
                {
                    "data_source": "colours",
                    "prompt": [{"role": "user", "content": "<image>"}],
                    "images": [png(square(COLOURS[colour], *size))],
                    "reward_model": {"style": "rule", "ground_truth": colour[0]},
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    (tmp_path / "reward.py").write_text(COLOUR_REWARD)
    rows = run_training(
        *squares,
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "data.train_batch_size=32",
        "data.max_response_length=1",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.entropy_coeff=0.1",  # or one letter wins before the images matter
        "trainer.controller=local",
        "trainer.total_training_steps=90",
        "trainer.test_freq=90",
    )
    scores = [row["data"]["critic/score/mean"] for row in rows]
    assert scores[0] < 0.1
    assert sum(scores[-5:]) / 5 > 0.8, scores
    assert rows[-1]["data"]["val-core/colours/reward/mean@1"] > 0.8


LOOP = """
from verl.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.conversation import open_conversation
from verl.models.vision import PromptImages
from PIL import Image
from pathlib import Path


class Shown(AgentLoopBase):
    reads_images = True

    async def run(self, sampling_params, **kwargs):
        conversation = open_conversation(self.context, kwargs["raw_prompt"], (), images=kwargs["images"])
        for turn in range(2):
            token_trajectory = conversation.token_trajectory
            shown = token_trajectory.images
            done = await self.generate(token_trajectory.context, sampling_params, max_tokens=3, images=shown)
            conversation.add_sampled(done)
            colour = (40 * turn, 90, 5 * (kwargs["sample_index"] % 7))
            picture = Image.new("RGB", (16, 8), colour)
            images = PromptImages.of(self.context.image_reader.read([picture], Path()))
            if turn or not conversation.add([{"role": "user", "content": [{"type": "image"}]}], images=images):
                break
        return AgentLoopOutput.from_token_trajectory(conversation.token_trajectory)
"""
AGENT_CUTS = [
    ["trainer.n_gpus_per_node=2"],
    ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.mode=async"],
]


def agent_settings(directory: Path) -> list[str]:
    """Two steps with the loop of :data:`LOOP`."""
    (directory / "loop.py").write_text(LOOP)
    (directory / "loops.yaml").write_text(f"- name: shown\n  _target_: {directory}/loop.py:Shown\n")
    return [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={directory}/loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=shown",
        "actor_rollout_ref.rollout.multi_turn.on_history_rewrite=append",
        "data.max_response_length=16",
        "trainer.total_training_steps=2",
    ]


@pytest.mark.usefixtures("ray_local")
def test_agents_are_shown_images_between_turns(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    """Every second turn is an answer to an image of the sample's own: generation and training see the same."""
    settings = [*squares, *agent_settings(tmp_path)]
    reference = run_training(*settings, "trainer.controller=local", "actor_rollout_ref.model.use_remove_padding=False")
    for row in reference:
        assert row["data"]["training/rollout_probs_diff_max"] < 1e-4
        assert row["data"]["num_turns/mean"] >= 2
    for cut in AGENT_CUTS:
        for expected, actual in zip(reference, run_training(*settings, *cut), strict=True):
            for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
                assert actual["data"][name] == pytest.approx(expected["data"][name], rel=1e-5, abs=1e-6), (cut, name)


@pytest.mark.vllm
@with_vllm
@pytest.mark.usefixtures("ray_local")
def test_agents_on_vllm_are_shown_images_between_turns(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    settings = [*squares, *agent_settings(tmp_path), *vllm_settings(tmp_path)]
    for place in (["trainer.controller=local"], ["actor_rollout_ref.rollout.mode=async"]):
        for row in run_training(*settings, *place):
            assert row["data"]["training/rollout_probs_diff_max"] < 1e-5
            assert row["data"]["num_turns/mean"] >= 2


def test_agent_loops_answer_images_as_generation_without_them(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    settings = [*squares, "trainer.controller=local", "trainer.total_training_steps=2"]
    reference = run_training(*settings)
    stopped = [
        f"trainer.default_local_dir={tmp_path}/carried",
        "trainer.save_freq=2",
        "actor_rollout_ref.rollout.over_sample_rate=0.25",
        "actor_rollout_ref.rollout.partial_rollout=True",
        "actor_rollout_ref.rollout.max_staleness=4",
    ]
    for agents in (["actor_rollout_ref.rollout.multi_turn.enable=True"], stopped):
        rows = run_training(*settings, *agents)
        if agents is stopped:  # other prompts, and tokens of older weights
            assert rows[0]["data"]["training/rollout_probs_diff_max"] < 1e-4
            assert rows[-1]["data"]["over_sampling/started"] > 0
            # what is carried, images included, is part of the checkpoint
            more = ["trainer.total_training_steps=3", "trainer.resume_mode=auto"]
            assert [row["step"] for row in run_training(*settings, *stopped, *more)] == [3]
            continue
        for expected, actual in zip(reference, rows, strict=True):
            for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
                assert actual["data"][name] == pytest.approx(expected["data"][name], rel=1e-5, abs=1e-6), name


PPO_CUTS = [
    ["trainer.n_gpus_per_node=2", "critic.model.use_remove_padding=False", "critic.ppo_micro_batch_size_per_gpu=1"],
    [
        "trainer.controller=local",
        "critic.model.enable_gradient_checkpointing=True",
        "critic.use_dynamic_bsz=True",
        "critic.ppo_max_token_len_per_gpu=96",
    ],
]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_local")
def test_ppo_gives_the_same_numbers_however_its_critic_is_cut(
    squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    reference = run_training(*squares, *PPO, "trainer.controller=local")
    assert reference[-1]["data"]["critic/grad_norm"] > 0
    for cut in PPO_CUTS:
        rows = run_training(*squares, *PPO, *cut)
        for expected, actual in zip(reference, rows, strict=True):
            assert comparable(actual) == pytest.approx(comparable(expected), rel=1e-5, abs=1e-6), (cut, actual["step"])


@pytest.mark.slow
def test_a_critic_learns_to_look(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    """The reward is a number that only the image tells: values that do not depend on it explain nothing."""
    rng = random.Random(0)
    rows = []
    for _ in range(64):
        colour = rng.choice(list(COLOURS))
        rows.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image>"}],
                "images": [png(square(COLOURS[colour], 8, 8))],
                "reward_model": {"style": "rule", "ground_truth": str(list(COLOURS).index(colour))},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_):\n    return float(ground_truth)\n"
    )
    metrics = run_training(
        *squares,
        *PPO,
        f"data.train_files={tmp_path}/train.parquet",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "data.train_batch_size=32",
        "data.max_response_length=2",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "critic.ppo_mini_batch_size=8",
        "critic.optim.lr=3e-3",
        "trainer.controller=local",
        "trainer.total_training_steps=40",
    )
    explained = [row["data"]["critic/vf_explained_var"] for row in metrics]
    assert explained[0] < 0.1
    assert sum(explained[-5:]) / 5 > 0.8, explained


def test_a_reward_model_sees_the_images(
    tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    """Scores are those of plain Transformers: the backbone and a linear head, at the conversation's last token."""
    directory = make_vision_model_dir(tmp_path / "reward", seed=7)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = torch.randn(1, 32)
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory)
    scorer = load_classifier(ModelConfig(path=directory))
    with torch.no_grad():
        scorer.score.weight.copy_(head)
    scorer.save_pretrained(directory)
    run_training(
        *squares,
        "trainer.controller=local",
        "trainer.total_training_steps=1",
        "reward_model.enable=True",
        f"reward_model.model.path={directory}",
        "reward_model.max_length=64",
        f"trainer.rollout_data_dir={tmp_path}/dump",
    )
    samples = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").open()]
    tokenizer = make_vision_tokenizer()
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    reader = ImageReader(ImageTextProcessor(make_image_processor(), image))
    train = next(s.partition("=")[2] for s in squares if s.startswith("data.train_files"))
    rows = {row["extra_info"]["index"]: row for row in pq.read_table(train).to_pylist()}
    shown = 0
    for sample in samples:
        row = rows[int(sample["gts"])]
        shown += bool(row["images"])
        inputs = reader.read(row["images"], tmp_path) if row["images"] else None
        words = row["prompt"][0]["content"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        output = tokenizer.decode(tokenizer(sample["output"])["input_ids"], skip_special_tokens=True)
        ids = tokenizer(f"<|user|>{words}<|end|><|assistant|>{output}<|end|>")["input_ids"]
        given = torch.tensor([reader.expand(ids, inputs["image_grid_thw"]) if inputs else ids])
        with torch.no_grad():
            states = policy.model(input_ids=given, **model_arguments(given, inputs, image)).last_hidden_state
        assert sample["score"] == pytest.approx(float(states[0, -1] @ head[0]), abs=1e-4)
    assert shown


REFUSED = {
    "actor.strategy=megatron": (["actor_rollout_ref.actor.strategy=megatron"], "strategy=megatron: trains on text"),
    "sglang": (["actor_rollout_ref.rollout.name=sglang"], "rollout.name=sglang: is not given images"),
    "forks": (
        [
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.on_history_rewrite=fork",
        ],
        "on_history_rewrite=fork: conversations with images are not forked",
    ),
    "programs": (
        [
            "actor_rollout_ref.rollout.agent.openai_agent.path={program}",
            "actor_rollout_ref.rollout.agent.timeout_s=60",
            "actor_rollout_ref.rollout.mode=async",
        ],
        "agent loop 'openai_agent' reads text alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start_up(
    name: str, tmp_path: Path, squares: list[str], run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    wrong, words = REFUSED[name]
    (tmp_path / "program.py").write_text("async def run(base_url, api_key, row):\n    return 0.0\n")
    wrong = [override.format(program=tmp_path / "program.py") for override in wrong]
    with pytest.raises(ConfigError, match="the data has images") as caught:
        run_training(*squares, *wrong)
    assert words in str(caught.value)


def test_a_critic_that_reads_no_images_is_refused(
    squares: list[str], tiny_model_dir: str, run_training: Callable[..., list[dict[str, Any]]]
) -> None:
    with pytest.raises(ConfigError, match=r"critic\.model\.path=.*images of a 'qwen2' model are not read here"):
        run_training(*squares, *PPO, f"critic.model.path={tiny_model_dir}")
