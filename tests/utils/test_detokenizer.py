"""Text that comes in pieces is the text that comes at once, and costs no more for being long."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from verl.utils.detokenizer import Detokenizer
from verl.utils.tokenizer import text_without_specials

TEXTS = [
    "hello world, it is 12 o'clock.",
    "数学は楽しい 😀👩‍👩‍👧‍👦 é",
    "  leading, and trailing  ",
    "a\n\nb\t",
    "'s n't . ?",
]


def byte_level() -> Any:
    """Byte-level BPE with few merges, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    made.add_tokens([AddedToken("<mark>", special=True)])
    return made


def byte_fallback() -> Any:
    """As SentencePiece models are: a space begins a word, and unknown characters are bytes."""
    letters = {chr(c) for c in range(33, 127)} | {"▁"}
    words = ["▁hello", "▁world", "▁is", "▁it", "lo"]
    bytes_of = [f"<0x{n:02X}>" for n in range(256)]
    vocab = {token: number for number, token in enumerate(["<unk>", "</s>", *bytes_of, *sorted(letters), *words])}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    made.add_tokens([AddedToken("<mark>", special=True)])
    return made


MADE = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def pieces_of(tokenizer: Any, ids: list[int], sizes: list[int], keep: tuple[str, ...] = ()) -> list[str]:
    stream, pieces, start = Detokenizer(tokenizer, keep), [], 0
    for size in sizes:
        pieces.append(stream.feed(ids[start : start + size]))
        start += size
    return [*pieces, stream.feed(ids[start:], last=True)]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_joined_are_the_whole_text(name: str, text: str, size: int) -> None:
    tokenizer = MADE[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, [size] * (len(ids) // size))
    assert "".join(pieces) == text_without_specials(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", MADE)
def test_special_tokens_are_left_out_or_kept(name: str) -> None:
    tokenizer = MADE[name]
    mark, eos = tokenizer.convert_tokens_to_ids("<mark>"), tokenizer.eos_token_id
    word = tokenizer.encode(" hello", add_special_tokens=False)
    ids = [*word, mark, eos, mark, *word, mark, *word, eos]
    for keep in ((), ("<mark>",)):
        pieces = pieces_of(tokenizer, ids, [1] * len(ids), keep)
        assert "".join(pieces) == text_without_specials(tokenizer, ids, keep=keep)
    assert Detokenizer(tokenizer).feed([mark] * 3) == ""


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_in_any_pieces(data: st.DataObject) -> None:
    tokenizer = MADE[data.draw(st.sampled_from(sorted(MADE)))]
    text = data.draw(st.text(max_size=40))
    ids = tokenizer.encode(text, add_special_tokens=False)
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    assert "".join(pieces_of(tokenizer, ids, sizes)) == text_without_specials(tokenizer, ids)


@given(st.lists(st.integers(0, 299), max_size=60), st.lists(st.integers(1, 5), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_tokens_of_a_byte_level_model(ids: list[int], sizes: list[int]) -> None:
    """A policy may write bytes that are no text."""
    tokenizer = MADE["byte_level"]
    ids = [number for number in ids if number < len(tokenizer)]
    assert "".join(pieces_of(tokenizer, ids, sizes)) == text_without_specials(tokenizer, ids)


def test_bytes_that_never_become_a_character_do_not_wait_for_ever() -> None:
    tokenizer = MADE["byte_level"]
    broken = tokenizer.convert_tokens_to_ids("Ģ")  # a continuation byte
    stream = Detokenizer(tokenizer)
    sent = sum(len(stream.feed([broken])) for _ in range(1000))
    assert sent + len(stream.feed([], last=True)) == 1000
    assert len(stream._window) < 600


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = MADE["byte_level"]
    rng = random.Random(0)
    ids = [rng.randrange(33, 250) for _ in range(16384)]

    def seconds(count: int) -> float:
        started = time.process_time()
        stream = Detokenizer(tokenizer)
        for start in range(0, count, 32):
            stream.feed(ids[start : start + 32])
        return time.process_time() - started

    seconds(1024)
    short, long = min(seconds(1024) for _ in range(3)), seconds(16384)
    assert long < 16 * short * 4  # 16 times when linear, 256 times when not
