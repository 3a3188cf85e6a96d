"""Memory: predicted from shapes, and what the models of a real step hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.cli import main
from verl.config import ModelConfig, PPOConfig, load_config
from verl.models.shape import model_shape
from verl.protocol import DataProto
from verl.trainer.ppo.placement import build_worker_groups
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.device import DeviceMemory
from verl.workers import memory_usage
from verl.workers.memory_usage import RESERVED, Item, MemoryMeter, predict, table, together

MIB = 2**20
#: Qwen2.5-7B as its config.json has it
QWEN7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def qwen7b(tmp_path: Path) -> str:
    """A directory with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN7B))
    return str(tmp_path)


def config_of(model: str, *overrides: str) -> PPOConfig:
    base = [
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=unused.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
    ]
    if not any(override.startswith("algorithm.adv") for override in overrides):
        base.append("algorithm.adv_estimator=grpo")
    keys = {override.split("=")[0] for override in overrides}
    return load_config(PPOConfig, "ppo_trainer", [b for b in base if b.split("=")[0] not in keys] + list(overrides))


def cells(items: list[Item]) -> dict[tuple[str, str, str, bool], int]:
    return {(item.role, item.part, item.phase, item.host): item.nbytes for item in items}


def test_a_7b_model_on_eight_gpus(qwen7b: str) -> None:
    """By hand: 7,615,616,512 parameters, of which each of 8 ranks holds an eighth in float32."""
    shape = model_shape(ModelConfig(path=qwen7b), "lm")
    assert shape.count == 7_615_616_512
    assert shape.layer_parameters == 233_057_792
    assert model_shape(ModelConfig(path=qwen7b), "value").count == 7_615_616_512 - 152064 * 3584 + 3584 + 1
    config = config_of(
        qwen7b,
        "data.train_batch_size=1024",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "trainer.n_gpus_per_node=8",
    )
    found = cells(predict(config, "cuda"))
    held = 7_615_616_512 // 8 * 4
    assert found["actor", "parameters", "generate", True] == pytest.approx(held, rel=1e-6)
    assert found["actor", "parameters", "update", False] == pytest.approx(held, rel=1e-6)
    assert found["actor", "optimizer", "update", False] == pytest.approx(2 * held, rel=1e-6)
    assert ("actor", "optimizer", "log_prob", False) not in found
    assert found["actor", "gradients", "update", False] == pytest.approx(held, rel=1e-6)
    # bfloat16, half of the model to each of two ranks; 28 layers x 2 x 4 x 128 numbers a token, half on a rank
    assert found["rollout", "rollout weights", "generate", False] == 7_615_616_512
    assert found["rollout", "kv cache", "generate", False] == 64 * 2048 * 28 * 2 * 4 * 128 * 2 // 2
    assert not any(key[:2] == ("rollout", "kv cache") and key[2] != "generate" for key in found)
    # checkpointing: one bfloat16 state of 3,584 numbers for each of 28 layers and 16,384 tokens, and one layer whole
    assert found["actor", "activations", "update", False] > 16_384 * 28 * 3584 * 2
    assert together(predict(config, "cuda"), "generate") < 17 * 2**30 < together(predict(config, "cuda"), "update")


def test_ranks_that_share_sequences_share_activations(qwen7b: str) -> None:
    keys = [
        "trainer.n_gpus_per_node=8",
        "data.max_response_length=8176",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
    ]
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    whole = cells(predict(config_of(qwen7b, *keys, f"{budget}=16384"), "cuda"))
    shared = [f"{budget}=4096", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"]
    part = cells(predict(config_of(qwen7b, *keys, *shared), "cuda"))
    key = ("actor", "activations", "update", False)
    assert part[key] == pytest.approx(whole[key] / 4, rel=0.01)
    assert part["actor", "parameters", "update", False] == whole["actor", "parameters", "update", False]


def test_generation_on_a_cpu_packs_matrices(qwen7b: str) -> None:
    """All but the norms and biases, a second time; the embedding, which is no product, is counted with them."""
    found = cells(predict(config_of(qwen7b), "cpu"))
    vectors = 28 * (2 * 3584 + 3584 + 2 * 512) + 3584
    assert found["rollout", "packed weights", "generate", False] == (7_615_616_512 - vectors) * 4
    plain = cells(predict(config_of(qwen7b, "actor_rollout_ref.rollout.pack_weights=False"), "cpu"))
    assert ("rollout", "packed weights", "generate", False) not in plain


def test_background_saves_keep_copies_in_host_memory(qwen7b: str) -> None:
    keys = ["trainer.save_freq=10", "actor_rollout_ref.actor.checkpoint.async_save=True", "trainer.n_gpus_per_node=8"]
    found = cells(predict(config_of(qwen7b, *keys), "cuda"))
    held = 7_615_616_512 // 8 * 4
    assert found["actor", "copies for saving", "generate", True] == pytest.approx(3 * held, rel=1e-6)
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model]"
    found = cells(predict(config_of(qwen7b, *keys, contents), "cuda"))
    assert found["actor", "copies for saving", "update", True] == pytest.approx(held, rel=1e-6)
    assert not any("copies for saving" in key for key in cells(predict(config_of(qwen7b, keys[0]), "cuda")))


def test_cache_memory_is_compared_with_what_an_engine_reserves(qwen7b: str) -> None:
    """vLLM and SGLang take the cache of max_num_seqs sequences on a CPU, whatever the batch needs."""
    token = 28 * 2 * 4 * 128 * 4
    name = "actor_rollout_ref.rollout.name"
    keys = ["actor_rollout_ref.rollout.max_num_seqs=64", "actor_rollout_ref.rollout.dtype=float32"]
    key = ("rollout", "kv cache", "generate", False)
    assert cells(predict(config_of(qwen7b, *keys), "cpu"))[key] == 16 * 32 * token  # 8 prompts, 2 samples
    # blocks of 128 tokens, and one that is never used
    assert cells(predict(config_of(qwen7b, *keys, f"{name}=vllm"), "cpu"))[key] == (64 + 1) * 128 * token
    assert cells(predict(config_of(qwen7b, *keys, f"{name}=sglang"), "cpu"))[key] == 64 * (32 + 8) * token
    # on a GPU both take their share of the device, which no configuration knows
    items = predict(config_of(qwen7b, *keys, f"{name}=vllm"), "cuda")
    assert cells(items)[key] == 16 * 32 * token
    text = table(items, [{"rollout kv cache" + RESERVED: 2883 * MIB}])
    assert "rank 0 rollout kv cache: full batches need 56.0 MiB, 2,883.0 MiB are reserved" in text
    assert "measured 2,883" not in text


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_cache_of_split_models(ranks: int, heads: int, qwen7b: str) -> None:
    """A rank has at least one of the 4 key-value heads."""
    keys = [f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}", "actor_rollout_ref.rollout.name=vllm"]
    found = cells(predict(config_of(qwen7b, *keys, "trainer.n_gpus_per_node=8"), "cuda"))
    samples = 8 * 2 * ranks // 8
    assert found["rollout", "kv cache", "generate", False] == samples * 32 * 28 * 2 * heads * 128 * 2


def test_latent_cache_is_not_split(tmp_path: Path) -> None:
    latent = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "vocab_size": 128,
        "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(latent))
    keys = ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=4"]
    for ranks in (1, 4):
        parallel = f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}"
        found = cells(predict(config_of(str(tmp_path), *keys, parallel), "cuda"))
        samples = 8 * 2 * ranks // 4
        assert found["rollout", "kv cache", "generate", False] == samples * 32 * 4_608


def test_adapters_need_no_state_for_the_rest(qwen7b: str) -> None:
    found = cells(predict(config_of(qwen7b, "actor_rollout_ref.model.lora_rank=8"), "cpu"))
    ratio = found["actor", "optimizer", "update", False] / found["actor", "parameters", "update", False]
    assert 0.001 < ratio < 0.01


@pytest.fixture
def groups(tiny_model_dir: str) -> Iterator[Any]:
    """Actor, rollout, reference and critic in this process."""
    config = config_of(
        tiny_model_dir,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "trainer.controller=local",
        "trainer.device=cpu",
    )
    built = build_worker_groups(config, "cpu", total_steps=1)
    yield config, built
    built.shutdown()


def test_parameters_optimizer_and_cache_are_as_predicted(groups: Any) -> None:
    """Exactly for the models; for the cache of full-length prompts and answers within 10 %, and none left after."""
    config, built = groups
    predicted = cells(predict(config, "cpu"))
    actor = built.actor_rollout
    actor.sync_weights(version=0)
    ids = torch.randint(5, 100, (16, 16))
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "sample_index": torch.arange(16)}
    batch = actor.generate_sequences(DataProto.from_dict(prompts, meta_info={"step": 1}))
    assert batch.meta_info["metrics"].values_by_name() == {
        "rollout/preemptions": 0.0,
        "rollout/recomputed_tokens": 0.0,
    }
    assert actor.workers[0].rollout.memory().kv_cache == 0
    batch.union(actor.compute_log_prob(batch))
    batch.union(built.critic.compute_values(batch))
    batch.batch["advantages"] = batch.batch["returns"] = torch.ones(16, 16)
    metrics = built.critic.update_critic(batch)[0] | actor.update_actor(batch)[0]
    (report,), (critic,) = actor.memory_report(), built.critic.memory_report()
    report |= critic
    for role in ("actor", "critic"):
        for part in ("parameters", "optimizer", "gradients"):
            assert report[f"{role} {part}"] == predicted[role, part, "update", False], (role, part)
    assert report["ref parameters"] == predicted["ref", "parameters", "log_prob", False]
    cache = predicted["rollout", "kv cache", "generate", False]
    assert report["rollout kv cache"] == pytest.approx(cache, rel=0.1)
    assert report["rollout rollout weights"] == 0  # read in place
    assert ("rollout", "rollout weights", "generate", False) not in predicted
    for phase in ("load", "generate", "log_prob", "update", "sync"):
        assert report[f"phase {phase}"] > 50 * MIB
        assert metrics[f"perf/memory_{phase}_gb"].value == pytest.approx(report[f"phase {phase}"] / 2**30, rel=0.2)
    text = table(predict(config, "cpu"), [report])
    assert "process, measured, rank 0" in text
    assert "rank 0 actor optimizer: predicted 0.2 MiB, measured 0.2 MiB" in text


def test_the_command(qwen7b: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        f"actor_rollout_ref.model.path={qwen7b}",
        "data.train_files=unused.parquet",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=8",
        "trainer.device=cuda",
    ]
    assert main(["explain", "memory", *words]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["per", "rank,", "MiB", "load", "generate", "log_prob", "update", "sync"]
    assert "actor parameters" in out
    assert "3,631.4" in out  # 7,615,616,512 x 4 / 8
    assert main(["explain", "time"]) == 2
    assert main(["explain", "memory", f"actor_rollout_ref.model.path={tmp_path}/no", *words[1:]]) == 2
    assert "neither a directory nor a model" in capsys.readouterr().err


def test_the_meter_keeps_the_most_of_a_phase_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0
    monkeypatch.setattr(memory_usage, "device_memory_stats", lambda device: DeviceMemory(0, 0, 0, 0, used))
    meter = MemoryMeter()
    for name, used in (("generate", 5), ("update", 7), ("update", 6)):  # noqa: B007 - read by the lambda
        with meter.phase(name, "cpu"):
            pass
    assert meter.readings("cpu") == {"generate": 5, "update": 7}
    for name, used in (("generate", 4), ("update", 3)):
        with meter.phase(name, "cpu"):
            assert meter.readings("cpu")[name] == used  # up to now
    assert meter.readings("cpu") == {"generate": 4, "update": 3}


def test_the_trainer_logs_it_once(
    tiny_model_dir: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.critic = config_of(tiny_model_dir, "trainer.device=cpu"), None
    trainer.actor_rollout = type(
        "Group", (), {"memory_report": lambda self: [{"actor parameters": MIB, "phase load": 5 * MIB}]}
    )()
    with caplog.at_level(logging.INFO, logger="verl"):
        trainer.report_memory()
    assert "rank 0 actor parameters: predicted 0.1 MiB, measured 1.0 MiB" in caplog.text
    assert trainer.memory_reported
