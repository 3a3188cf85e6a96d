"""Agents that are shown images: in the prompt, and by tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent_loop.script import batch_of, config
from tests.fixtures.vision import COLOURS, make_image_processor, make_vision_tokenizer, png, square
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.batch import Row
from verl.agent_loop.runner import AgentLoopRunner
from verl.data.images import ImageReader
from verl.errors import ConfigError
from verl.models.vision import PromptImages
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse
from verl.utils.tokenizer import ImageTextProcessor
from verl.workers.rollout.types import Completion, GenerationRequest

TOKENIZER = make_vision_tokenizer()
START, END, IMAGE = TOKENIZER.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
READER = ImageReader(ImageTextProcessor(make_image_processor(), IMAGE))
RED, BLUE = square(COLOURS["red"], 16, 16), square(COLOURS["blue"], 8, 16)
LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def look() -> ToolResponse:
    """Show a picture."""
    return ToolResponse(text="see", image=[png(BLUE), RED])


def broken() -> ToolResponse:
    """Show something that is no picture."""
    return ToolResponse(text="see", image=[b"nothing"])


TOOLS = {tool.name: tool for tool in (function_tool()(look), function_tool()(broken))}


class Script:
    """Says one text after the other; its requests are kept."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        self.requests.append(request)
        ids = TOKENIZER(self.texts[len(self.requests) - 1], add_special_tokens=False)["input_ids"]
        return Completion(ids, [-0.1] * len(ids), "stop", 1)


def row(image: Any = RED, **fields: Any) -> Row:
    images = None if image is None else PromptImages.of(READER.read([image], Path()))
    parts: Any = [{"type": "text", "text": "a"}, *([{"type": "image"}] if images else [])]
    given = {"raw_prompt": [{"role": "user", "content": parts}], "raw_prompt_ids": [1, 2], "images": images, **fields}
    if images is None:
        given["raw_prompt"] = [{"role": "user", "content": "a"}]
    return Row("one", {"temperature": 1.0, "seed": 5}, given)


def run(script: Script, rows: list[Row] | None = None, *, reader: Any = READER, **settings: Any) -> Any:
    runner = AgentLoopRunner(
        config(multi_turn={"format": "hermes", **settings}), TOKENIZER, tools=TOOLS, image_reader=reader
    )
    return asyncio.run(runner.run(rows or [row()], script))


def test_the_model_is_shown_the_images_of_prompt_and_tools() -> None:
    # the model writes a placeholder itself, which is text like any other
    script = Script(f"<|image_pad|>{LOOK}<|end|>", "blue<|end|>")
    (done,) = run(script)
    first, second = script.requests
    assert done.aborted is None, done.info
    assert first.prompt_ids.count(IMAGE) == 4
    assert first.images.grid_thw.tolist() == [[1, 4, 4]]
    output = done.trajectory.last
    context = [*output.prompt_ids, *output.response_ids]
    assert second.prompt_ids == context[: len(second.prompt_ids)]
    assert second.images.grid_thw.tolist() == [[1, 4, 4], [1, 4, 2], [1, 4, 4]]
    assert second.images.keys[0] == second.images.keys[2] == first.images.keys[0] != second.images.keys[1]
    for start, count in zip(second.images.starts, (4, 2, 4), strict=True):
        assert context[start - 1 : start + count + 1] == [START, *[IMAGE] * count, END]
    tail = TOKENIZER.decode(context[second.images.starts[2] + 4 : len(second.prompt_ids)])
    assert tail == "<|vision_end|>see<|end|><|assistant|>"
    assert context.count(IMAGE) == 4 + 1 + 2 + 4
    given = [token for token, mine in zip(output.response_ids, output.response_mask, strict=True) if not mine]
    assert given.count(IMAGE) == 6


def test_training_rows_get_the_images_of_tools_behind_those_of_the_prompt() -> None:
    with_tool, without = run(Script(f"{LOOK}<|end|>", "b<|end|>"))[0], run(Script("c<|end|>"))[0]
    shared = READER.read([RED], Path())
    batch = batch_of(
        [with_tool, without, with_tool],
        prompt_length=40,
        response_length=80,
        columns={"multi_modal_inputs": _column([shared, shared, None])},
    )
    column = batch.non_tensor_batch["multi_modal_inputs"]
    assert column[1] is shared
    assert column[0]["pixel_values"][0] is shared["pixel_values"]
    images = PromptImages.of(column[0])
    assert images.grid_thw.tolist() == [[1, 4, 4], [1, 4, 2], [1, 4, 4]]
    ids = batch.batch["input_ids"][0][batch.batch["attention_mask"][0].bool()]
    positions = [images.starts[n] + k for n, count in enumerate((4, 2, 4)) for k in range(count)]
    assert torch.nonzero(ids == IMAGE).flatten().tolist() == positions
    torch.testing.assert_close(images.pixel_values[16:24], READER.read([BLUE], Path())["pixel_values"])
    # a row whose prompt has no image of its own
    assert len(column[2]["pixel_values"]) == 1


def _column(values: list[Any]) -> Any:
    from verl.data.collate import object_array

    return object_array(values)


def test_states_with_different_pictures_differ() -> None:
    red, again, blue = (
        run(Script("c<|end|>"), [row(image)])[0].trajectory.columns["state_hashes"]
        for image in (RED, RED, square(COLOURS["blue"], 16, 16))
    )
    assert red == again != blue


def test_a_model_that_reads_text_is_told_and_so_is_what_cannot_be_opened() -> None:
    script = Script(f"{LOOK}<|end|>", "b<|end|>")
    (done,) = run(script, [row(None)], reader=None)
    assert "Error: the answer has images, and only text can be shown" in TOKENIZER.decode(
        done.trajectory.last.response_ids
    )
    assert script.requests[1].images is None
    (done,) = run(Script('<tool_call>{"name": "broken", "arguments": {}}</tool_call><|end|>', "b<|end|>"))
    assert "Error: image 0 cannot be decoded" in TOKENIZER.decode(done.trajectory.last.response_ids)
    assert done.info["counts"]["tool_failures/bad_image"] == 1


def test_images_that_do_not_fit_end_the_conversation() -> None:
    (done,) = run(Script(f"{LOOK}<|end|>", "b<|end|>"), [row()])
    assert done.trajectory.last.overlong is False
    runner = AgentLoopRunner(
        config(multi_turn={"format": "hermes"}, response_length=len(TOKENIZER(f"{LOOK}<|end|>")["input_ids"]) + 9),
        TOKENIZER,
        tools=TOOLS,
        image_reader=READER,
    )
    (done,) = asyncio.run(runner.run([row()], Script(f"{LOOK}<|end|>")))
    assert done.trajectory.last.overlong
    assert IMAGE not in done.trajectory.last.response_ids


class TextLoop(AgentLoopBase):
    """Says nothing of images."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise AssertionError


def test_a_loop_that_reads_text_gets_no_images(tmp_path: Path) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: text\n  _target_: {__name__}.TextLoop\n")
    runner = AgentLoopRunner(config(agent={"agent_loop_config_path": str(path)}), TOKENIZER, image_reader=READER)
    with pytest.raises(ConfigError, match="agent loop 'text' reads text alone"):
        asyncio.run(runner.run([row(agent_name="text")], Script()))
