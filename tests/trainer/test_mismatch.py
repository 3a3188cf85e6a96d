"""Each cause of a mismatch, made on purpose from logits, is named."""

from __future__ import annotations

import logging

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.mismatch import MismatchMonitor, diagnose

ROWS, WIDTH, VOCABULARY = 16, 12, 50


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


@pytest.fixture
def mask() -> torch.Tensor:
    """Responses of 2 to 12 tokens; the last rows fill all columns."""
    lengths = torch.tensor([2 + (3 * i) % 10 for i in range(ROWS - 2)] + [WIDTH, WIDTH])
    return (torch.arange(WIDTH) < lengths[:, None]).long()


def sample(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.softmax(-1).reshape(-1, VOCABULARY)
    return torch.multinomial(flat, 1, generator=torch.Generator().manual_seed(2)).reshape(ROWS, WIDTH)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def causes(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, **kw: object) -> list[str]:
    return [finding.cause for finding in diagnose(train, rollout, mask, **kw)]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_temperature(logits: torch.Tensor, mask: torch.Tensor, temperature: float) -> None:
    tokens = sample(logits / temperature)
    (finding,) = diagnose(log_probs(logits, tokens), log_probs(logits / temperature, tokens), mask)
    assert finding.cause == "temperature"
    assert "rollout.temperature" in finding.text


def test_top_p(logits: torch.Tensor, mask: torch.Tensor) -> None:
    ordered, places = logits.softmax(-1).sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered > 0.8
    cut = logits.masked_fill(torch.zeros_like(outside).scatter(-1, places, outside), -torch.inf)
    tokens = sample(cut)
    assert causes(log_probs(logits, tokens), log_probs(cut, tokens), mask) == ["truncation"]


def test_end_of_sequence(logits: torch.Tensor, mask: torch.Tensor) -> None:
    tokens = sample(logits)
    train = log_probs(logits, tokens)
    rollout = train.clone()
    for row, length in enumerate(mask.sum(-1).tolist()):
        if length < WIDTH:
            rollout[row, length - 1] += 1.5
    assert causes(train, rollout, mask) == ["eos"]


def test_old_weights_are_known_from_the_batch(logits: torch.Tensor, mask: torch.Tensor) -> None:
    tokens = sample(logits)
    moved = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)) * 0.3
    versions = torch.full((ROWS, 2), 4, dtype=torch.int32)
    versions[:4] = 2
    (finding,) = diagnose(
        log_probs(moved, tokens), log_probs(logits, tokens), mask, versions=versions, current_version=4
    )
    assert finding.cause == "stale"
    assert "25% of the responses" in finding.text
    assert "up to 2 steps" in finding.text


def test_numeric_types(logits: torch.Tensor, mask: torch.Tensor) -> None:
    tokens = sample(logits)
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)) * 0.02
    train = log_probs(logits, tokens)
    assert causes(train, train + noise, mask) == ["dtype"]


def test_other_weights_that_claim_to_be_current(logits: torch.Tensor, mask: torch.Tensor) -> None:
    tokens = sample(logits)
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)) * 2
    versions = torch.full((ROWS, 2), 4, dtype=torch.int32)
    found = causes(log_probs(other, tokens), log_probs(logits, tokens), mask, versions=versions, current_version=4)
    assert found == ["weights"]


def test_the_log_tells_once_and_again_when_the_cause_changes(
    logits: torch.Tensor, mask: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = sample(logits)
    train, rollout = log_probs(logits, tokens), log_probs(logits / 0.7, tokens)
    batch = DataProto.from_dict({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    monitor = MismatchMonitor(0.05)
    with caplog.at_level(logging.WARNING, logger="verl.trainer.ppo.mismatch"):
        assert monitor.look(batch, 0.04, step=1) == []
        for step in (2, 3):
            assert [finding.cause for finding in monitor.look(batch, 0.3, step=step)] == ["temperature"]
        assert len(caplog.records) == 1
        assert "step 2: rollout and training log-probs" in caplog.text
        batch.batch["rollout_log_probs"] = train + 1.0
        monitor.look(batch, 1.0, step=4)
        assert len(caplog.records) == 2
    assert MismatchMonitor(None).look(batch, 9.0, step=1) == []
