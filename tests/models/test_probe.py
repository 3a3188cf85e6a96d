"""Probe rows: what they reach, and that comparisons find differences and only these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.models.families import COMMON, FAMILIES, make_config
from tests.models.family_checks import save_model, transformers_model
from tests.workers.engine.reference import LOG_PROBS, make_engine
from verl.models.probe import Probe, compare, make_probe, plain_log_probs, token_limits
from verl.workers.engine.base import MicroBatching


def limits(model_type: str, **changes: object) -> dict[str, int]:
    return {limit.name: limit.tokens for limit in token_limits(AutoConfig.for_model(model_type, **changes))}


def test_limits_are_found_at_any_depth() -> None:
    assert limits("llama") == {}
    assert limits("mistral", sliding_window=7) == {"sliding_window": 7}
    assert limits("llama4_text")["attention_chunk_size"] == 8192
    assert limits("gemma3", text_config={"sliding_window": 512}) == {"sliding_window": 512}
    assert limits("lfm2", conv_L_cache=5) == {"conv_L_cache": 5}
    assert limits("deepseek_v32", index_topk=4) == {"index_topk": 4}
    assert 512 * 128 in limits("deepseek_v4").values()  # a choice among compressed tokens reaches further
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "factor": 2.0, "rope_theta": 1e4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 32}
    scaled = limits("phi3", rope_parameters={"rope_type": "longrope", **factors}, **sizes)
    assert 32 in scaled.values()
    assert limits("phi3") == {}  # plain rotary embeddings do not change with the length
    assert 16384 in limits("ministral3").values()  # its attention is scaled from there on


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_go_beyond_every_limit(family: str) -> None:
    config = make_config(family)
    probe = make_probe(config)
    assert not probe.not_reached
    assert all(len(probe.rows[0].token_ids) > limit.tokens + 4 for limit in probe.reached)
    first, second = probe.rows[:2]
    assert first.token_ids[: first.prompt_length] == second.token_ids[: second.prompt_length]
    pad = config.get_text_config().pad_token_id
    assert [pad in row.token_ids for row in probe.rows] == [False, True, True, False]
    assert probe == make_probe(config) != make_probe(config, seed=1)


def test_huge_limits_are_named_and_not_reached() -> None:
    probe = make_probe(AutoConfig.for_model("mistral", sliding_window=100_000))
    assert [limit.name for limit in probe.not_reached] == ["sliding_window"]
    assert len(probe.rows[0].token_ids) < 100


def test_excluded_and_special_tokens_are_not_drawn() -> None:
    config = AutoConfig.for_model("qwen2_vl", text_config=COMMON, image_token_id=7, video_token_id=8)
    drawn = {token for row in make_probe(config, excluded={9}).rows for token in row.token_ids}
    assert not drawn & {7, 8, 9, 1, 2}


def test_a_row_of_the_batch_is_the_row() -> None:
    probe = make_probe(make_config("llama"))
    batch = probe.batch(pad_token_id=5)
    for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], probe.rows, strict=True):
        assert tuple(ids[mask.bool()].tolist()) == row.token_ids
    assert [len(part) for part in probe.split(batch["response_mask"])] == [row.response_length for row in probe.rows]


def test_engine_agrees_with_plain_transformers(tmp_path: Path) -> None:
    path = save_model("gemma2", tmp_path / "model")
    probe = make_probe(AutoConfig.from_pretrained(path))
    want = plain_log_probs(transformers_model(path), probe.rows)
    got = engine_log_probs(path, probe)
    found = compare(got, want, probe.rows)
    assert found.difference < 1e-5, found
    assert found.agrees

    got[1][4] += 0.01
    found = compare(got, want, probe.rows)
    assert not found.agrees
    assert (found.row, found.position) == (1, probe.rows[1].prompt_length + 4)
    assert "padding token inside the response" in str(found)

    got[1][4] = float("nan")
    assert not compare(got, want, probe.rows).agrees


def engine_log_probs(path: str, probe: Probe) -> list[torch.Tensor]:
    out = make_engine(path, trained=False).forward(probe.batch(), LOG_PROBS, micro=MicroBatching())
    return probe.split(out["log_probs"])


def test_masked_tokens_take_no_probability(tmp_path: Path) -> None:
    model = transformers_model(save_model("llama", tmp_path / "model"))
    probe = make_probe(model.config, excluded=range(40, 61))
    allowed = torch.arange(61) < 40
    all_tokens, some = plain_log_probs(model, probe.rows), plain_log_probs(model, probe.rows, allowed=allowed)
    assert all((one < other).all() for one, other in zip(all_tokens, some, strict=True))
