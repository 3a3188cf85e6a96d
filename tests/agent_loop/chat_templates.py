"""Chat templates of the shapes that model families use, and byte-level tokenizers with their control tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# ChatML; tools in the system turn, answers of tools as one turn of the user
QWEN25 = """
{%- if tools %}
<|im_start|>system
{{ messages[0]['content'] + '\\n' if messages[0]['role'] == 'system' else '' }}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0]['role'] == 'system' -%}
<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% endif -%}
{%- for message in messages %}
  {%- if message['role'] == 'tool' %}
    {%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- elif not (message['role'] == 'system' and loop.first) %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# the same, but thinking stays only behind the last turn of a real user
QWEN3 = """
{%- set state = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message['role'] == 'tool' %}
    {%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- elif message['role'] == 'assistant' and '</think>' in message['content'] and loop.index0 < state.last %}
    {{- '<|im_start|>assistant\\n' + message['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# headers; turns are trimmed; answers of tools are JSON strings
LLAMA3 = """{{ '<|begin_of_text|>' }}
{%- for message in messages %}
  {%- if message['role'] == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message['content'] | tojson) + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] | trim) + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# no system, no tools, user and model by turns
GEMMA = """{{ '<bos>' }}
{%- for message in messages %}
  {%- if message['role'] not in ('user', 'assistant') or (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate user/assistant') }}
  {%- endif %}
  {%- set role = 'model' if message['role'] == 'assistant' else 'user' %}
  {{- '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# no line breaks; all answers of tools in one block behind which the model goes on; thinking is always dropped
DEEPSEEK = """{{ '<｜begin▁of▁sentence｜>' }}
{%- set state = namespace(tools=false) %}
{%- for message in messages %}
  {%- if message['role'] == 'tool' %}
    {%- if not state.tools %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
    {%- set state.tools = true %}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
  {%- else %}
    {%- if state.tools %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'system' %}{{ message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' %}
      {%- set words = message['content'].split('</think>')[-1] %}
      {{- ('' if state.tools else '<｜Assistant｜>') + words + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- set state.tools = false %}
  {%- endif %}
{%- endfor %}
{%- if state.tools %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not state.tools %}{{ '<｜Assistant｜>' }}{% endif %}"""

CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: template, special tokens of which the first one ends a turn of the model
    "qwen2.5": (QWEN25, CHATML),
    "qwen3": (QWEN3, CHATML),
    "llama3": (
        LLAMA3,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "gemma": (GEMMA, ("<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>")),
    "deepseek": (
        DEEPSEEK,
        (
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
    ),
}
#: control tokens that are not special, as <tool_call> of Qwen
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
#: merges across what separates turns: the end of one word and the beginning of the next become one token
MERGES = [("Ċ", "Ċ"), (">", "Ċ"), ("e", "r"), ("a", "b"), ("ab", "Ċ"), ("Ċ", "<"), ("Ċ<", "t"), ("Ġ", "Ġ")]


@cache
def chat_tokenizer(name: str, *, merges: bool = True) -> Any:
    """A byte-level tokenizer of a family; with ``merges`` tokens reach over the borders of turns."""
    template, special = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chosen = MERGES if merges else []
    vocabulary = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in chosen)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(chosen)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Tokens of text with its control tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def control_ids(tokenizer: Any) -> set[int]:
    """All control tokens."""
    return set(tokenizer.get_added_vocab().values())
