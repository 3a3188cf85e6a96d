"""A byte-level chat tokenizer and a tiny causal language model, saved as a Hugging Face directory.

Small enough to train on one CPU core, yet an ordinary model: ``AutoTokenizer`` and ``AutoModelForCausalLM`` load it,
and every engine treats it like any other checkpoint.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TOOL_TAGS = ("<tool_call>", "</tool_call>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_tokenizer(max_length: int = 512) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, plus role, end-of-turn, padding and tool-call tokens.

    The characters are spelled as a byte-level BPE spells them (``Ġ`` for a space, ``Ċ`` for a newline): loading a
    Qwen2 directory rebuilds a byte-level tokenizer, which would silently lose raw space and newline tokens.
    Characters outside printable ASCII have no token.
    """
    characters = [{" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in string.printable[:95] + "\n"]
    vocabulary = {token: index for index, token in enumerate((PAD, END, *ROLES, *TOOL_TAGS, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=PAD,  # named, because a Qwen2 directory would otherwise gain a token outside the model's vocabulary
        eos_token=END,
        additional_special_tokens=list(ROLES),
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(TOOL_TAGS), special_tokens=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(
    path: str | Path,
    *,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    model_type: str = "qwen2",
    max_length: int = 512,
    tie_word_embeddings: bool = True,
    initializer_range: float = 0.02,
) -> int:
    """Save a randomly initialised model with its tokenizer.

    Args:
        path: directory to write; created if missing.
        hidden: width; the feed-forward width is three times that.
        seed: seed of the initialisation; the global random state is left as it was.
        model_type: ``qwen2``, ``qwen3`` or ``llama``.
        initializer_range: standard deviation of the weights; the usual 0.02 suits wide models, a narrow one learns
            several times faster from about ``hidden ** -0.5``.

    Returns:
        The number of parameters.
    """
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"model_type={model_type!r}: choose one of {', '.join(_ARCHITECTURES)}")
    tokenizer = make_tokenizer(max_length)
    config_cls, model_cls = _ARCHITECTURES[model_type]
    extra = {"head_dim": hidden // heads} if model_type == "qwen3" else {}
    config = config_cls(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=initializer_range,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_cls(config).to(torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())
