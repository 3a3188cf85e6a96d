"""Images in the model's input: positions, placeholders, features, and rows whose images differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText

from tests.models.families import make_config
from tests.models.family_checks import close, save_model
from tests.models.images import IMAGE, example_rows, image_batch, image_prompt, make_images, model_arguments, pad_rows
from tests.workers.engine.reference import (
    LOG_PROBS,
    POLICY,
    TEMPERATURE,
    VALUES,
    make_engine,
    policy_loss,
    run_reference,
    value_loss,
)
from verl.errors import ConfigError, DataError
from verl.models.packing import build_layout
from verl.models.vision import ImageTokens, PromptImages, prompt_images
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.batching import as_tensordict
from verl.workers.engine.images import images_of, with_images

TOKENS = ImageTokens.of(make_config("qwen2_5_vl"))
WHOLE = MicroBatching()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def test_what_a_configuration_says() -> None:
    assert ImageTokens(IMAGE, merge=2, patch_values=3 * 2 * 4 * 4) == TOKENS
    assert ImageTokens.of(make_config("qwen2")) is None


def test_positions_by_hand() -> None:
    # two tokens of text, 4 x 6 patches = 2 x 3 tokens, one token of text
    ids = np.array([5, 6, *[IMAGE] * 6, 7])
    positions, places, ahead = TOKENS.positions(ids, np.array([[1, 4, 6]]))
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert places.tolist() == [2, 3, 4, 5, 6, 7]
    assert ahead == 6 - 9  # the next token, number 9, has position 6


def test_positions_are_those_of_transformers() -> None:
    model = AutoModelForImageTextToText.from_config(make_config("qwen2_5_vl")).model
    for prompt, images in zip(*example_rows(), strict=True):
        ids = torch.tensor([prompt])
        shown = {k: v for k, v in model_arguments(ids, images).items() if k != "pixel_values"}
        shown.setdefault("mm_token_type_ids", torch.zeros_like(ids))
        want, delta = model.get_rope_index(ids, **shown)
        grid = np.empty((0, 3), np.int64) if images is None else images["image_grid_thw"].numpy()
        positions, _, ahead = TOKENS.positions(np.array(prompt), grid)
        assert positions.tolist() == want[:, 0].tolist()
        assert ahead == int(delta)


@pytest.mark.parametrize(
    "ids", [[5, IMAGE, IMAGE, IMAGE], [5, IMAGE, IMAGE, 6, IMAGE, IMAGE], [5, 6], [5, IMAGE, IMAGE, IMAGE, 7, IMAGE]]
)
def test_placeholders_that_are_not_the_images_ones(ids: list[int]) -> None:
    with pytest.raises(DataError, match="image 0 of a row needs 4 placeholder tokens"):
        TOKENS.positions(np.array(ids), np.array([[1, 4, 4]]))


def test_equal_images_are_one() -> None:
    one, again, other = make_images((4, 4), seed=1), make_images((4, 4), seed=1), make_images((4, 4), seed=2)
    first, second, third, none = prompt_images([one, again, other, None])
    assert first.keys == second.keys != third.keys
    assert none is None
    rows = with_images(TensorDict({"x": torch.zeros(5)}, batch_size=[5]), [one, None, again, other, {}])
    assert rows["image_number"].tolist() == [0, -1, 0, 1, -1]
    with pytest.raises(DataError, match=r"holds \['pixel_values_videos'\]"):
        PromptImages.of({"pixel_values_videos": torch.zeros(1, 1)})
    with pytest.raises(DataError, match=r"as many patches as image_grid_thw .* says \(16\)"):
        PromptImages.of({**one, "pixel_values": torch.zeros(15, 96)})


def test_packed_rows_share_prompts_only_with_equal_images() -> None:
    prompts, images = example_rows()  # 0 and 1 are one prompt, 2 the same text with another image
    rows = with_images(
        TensorDict(pad_rows(prompts[:3], [[5, 6], [7, 8], [9, 10]]), batch_size=[3]), [images[0], images[1], images[2]]
    )
    layout = build_layout(
        rows["input_ids"],
        rows["attention_mask"],
        rows["position_ids"],
        rows["response_mask"],
        packed=True,
        images=images_of(rows, TOKENS),
    )
    assert layout.tokens == 2 * len(prompts[0]) + 3 * 2
    assert layout.position_ids.shape == (4, 1, layout.tokens)
    assert layout.images.grid_thw.tolist() == [[1, 4, 6], [1, 4, 6]]
    assert layout.input_ids[0, layout.images.index].tolist() == [IMAGE] * 12
    torch.testing.assert_close(
        layout.images.pixel_values, torch.cat([images[0]["pixel_values"], images[2]["pixel_values"]])
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro", [MicroBatching(size=1), MicroBatching(max_tokens=40), MicroBatching(max_tokens=64)])
def test_every_cut_gives_the_same_numbers(path: str, packed: bool, micro: MicroBatching) -> None:
    batch, images = image_batch()
    want = run_reference(path, dict(batch.items()), steps=1, images=images)
    engine = make_engine(path, packed=packed)
    got = engine.forward(batch, POLICY, micro=micro, temperature=TEMPERATURE)
    for name in POLICY:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)
    metrics = engine.train_batch(batch, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE)
    close(metrics.values_by_name(), {"loss": want["loss"][0], "grad_norm": want["grad_norm"][0]})
    for name, parameter in engine.named_tensors():  # of Adam's first step, which has the size of lr for any gradient
        torch.testing.assert_close(parameter, want["params"][0][name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_images_in_responses(path: str, packed: bool) -> None:
    """Rows that share a prompt with its image and go on with other images, the same one, or none; a sampled placeholder
    before an image is text.
    """
    asked, first, second = make_images((4, 4), seed=1), make_images((2, 4), seed=2), make_images((4, 2), (2, 2), seed=3)
    prompt = image_prompt(asked, (6, 9))
    answers = [
        [5, *image_prompt(first, (2, 3))],
        [5, *image_prompt(first, (2, 3))],
        [6, *image_prompt(second, (1, 2, 3))],
    ]
    answers += [[7, 8, 9], [5, IMAGE, *image_prompt(first, (2, 3))]]
    more = [first, first, second, None, first]
    rows = pad_rows([prompt] * 5, answers)
    images = [
        asked
        if one is None
        else {name: torch.cat([asked[name], one[name]]) for name in ("pixel_values", "image_grid_thw")}
        for one in more
    ]
    want = run_reference(
        path,
        {k: v[:4] for k, v in rows.items()} | {"advantages": rows["response_mask"][:4].float()},
        steps=0,
        images=images[:4],
    )["log_probs"]
    start = len(prompt) + answers[4][2:].index(IMAGE) + 2
    images[4] = {**images[4], "image_starts": torch.tensor([prompt.index(IMAGE), start])}
    engine = make_engine(path, packed=packed)
    batch = with_images(TensorDict(rows, batch_size=[5]), images)
    for micro in (WHOLE, MicroBatching(size=2), MicroBatching(max_tokens=80)):
        got = engine.forward(batch, LOG_PROBS, micro=micro, temperature=TEMPERATURE)["log_probs"]
        torch.testing.assert_close(got[:4], want, rtol=1e-5, atol=1e-5)
    if packed:
        layout = engine._layout(batch)
        assert layout.tokens == len(prompt) + sum(map(len, answers))  # the prompt is there once
        assert layout.images.grid_thw.tolist() == [[1, 4, 4], [1, 2, 4], [1, 2, 4], [1, 4, 2], [1, 2, 2], [1, 2, 4]]
    # as supervised training lays rows out: everything after the first token is response
    spread = {k: v for k, v in rows.items() if k != "response_mask"}
    spread["response_mask"] = torch.cat([torch.zeros(5, len(prompt) - 1).long(), rows["response_mask"]], 1)
    got = engine.forward({**spread, "multi_modal_inputs": images}, LOG_PROBS, micro=WHOLE, temperature=TEMPERATURE)
    torch.testing.assert_close(got["log_probs"][:4, len(prompt) - 1 :], want, rtol=1e-5, atol=1e-5)


def test_a_placeholder_before_an_image_needs_its_start() -> None:
    ids = np.array([5, IMAGE, 6, *[IMAGE] * 4, 7])
    with pytest.raises(DataError, match="needs 4 placeholder tokens"):
        TOKENS.positions(ids, np.array([[1, 4, 4]]))
    positions, places, _ = TOKENS.positions(ids, np.array([[1, 4, 4]]), [3])
    assert places.tolist() == [3, 4, 5, 6]
    assert positions[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5]
    for wrong in (2, 4):
        with pytest.raises(DataError, match="needs 4 placeholder tokens"):
            TOKENS.positions(ids, np.array([[1, 4, 4]]), [wrong])


@pytest.mark.parametrize("packed", [True, False])
def test_values_see_the_images(path: str, packed: bool, tmp_path: Path) -> None:
    """A critic of a vision-language model, trained a step, is Transformers' backbone with a linear head."""
    batch, images = image_batch()
    engine = make_engine(path, head="value", packed=packed)
    for _ in range(2):  # the head begins at zero, and only then do gradients reach the backbone
        metrics = engine.train_batch(batch, value_loss, want=VALUES, micro=MicroBatching(max_tokens=64))
    assert metrics.values_by_name()["grad_norm"] > 0
    got = engine.forward(batch, VALUES, micro=MicroBatching(size=2))["values"]
    tensors = dict(engine.named_tensors())
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    unread = model.model.load_state_dict(
        {name.removeprefix("model."): value for name, value in tensors.items() if not name.startswith("score.")}
    )
    assert not unread.missing_keys
    width = batch["response_mask"].shape[1]
    for row, shown in enumerate(images):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real][None]
        count = int(real[-width:].sum())
        with torch.no_grad():
            states = model.model(input_ids=ids, **model_arguments(ids, shown)).last_hidden_state[0]
        want = states[-count - 1 : -1] @ tensors["score.weight"][0] + tensors["score.bias"][0]
        mask = batch["response_mask"][row, :count].bool()
        torch.testing.assert_close(got[row, :count][mask], want[mask], rtol=1e-5, atol=1e-5)
    assert abs(got[0, 0] - got[2, 0]) > 1e-3  # the same text with another image
    engine.save(tmp_path, frozenset({"hf_model"}))
    again = make_engine(str(tmp_path / "huggingface"), head="value", trained=False)
    torch.testing.assert_close(again.forward(batch, VALUES, micro=WHOLE)["values"], got, rtol=1e-5, atol=1e-5)


def test_a_sampled_placeholder_is_text(path: str) -> None:
    images = make_images((4, 4), seed=6)
    prompt = image_prompt(images, (2, 3))
    rows = with_images(TensorDict(pad_rows([prompt], [[5, IMAGE, 6]]), batch_size=[1]), [images])
    got = make_engine(path).forward(rows, LOG_PROBS, micro=WHOLE)["log_probs"][0]
    # Transformers takes every placeholder for an image's, so the reference gets embeddings and positions
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    ids = torch.tensor([[*prompt, 5, IMAGE, 6]])
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        features = torch.cat(model.model.get_image_features(**_renamed(images)).pooler_output)
        embeds[0, 3:7] = features
        positions = torch.from_numpy(TOKENS.positions(ids[0].numpy(), images["image_grid_thw"].numpy())[0])[:, None]
        logits = model(inputs_embeds=embeds, position_ids=positions).logits[0]
    want = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def _renamed(images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"pixel_values": images["pixel_values"], "image_grid_thw": images["image_grid_thw"]}


def test_text_alone_trains_the_same_with_or_without_a_vision_tower_pass(path: str) -> None:
    """The pass that keeps ranks together changes no number: weights of the tower get a gradient of zero."""
    rows = pad_rows([[5, 6, 7], [8, 9]], [[10, 11], [12]])
    rows["advantages"] = torch.tensor([[1.0, -1.0], [0.5, 0.0]])
    want = run_reference(path, rows, steps=1)
    engine = make_engine(path)
    metrics = engine.train_batch(
        TensorDict(rows, batch_size=[2]), policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE
    )
    close(metrics.values_by_name(), {"loss": want["loss"][0], "grad_norm": want["grad_norm"][0]})


def test_images_for_a_model_or_a_processor_that_does_not_fit(path: str, tmp_path: Path) -> None:
    batch, _ = image_batch()
    with pytest.raises(ConfigError, match="the model reads none"):
        make_engine(save_model("qwen2", tmp_path)).forward(batch, LOG_PROBS, micro=WHOLE)
    with pytest.raises(ConfigError, match="this training engine reads text alone"):
        as_tensordict(batch)  # as the Megatron engine takes it
    images = {"pixel_values": torch.zeros(4, 50), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    rows = with_images(TensorDict(pad_rows([[5, IMAGE, 6]], [[7]]), batch_size=[1]), [images])
    with pytest.raises(DataError, match="patches of 50 numbers, and the model reads 96"):
        make_engine(path).forward(rows, LOG_PROBS, micro=WHOLE)


def test_adapters_learn_in_the_vision_tower_too(path: str) -> None:
    batch, _ = image_batch()
    engine = make_engine(path, model={"lora_rank": 2, "lora_alpha": 4})
    trained = {name for name, parameter in engine.module.model.named_parameters() if parameter.requires_grad}
    assert any("visual" in name for name in trained)
    assert any("language_model" in name for name in trained)
    before = engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"]
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    after = engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"]
    assert not torch.allclose(before, after, atol=1e-3)
    plain = make_engine(path, trained=False)
    plain.module.model.load_state_dict(dict(engine.named_tensors()), strict=False)  # merged, as generation gets them
    torch.testing.assert_close(plain.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"], after, rtol=1e-4, atol=1e-4)
