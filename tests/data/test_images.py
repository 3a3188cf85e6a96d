"""Rows with images: where they come from, where they stand, what they cost, what is wrong with them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.fixtures.tiny import make_tokenizer
from tests.fixtures.vision import (
    COLOURS,
    make_image_processor,
    make_vision_model_dir,
    make_vision_tokenizer,
    png,
    square,
)
from verl.config import DataConfig
from verl.data import RLHFDataset, collate_fn, create_dataset, has_images
from verl.data.images import ImageReader, as_values, with_image_parts
from verl.data.sft_dataset import SFTDataset
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.utils.tokenizer import ImageTextProcessor, load_processor

TOKENIZER = make_vision_tokenizer()
START, END, IMAGE = TOKENIZER.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
PROCESSOR = ImageTextProcessor(make_image_processor(), IMAGE)
RED = COLOURS["red"]


def row(content: Any, images: Any = None, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"data_source": "squares", "prompt": prompt, "images": images, **more}


def dataset(directory: Path, rows: list[dict[str, Any]], **config: Any) -> RLHFDataset:
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return RLHFDataset(str(path), TOKENIZER, DataConfig(**{"max_prompt_length": 40, **config}), PROCESSOR)


def of_bytes(*images: Any) -> list[dict[str, Any]]:
    """Images as Hugging Face's data sets store them."""
    return [{"bytes": png(image), "path": None} for image in images]


def test_a_mark_becomes_the_tokens_of_the_image(tmp_path: Path) -> None:
    data = dataset(tmp_path, [row("a<image>b", of_bytes(square(RED, 16, 24)))])
    item = data[0]
    # 16 x 24 pixels are 4 x 6 patches, of which 2 x 2 are a token
    user, end, assistant = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])
    a, b = TOKENIZER("ab")["input_ids"]
    assert item["raw_prompt_ids"] == [user, a, START, *[IMAGE] * 6, END, b, end, assistant]
    assert item["input_ids"].tolist()[-13:] == item["raw_prompt_ids"]
    assert item["attention_mask"].sum() == 13
    inputs = item["multi_modal_inputs"]
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert inputs["pixel_values"].shape == (24, 3 * 2 * 4 * 4)
    assert inputs["pixel_values"].dtype == torch.float32
    assert item["raw_prompt"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
        }
    ]
    assert "images" not in item
    assert has_images(data)


def test_patches_are_those_of_the_processor(tmp_path: Path) -> None:
    image = square(RED, 16, 16)
    inputs = dataset(tmp_path, [row("<image>", of_bytes(image))])[0]["multi_modal_inputs"]
    # by hand: the first patch of the first token is the upper left corner, the same in both (equal) frames
    mean, std = np.array(make_image_processor().image_mean), np.array(make_image_processor().image_std)
    corner = (np.asarray(image, np.float64)[:4, :4] / 255 - mean) / std
    want = np.repeat(corner.transpose(2, 0, 1)[:, None], 2, 1).reshape(-1)
    np.testing.assert_allclose(inputs["pixel_values"][0].numpy(), want, rtol=1e-5, atol=1e-5)


def test_every_form_of_an_image_gives_the_same(tmp_path: Path) -> None:
    image = square(RED)
    content = png(image)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(content)
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [
        image,
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "pictures/red.png"},
        {"image": content},
        "pictures/red.png",
        f"file://{tmp_path}/pictures/red.png",
        address,
    ]
    reader = ImageReader(PROCESSOR)
    want = reader.process([image])["pixel_values"]
    for form in forms:
        torch.testing.assert_close(reader.process(reader.open([form], tmp_path))["pixel_values"], want)
        assert reader.token_count([form], tmp_path) == 4


def test_colour_modes_and_camera_rotation_are_undone(tmp_path: Path) -> None:
    reader = ImageReader(PROCESSOR)
    assert [image.mode for image in reader.open([square(RED, mode=mode) for mode in ("RGBA", "L", "P")], tmp_path)] == [
        "RGB"
    ] * 3
    turned = square(RED, 16, 32)
    turned.getexif()[0x0112] = 6  # to be shown turned by 90 degrees
    path = tmp_path / "turned.jpg"
    turned.save(path, exif=turned.getexif())
    (opened,) = reader.open([str(path)], tmp_path)
    assert opened.size == (32, 16)


def test_rows_of_a_file_with_and_without_images(tmp_path: Path) -> None:
    images = of_bytes(square(RED, 8, 16), square(COLOURS["blue"], 24, 16))
    messages = [{"role": "system", "content": "look"}, {"role": "user", "content": "<image>and<image>?"}]
    data = dataset(tmp_path, [row(messages, images), row("text", []), row("more", None)])
    items = [data[number] for number in range(3)]
    assert items[0]["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 2], [1, 4, 6]]
    assert [item["multi_modal_inputs"] for item in items[1:]] == [None, None]
    assert items[0]["raw_prompt_ids"].count(IMAGE) == 2 + 6
    batch = DataProto.from_single_dict(collate_fn(items))
    repeated = batch.repeat(2, interleave=True)[[5, 0]]
    column = repeated.non_tensor_batch["multi_modal_inputs"]
    assert column[0] is None
    assert column[1] is items[0]["multi_modal_inputs"]


def test_parts_stand_for_marks(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]
    message = [{"role": "user", "content": parts}]
    got = dataset(tmp_path, [row(message, of_bytes(square(RED)))])[0]
    want = dataset(tmp_path, [row("<image>what?", of_bytes(square(RED)))])[0]
    assert got["raw_prompt_ids"] == want["raw_prompt_ids"]
    wrong = [{"role": "user", "content": [{"type": "audio", "text": "x"}]}]
    with pytest.raises(DataError, match="row 0.*message 0 has the part"):
        dataset(tmp_path, [row(wrong, of_bytes(square(RED)))])


def test_limits_on_pixels_change_the_number_of_tokens(tmp_path: Path) -> None:
    rows = [row("<image>", of_bytes(square(RED, 32, 32)))]
    assert dataset(tmp_path, rows)[0]["raw_prompt_ids"].count(IMAGE) == 16
    assert dataset(tmp_path, rows, image_max_pixels=256)[0]["raw_prompt_ids"].count(IMAGE) == 4
    small = [row("<image>", of_bytes(square(RED, 8, 8)))]
    assert dataset(tmp_path, small)[0]["raw_prompt_ids"].count(IMAGE) == 1
    assert dataset(tmp_path, small, image_min_pixels=256)[0]["raw_prompt_ids"].count(IMAGE) == 4
    with pytest.raises(ConfigError, match="image_min_pixels=2000 is more than data.image_max_pixels=1024"):
        dataset(tmp_path, rows, image_min_pixels=2000)


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_of_images_count_for_the_filter(tmp_path: Path, workers: int) -> None:
    wide = row("<image>", of_bytes(square(RED, 32, 32)), extra_info={"index": 0})
    small = row("<image>", of_bytes(square(RED, 16, 16)), extra_info={"index": 1})
    text = row("x" * 9, None, extra_info={"index": 2})
    many = [wide, small, text] * (1 if workers == 1 else 200)  # more than a chunk, so that processes are used
    limits = {"max_prompt_length": 12, "filter_overlong_prompts": True, "filter_overlong_prompts_workers": workers}
    data = dataset(tmp_path, many, **limits)
    assert len(data) == 2 * len(many) // 3
    assert [data[number]["index"] for number in range(2)] == [1, 2]
    # and it agrees with what is made of the rows
    assert max(len(data[number]["raw_prompt_ids"]) for number in range(2)) <= 12


def test_a_prompt_with_images_is_not_cut(tmp_path: Path) -> None:
    data = dataset(tmp_path, [row("<image>", of_bytes(square(RED, 32, 32)))], max_prompt_length=12, truncation="left")
    with pytest.raises(DataError, match="row 0.*21 tokens with those of its images.*not cut.*image_max_pixels"):
        data[0]


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("<image><image>", 1, r"row 0.*2 place\(s\) for images.*1 image"),
        ("no mark", 1, r"row 0.*0 place\(s\) for images.*1 image"),
        ("<image>", 0, r"row 0.*1 place\(s\) for images.*0 image"),
        ("<image><|image_pad|>", 1, r"row 0.*wrote 2 image token\(s\).*for 1 image"),
    ],
)
def test_marks_that_do_not_fit(tmp_path: Path, content: str, images: int, message: str) -> None:
    other = row("<image>", of_bytes(square(RED)))
    data = dataset(tmp_path, [row(content, of_bytes(*[square(RED)] * images)), other])
    with pytest.raises(DataError, match=message):
        data[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"not a picture", "image 0 cannot be decoded: UnidentifiedImageError"),
        ({"bytes": None, "path": None}, "image 0: a mapping with .*expected a value for 'bytes'"),
        ({"bytes": None, "path": "gone.png"}, "image 0: there is no file 'gone.png'"),
        ("https://example.com/a.png", "image 0: .*is an address; download"),
        ("data:image/png;base64,???", "image 0: a data: address"),
        (7, "image 0: a int; expected bytes"),
    ],
)
def test_images_that_cannot_be_read(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageReader(PROCESSOR).open([value], tmp_path)
    if value != b"not a picture":
        with pytest.raises(DataError, match=message.replace("decoded", "read")):
            ImageReader(PROCESSOR).token_count([value], tmp_path)


def test_what_cannot_be_shown_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row("<image>", of_bytes(square(RED)))]), path)
    with pytest.raises(DataError, match=r"has images.*no processor of images"):
        create_dataset(str(path), TOKENIZER, DataConfig())
    with pytest.raises(DataError, match="data.image_key='pictures': there is no such column"):
        create_dataset(str(path), TOKENIZER, DataConfig(image_key="pictures"), PROCESSOR)
    plain = make_tokenizer()
    plain.chat_template = None
    pq.write_table(pa.Table.from_pylist([{**row("x", of_bytes(square(RED))), "prompt": "<image>"}]), path)
    with pytest.raises(DataError, match="no chat template that says where they stand"):
        create_dataset(str(path), plain, DataConfig(), PROCESSOR)[0]
    with pytest.raises(DataError, match="has 'videos', which this data set does not read"):
        dataset(tmp_path, [row("x", None, videos=["a.mp4"])])[0]


def test_text_with_a_column_of_nothing_needs_no_processor(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row("<image> is a word here", [])]), path)
    data = create_dataset(str(path), make_tokenizer(), DataConfig())
    assert not has_images(data)
    assert "multi_modal_inputs" not in data[0]
    assert data[0]["raw_prompt"] == [{"role": "user", "content": "<image> is a word here"}]


def test_other_readers_say_what_they_do_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "response": "b", "images": of_bytes(square(RED))}]), path)
    with pytest.raises(DataError, match="has images .data.image_key='images'., and the model has no processor"):
        SFTDataset(str(path), TOKENIZER, {"prompt_key": "prompt", "response_key": "response"})
    path = tmp_path / "videos.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "response": "b", "videos": ["a.mp4"]}]), path)
    with pytest.raises(DataError, match="row 0: has 'videos', which supervised training does not read"):
        SFTDataset(str(path), TOKENIZER, {"prompt_key": "prompt", "response_key": "response"})[0]


def test_the_processor_comes_with_the_model(tmp_path: Path, tiny_model_dir: str) -> None:
    processor = load_processor(make_vision_model_dir(tmp_path))
    assert processor.image_token_id == IMAGE
    got = ImageReader(processor).process([square(RED)])["pixel_values"]
    torch.testing.assert_close(got, ImageReader(PROCESSOR).process([square(RED)])["pixel_values"])
    assert load_processor(tiny_model_dir) is None


def test_small_helpers() -> None:
    assert as_values(np.array(["a", "b"])) == ["a", "b"]
    assert as_values("a") == ["a"]
    with pytest.raises(DataError, match="1 place"):
        with_image_parts([{"role": "user", "content": "<image>"}], 2)
