"""Tokens without text: never sampled by any engine, and of probability 0 in training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.fixtures.tiny import make_tiny_model_dir
from tests.workers.engine.reference import POLICY, TEMPERATURE, make_engine, policy_batch
from tests.workers.rollout.helpers import generate, hand_over, missing_package, random_prompts
from verl.config import FSDPConfig, ModelConfig, RolloutConfig
from verl.models.logprobs import LogitTransform, token_log_probs, token_sum_pi_squared
from verl.utils.tokenizer import load_tokenizer, textless_tokens, unsampled_tokens
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.types import Completion, SamplingParams

WHOLE = MicroBatching()
TOKENS, SURPLUS = 104, 60


def make_model_dir(directory: Path, surplus: int = SURPLUS, **settings: Any) -> str:
    """A model whose embedding has more rows than the tokenizer has tokens; these rows are likely ones."""
    path = make_tiny_model_dir(directory, **settings)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(TOKENS + surplus, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        model.get_input_embeddings().weight[TOKENS:] *= 2.0  # tied to the head: large logits, of either sign
    model.save_pretrained(path)
    return path


def plain(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def test_what_has_no_text(tmp_path: Path) -> None:
    words = {"<unk>": 0, "a": 1, "b": 2, "": 3, "c": 6}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>")
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    number = tokenizer.eos_token_id
    expected = sorted({3, 4, 5, *range(7, 12)} - {number})
    assert list(textless_tokens(tokenizer, 12)) == expected  # an empty text, holes, and rows behind the last token
    assert number not in textless_tokens(tokenizer, 12)  # special tokens have a text

    path = make_tiny_model_dir(tmp_path)
    assert textless_tokens(load_tokenizer(path), TOKENS) == ()
    assert unsampled_tokens(path, None, False, TOKENS + 2) == (TOKENS, TOKENS + 1)
    for file in Path(path).glob("tokenizer*"):
        file.unlink()
    assert unsampled_tokens(str(path), None, False, TOKENS + 3) == ()  # nothing to ask


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [None, 30])
def test_log_probs_and_gradients_are_those_of_the_smaller_vocabulary(chunk: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(14, 8, generator=generator)
    bias = torch.randn(14, generator=generator)
    targets = torch.tensor([0, 3, 5, 8, 11, 1])
    gone = [4, 9, 12, 13]  # a hole, and the end
    kept = [token for token in range(14) if token not in gone]
    results = []
    for weights, biases, goals, transform in (
        (weight, bias, targets, LogitTransform(1.5, softcap).without(gone, torch.device("cpu"))),
        (weight[kept], bias[kept], torch.tensor([kept.index(t) for t in targets]), LogitTransform(1.5, softcap)),
    ):
        h, w, b = (x.clone().requires_grad_() for x in (hidden, weights, biases))
        log_probs, entropies = token_log_probs(
            h, w, b, goals, temperature=0.7, transform=transform, entropy=True, chunk_numbers=chunk
        )
        (log_probs.sum() + 0.3 * entropies.sum()).backward()
        squares = token_sum_pi_squared(h, w, b, temperature=0.7, transform=transform, chunk_numbers=chunk)
        results.append((log_probs, entropies, squares, h.grad, w.grad, b.grad))
    (*got, got_w, got_b), (*want, want_w, want_b) = results
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((got_w[kept], got_b[kept]), (want_w, want_b))
    assert not got_w[gone].any()
    assert not got_b[gone].any()


def masked_log_probs(path: str, batch: dict[str, Tensor]) -> Tensor:
    """(B, R) log-probabilities of plain Transformers over tokens that have a text."""
    model, mask = plain(path), batch["response_mask"].bool()
    out = torch.zeros(mask.shape)
    for row in range(len(mask)):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real][None]
        count = int(real[-mask.shape[1] :].sum())
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -count - 1 : -1, :TOKENS]
        out[row, :count] = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, ids[0, -count:, None])[:, 0]
    return torch.where(mask, out, torch.zeros(()))


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False, "model_type": "llama"}])
def test_training_gives_them_no_probability(settings: dict[str, Any], tmp_path: Path) -> None:
    path, batch = make_model_dir(tmp_path, **settings), policy_batch(vocab=100)
    for model in ({}, {"lora_rank": 4}, {"verify": "always"}):
        engine = make_engine(path, model=model)
        got = engine.forward(batch, POLICY, micro=WHOLE, temperature=TEMPERATURE)["log_probs"]
        torch.testing.assert_close(got, masked_log_probs(path, batch), rtol=1e-5, atol=1e-5)
    untouched = FSDPEngine(ModelConfig(path=path), FSDPConfig(), None, device="cpu", renormalise=False)
    untouched.build()
    assert (untouched.forward(batch, POLICY, micro=WHOLE, temperature=TEMPERATURE)["log_probs"] <= got).all()


def test_a_full_vocabulary_changes_no_bit(tmp_path: Path) -> None:
    path, batch = make_model_dir(tmp_path, surplus=0), policy_batch(vocab=100)
    outputs = []
    for renormalise in (True, False):
        engine = FSDPEngine(ModelConfig(path=path), FSDPConfig(), None, device="cpu", renormalise=renormalise)
        engine.build()
        outputs.append(engine.forward(batch, POLICY, micro=WHOLE))
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in POLICY)


def rollout(name: str, path: str, **settings: Any) -> RolloutEngine:
    if reason := missing_package(name):
        pytest.skip(reason)
    section = {"name": name, "dtype": "float32", "prompt_length": 16, "response_length": 16, "max_num_seqs": 64}
    engine = get_rollout_class(name)(ModelConfig(path=path), RolloutConfig(**{**section, **settings}), device="cpu")
    asyncio.run(hand_over(engine, plain(path), live=False))
    return engine


@pytest.mark.parametrize(
    "name", ["hf", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_no_engine_samples_them(name: str, tmp_path: Path) -> None:
    heads = {"hidden": 64, "heads": 2, "kv_heads": 1}  # sizes that all engines serve
    path = make_model_dir(tmp_path, **heads)
    engine = rollout(name, path)
    prompts = random_prompts([3, 9, 5, 7], vocab=TOKENS)
    sampling = [SamplingParams(12, temperature=0.0, ignore_eos=True), SamplingParams(12, seed=1, ignore_eos=True)]
    sampling.append(SamplingParams(12, seed=2, ignore_eos=True, top_p=0.9, top_k=40, repetition_penalty=1.3))
    answers: list[Completion] = []
    for params in sampling:
        answers += generate(engine, prompts, params)
    assert all(token < TOKENS for answer in answers for token in answer.token_ids)
    model = plain(path)
    for prompt, answer in zip(prompts, answers[4:8], strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).max() >= TOKENS  # without the rule it would be sampled
        want = torch.log_softmax(logits[:, :TOKENS], -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), want, rtol=1e-4, atol=1e-4)
    close = getattr(engine, "close", None)
    if close is not None:
        close()
