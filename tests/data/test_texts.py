"""Texts that models read: the same from every file format, with the tokenizer's frame, and with every turn's end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.config import DataConfig, SFTDataConfig
from verl.config.preference import PreferenceDataConfig
from verl.data import RLHFDataset
from verl.data.preference_dataset import PreferenceDataset
from verl.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, conversation_tokens
from verl.workers.roles.reward_model import RewardModelWorker

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|observation|>"]
# a turn ends where the next one begins, as in GLM's template
GLM = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ 'CALL ' + call.function.name + ' ' + call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# the same with a line break before the next turn
BREAKS = GLM.replace("{% endfor %}{% endfor %}", "{% endfor %}{{ '\\n' }}{% endfor %}")
# marks around the words alone
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "ok"},
]


def tokenizer_with(template: str | None = None, *, frame: str = "<s> $A") -> PreTrainedTokenizerFast:
    """All bytes; the post-processor frames text as many base models' tokenizers do."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = template
    return tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- the same text from every format ----


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name: str, *properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {p: {"type": "string"} for p in properties},
        "required": [*properties],
    }
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def conversation(*calls: dict[str, Any], answer: str = "done") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": list(calls)},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": answer},
    ]


ROWS = [
    {"messages": conversation(call("add", a="1")), "tools": [schema("add", "a")]},
    {"messages": conversation(call("weather", city="1"), call("add", a="2")), "tools": [schema("weather", "city")]},
    {"messages": conversation(call("none")), "tools": [schema("none"), schema("deep", "x")]},
    {"messages": conversation(call("deep", x={"inner": [{"p": "1"}, {"q": "2"}]})), "tools": [schema("deep", "x")]},
]


def test_tool_calls_and_schemas_are_the_same_text_from_json_lines_and_parquet(tmp_path: Path) -> None:
    # `x` is text in no row and a mapping in one, so that Arrow has a type for it
    tokenizer = tokenizer_with(GLM)
    texts = [
        [tokenizer.decode(data[i]["input_ids"]) for i in range(len(ROWS))]
        for data in (
            MultiTurnSFTDataset(write(tmp_path / f"tools{suffix}", ROWS), tokenizer, SFTDataConfig(max_length=1024))
            for suffix in (".jsonl", ".parquet")
        )
    ]
    assert texts[0] == texts[1]
    assert 'CALL add {"a": "1"}<' in texts[1][0]
    assert 'CALL weather {"city": "1"}CALL add {"a": "2"}<' in texts[1][1]
    assert "CALL none {}<" in texts[1][2]
    assert 'CALL deep {"x": {"inner": [{"p": "1"}, {"q": "2"}]}}<' in texts[1][3]
    assert "null" not in "".join(texts[1])


def test_rows_of_prompts_are_the_same_from_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "x",
            "prompt": row["messages"][:3],
            "reward_model": {"ground_truth": "1"} if number % 2 else {"ground_truth": "1", "style": "rule"},
            "extra_info": {"tools_kwargs": {name: {"create_kwargs": {name: number}}}, f"only_{number}": [{"a": 1}]},
        }
        for number, (row, name) in enumerate(zip(ROWS, ("add", "weather", "none", "deep"), strict=True))
    ]
    tokenizer, config = tokenizer_with(GLM), DataConfig(max_prompt_length=256)
    left, right = (
        RLHFDataset(write(tmp_path / f"rows{suffix}", rows), tokenizer, config) for suffix in (".jsonl", ".parquet")
    )
    for number, row in enumerate(rows):
        for name in (
            "raw_prompt_ids",
            "raw_prompt",
            "extra_info",
            "tools_kwargs",
            "interaction_kwargs",
            "reward_model",
        ):
            assert json.dumps(left[number][name], sort_keys=True) == json.dumps(right[number][name], sort_keys=True)
        assert right[number]["extra_info"] == row["extra_info"]


def test_arguments_as_json_text_keep_their_nulls(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}]
    rows = [{"messages": conversation(*calls)}, {"messages": conversation()}]
    data = MultiTurnSFTDataset(write(tmp_path / "a.parquet", rows), tokenizer_with(GLM), SFTDataConfig(max_length=1024))
    assert '{\\"a\\": null}' in tokenizer_with().decode(data[0]["input_ids"])


def test_the_case_of_two_tools(tmp_path: Path) -> None:
    """The rows of a report: Parquet taught the model to write the other tool's argument as null."""
    rows = [
        {"messages": conversation(call(name, **{argument: "1"})), "tools": [schema(name, argument)]}
        for name, argument in (("add", "a"), ("weather", "city"))
    ]
    tokenizer = tokenizer_with(GLM)
    for suffix in (".jsonl", ".parquet"):
        data = MultiTurnSFTDataset(write(tmp_path / f"a{suffix}", rows), tokenizer, SFTDataConfig(max_length=1024))
        item = data[0]
        loss = tokenizer.decode(item["input_ids"][item["loss_mask"].bool()])
        assert loss == '\nCALL add {"a": "1"}<|observation|>\ndone</s>'
        assert '"properties": {"a": {"type": "string"}}' in tokenizer.decode(item["input_ids"])


# ---- the frame of text without a template ----

PLAIN = {"data_source": "x", "prompt": "abc", "response": "d", "chosen": "d", "rejected": "ee"}


@pytest.mark.parametrize(("frame", "framed"), [("<s> $A", [1, "abc"]), ("$A </s>", ["abc", 2]), ("$A", ["abc"])])
def test_text_without_a_template_is_what_the_tokenizer_makes_of_it(
    tmp_path: Path, frame: str, framed: list[Any]
) -> None:
    tokenizer = tokenizer_with(frame=frame)
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcde"]
    wanted = [token for part in framed for token in (letters[:3] if part == "abc" else [part])]
    assert tokenizer("abc")["input_ids"] == wanted
    path = write(tmp_path / "a.jsonl", [PLAIN])
    prompts = RLHFDataset(path, tokenizer, DataConfig(max_prompt_length=len(wanted)))  # the frame counts
    assert prompts[0]["raw_prompt_ids"] == wanted
    assert len(RLHFDataset(write(tmp_path / "b.jsonl", [PLAIN] * 2), tokenizer, DataConfig(max_prompt_length=9))) == 2

    example = SFTDataset(path, tokenizer, SFTDataConfig())[0]
    assert example["input_ids"].tolist() == [*wanted, letters[3], 2]  # the answer has no frame of its own
    assert example["loss_mask"].tolist() == [0] * len(wanted) + [1, 1]

    pair = PreferenceDataset(path, tokenizer, PreferenceDataConfig())[0]
    assert [side.tolist() for side in pair["chosen"]] == [wanted, [letters[3], 2]]
    assert [side.tolist() for side in pair["rejected"]] == [wanted, [letters[4], letters[4], 2]]


def test_a_rendered_text_gets_no_second_frame(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("{{ bos_token }}" + GLM)
    path = write(tmp_path / "a.jsonl", [PLAIN])
    for ids in (
        RLHFDataset(path, tokenizer, DataConfig(max_prompt_length=64))[0]["raw_prompt_ids"],
        SFTDataset(path, tokenizer, SFTDataConfig(max_length=64))[0]["input_ids"].tolist(),
        PreferenceDataset(path, tokenizer, PreferenceDataConfig(max_length=64))[0]["chosen"][0].tolist(),
    ):
        assert ids[:2] == [1, 3]
        assert ids.count(1) == 1


def test_a_reward_model_reads_prompts_without_a_template() -> None:
    worker = object.__new__(RewardModelWorker)
    worker.max_length = 64
    worker.tokenizer = tokenizer_with()
    assert worker._token_ids(worker._chat("ab", "c"), None) == worker.tokenizer("abc")["input_ids"]
    worker.tokenizer = tokenizer_with("{{ bos_token }}" + GLM)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    for prompt in ("ab", chat[:1]):
        ids = worker._token_ids(worker._chat(prompt, "c"), None)
        assert ids == worker.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert ids.count(1) == 1


def test_framed_prompts_are_measured_as_they_are(tmp_path: Path) -> None:
    rows = [PLAIN, {**PLAIN, "prompt": "abcd"}]
    config = DataConfig(max_prompt_length=4, filter_overlong_prompts=True)
    assert len(RLHFDataset(write(tmp_path / "a.jsonl", rows), tokenizer_with(), config)) == 1
    assert len(RLHFDataset(write(tmp_path / "b.jsonl", rows), tokenizer_with(frame="$A"), config)) == 2


# ---- the end of every turn ----


def learned(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    ids, mask = conversation_tokens(tokenizer, messages, **options)
    runs: list[list[int]] = []
    for previous, token, wanted in zip([0, *mask], ids, mask, strict=False):
        if wanted:
            if not previous:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_the_next_roles_token_ends_a_turn() -> None:
    tokenizer = tokenizer_with(GLM)
    assert learned(tokenizer, TALK) == ["\nyo<|user|>", "\nok</s>"]
    tools = [*TALK[:1], {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}, *TALK[1:]]
    assert learned(tokenizer, tools) == ["\nx<|observation|>", "\nyo<|user|>", "\nok</s>"]
    # what a sequence holds is the template's text, with the end behind its last turn
    ids, _ = conversation_tokens(tokenizer, TALK)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False) + "</s>"


def test_a_turn_that_ends_before_a_line_break_learns_both() -> None:
    assert learned(tokenizer_with(BREAKS), TALK) == ["\nyo\n<|user|>", "\nok</s>"]


def test_a_conversation_that_goes_on_after_its_last_answer_ends_it_too() -> None:
    assert learned(tokenizer_with(GLM), TALK[:3]) == ["\nyo<|user|>"]


def test_answers_of_the_same_role_follow_each_other() -> None:
    assert learned(tokenizer_with(GLM), [*TALK[:2], *TALK[3:]]) == ["\nyo<|assistant|>\nok</s>"]


def test_marks_around_the_words_alone_learn_the_end_as_well() -> None:
    assert learned(tokenizer_with(MARKED), TALK) == ["yo<|user|>", "ok</s>"]


def test_pairs_learn_the_end_of_their_last_turn(tmp_path: Path) -> None:
    row = {"prompt": TALK[:3], "chosen": "ok", "rejected": [{"role": "assistant", "content": "no"}]}
    tokenizer = tokenizer_with(GLM)
    pair = PreferenceDataset(write(tmp_path / "a.jsonl", [row]), tokenizer, PreferenceDataConfig(max_length=64))[0]
    assert [tokenizer.decode(pair[side][1]) for side in ("chosen", "rejected")] == ["\nok</s>", "\nno</s>"]
