"""Chunked log-probs against NumPy in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.models.logprobs import LogitTransform, token_log_probs, token_sum_pi_squared


def reference(
    hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, temperature: float, transform: LogitTransform
) -> tuple[np.ndarray, np.ndarray]:
    logits = hidden @ weight.T * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * np.tanh(logits / transform.softcap)
    logits = logits / temperature
    logits = logits - logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return log_p[np.arange(len(targets)), targets], -(np.exp(log_p) * log_p).sum(1)


def test_literal_numbers() -> None:
    # logits (0, ln 3): p = (1/4, 3/4)
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [np.log(3.0)]], dtype=torch.float32)
    lp, entropy = token_log_probs(hidden, weight, None, torch.tensor([1]), entropy=True)
    assert lp.item() == pytest.approx(np.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3), abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3 * 29, 1 << 20])
@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(0.4), LogitTransform(1.0, 2.0), LogitTransform(0.5, 3.0)]
)
def test_any_chunk_gives_the_numbers_of_numpy(chunk: int, transform: LogitTransform) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(10, 8)), rng.normal(size=(29, 8))
    targets = rng.integers(0, 29, size=10)
    want = reference(hidden, weight, targets, 0.6, transform)
    got = token_log_probs(
        torch.tensor(hidden).float(),
        torch.tensor(weight).float(),
        None,
        torch.tensor(targets),
        temperature=0.6,
        transform=transform,
        entropy=True,
        chunk_numbers=chunk,
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0)])
@pytest.mark.parametrize("entropy", [True, False])
def test_gradients_equal_those_of_the_plain_formula(chunk: int, transform: LogitTransform, entropy: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)]
    targets = torch.randint(0, 11, (7,))
    up, up_entropy = torch.randn(7), torch.randn(7) * entropy
    grads = []
    for plain in (True, False):
        hidden, weight, bias = (x.clone().requires_grad_() for x in leaves)
        if plain:
            logits = (hidden @ weight.T + bias) * transform.scale
            if transform.softcap is not None:
                logits = transform.softcap * torch.tanh(logits / transform.softcap)
            log_p = torch.log_softmax(logits / 0.8, -1)
            lp, ent = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            lp, ent = token_log_probs(
                hidden,
                weight,
                bias,
                targets,
                temperature=0.8,
                transform=transform,
                entropy=entropy,
                chunk_numbers=chunk,
            )
            assert (ent is not None) == entropy
        loss = (lp * up).sum() + ((ent * up_entropy).sum() if ent is not None else 0.0)
        loss.backward()
        grads.append((hidden.grad, weight.grad, bias.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_half_precision_weights_get_float32_results() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(40, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 40, (9,))
    lp, _ = token_log_probs(hidden, weight, None, targets, chunk_numbers=80)
    assert lp.dtype == torch.float32
    lp.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    exact, _ = token_log_probs(hidden.detach().float(), weight.detach().float(), None, targets)
    torch.testing.assert_close(lp.detach(), exact, rtol=0.02, atol=0.1)


def test_frozen_output_embedding_gets_no_gradient() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    lp, _ = token_log_probs(hidden, weight, None, torch.tensor([0, 1, 2, 3]), chunk_numbers=6)
    lp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_zero_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature=0"):
        token_log_probs(torch.randn(1, 2), torch.randn(3, 2), None, torch.tensor([0]), temperature=0.0)


def test_recomputing_changes_no_bit() -> None:
    """``keep=False`` holds no logits for the backward pass and gives the same gradients."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    gradients = []
    for keep in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropies = token_log_probs(h, w, None, targets, temperature=0.8, entropy=True, keep=keep)
        assert entropies is not None
        (log_probs.sum() + 0.3 * entropies.sum()).backward()
        gradients.append((h.grad, w.grad))
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("chunk", [1, 3 * 29, 1 << 20])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0)])
def test_sum_of_squared_probabilities(chunk: int, transform: LogitTransform) -> None:
    rng = np.random.default_rng(1)
    hidden, weight = rng.normal(size=(10, 8)), rng.normal(size=(29, 8))
    log_p = np.stack([reference(hidden, weight, np.full(10, token), 0.6, transform)[0] for token in range(29)], axis=1)
    got = token_sum_pi_squared(
        torch.tensor(hidden).float(),
        torch.tensor(weight).float().requires_grad_(),
        None,
        temperature=0.6,
        transform=transform,
        chunk_numbers=chunk,
    )
    np.testing.assert_allclose(got.numpy(), np.exp(2 * log_p).sum(1), rtol=2e-5)
    assert not got.requires_grad


def test_an_even_distribution_agrees_with_itself_once_in_v() -> None:
    assert token_sum_pi_squared(torch.zeros(2, 3), torch.zeros(8, 3), None).tolist() == pytest.approx([1 / 8, 1 / 8])
