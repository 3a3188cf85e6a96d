"""Sections: defaults, checks, read-only after sealing."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys

import pytest

from verl.config import (
    ActorConfig,
    CheckpointConfig,
    DataConfig,
    MicroBatch,
    OptimConfig,
    PPOConfig,
    RolloutConfig,
    SFTConfig,
    find_problems,
    seal,
    to_dict,
)
from verl.config.rollout import EngineKwargsConfig
from verl.config.schema import keys_of
from verl.errors import ConfigError


def test_import_pulls_in_no_heavy_package():
    heavy = ("torch", "ray", "transformers", "tensordict")
    code = f"import sys, verl.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_every_key_has_help_in_one_sentence(schema):
    for key in keys_of(schema).values():
        text = key.metadata["help"]
        assert len(text) > 5
        assert text.endswith(".")
        assert ". " not in text


def test_defaults_users_rely_on():
    config = PPOConfig()
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.clip_ratio, actor.clip_ratio_c, actor.ppo_epochs) == (256, 0.2, 3.0, 1)
    assert (actor.loss_agg_mode, actor.kl_loss_type, actor.entropy_coeff) == ("token-mean", "low_var_kl", 0.0)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.betas) == (1e-6, 0.01, [0.9, 0.999])
    assert config.critic.optim.lr == 1e-5
    assert (config.algorithm.adv_estimator, config.algorithm.gamma, config.algorithm.lam) == ("gae", 1.0, 1.0)
    assert (config.trainer.total_epochs, config.trainer.n_gpus_per_node, config.trainer.seed) == (30, 8, 1)
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False


def test_lists_and_dicts_are_not_shared():
    first, second = OptimConfig(), OptimConfig()
    first.betas.append(0.5)
    assert second.betas == [0.9, 0.999]
    assert OptimConfig().betas == [0.9, 0.999]


def test_sealed_config_is_read_only_at_every_depth_and_can_be_copied_with_changes():
    config = seal(PPOConfig())
    with pytest.raises(ConfigError, match=r"OptimConfig\.lr is read-only .* dataclasses\.replace"):
        config.actor_rollout_ref.actor.optim.lr = 1.0
    changed = dataclasses.replace(config.actor_rollout_ref.actor.optim, total_training_steps=7)
    changed.lr = 2.0
    assert (changed.lr, changed.total_training_steps) == (2.0, 7)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


def test_sealed_config_pickles_and_stays_sealed():
    again = pickle.loads(pickle.dumps(seal(PPOConfig())))
    assert again == PPOConfig()
    with pytest.raises(ConfigError):
        again.data.shuffle = False


def test_get_gives_a_default_for_keys_that_are_not_there():
    actor = ActorConfig(clip_ratio=0.3)
    assert actor.get("clip_ratio") == 0.3
    assert actor.get("my_loss_width", 1.05) == 1.05
    assert actor.get("my_loss_width") is None


def test_batch_info_is_on_the_copy_only():
    actor = seal(ActorConfig())
    info = {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 4, "loss_scale_factor": None}
    assert actor.with_batch_info(info).global_batch_info == info
    assert actor.with_batch_info(info).clip_ratio == 0.2
    assert dict(actor.global_batch_info) == {}
    assert "global_batch_info" not in to_dict(actor)


def test_micro_batch_is_a_size_or_a_token_budget():
    assert ActorConfig().micro_batch() == MicroBatch(None, None)
    assert ActorConfig(ppo_micro_batch_size_per_gpu=4).micro_batch() == MicroBatch(4, None)
    dynamic = ActorConfig(ppo_micro_batch_size_per_gpu=4, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=100)
    assert dynamic.micro_batch() == MicroBatch(None, 100)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (OptimConfig(lr=-1.0), "lr=-1.0: must be >= 0"),
        (OptimConfig(lr=math.nan), "lr=nan: must be >= 0"),
        (OptimConfig(betas=[0.9]), "betas=[0.9]: must be two numbers in [0, 1)"),
        (OptimConfig(betas=[0.9, 1.0]), "betas=[0.9, 1.0]: must be two numbers in [0, 1)"),
        (
            OptimConfig(lr_scheduler_type="cosin"),
            "lr_scheduler_type='cosin': expected one of constant, cosine, linear; did you mean 'cosine'?",
        ),
        (
            OptimConfig(lr_warmup_steps=10, lr_decay_steps=5),
            "lr_decay_steps=5: must be larger than lr_warmup_steps=10, because the decay starts after the warm-up",
        ),
        (
            DataConfig(truncation="rigth"),
            "truncation='rigth': expected one of error, left, right, middle; did you mean 'right'?",
        ),
        (DataConfig(max_prompt_length=0), "max_prompt_length=0: must be >= 1"),
        (RolloutConfig(top_p=1.5), "top_p=1.5: must be <= 1"),
        (RolloutConfig(top_p=0.0), "top_p=0.0: must be > 0"),
        (RolloutConfig(top_k=0), "top_k=0: must be -1 (all tokens) or a positive number of tokens"),
        (RolloutConfig(temperature=0.0), "temperature=0.0: must be > 0"),
        (
            RolloutConfig(max_model_len=100),
            "max_model_len=100: smaller than prompt_length + response_length = 512 + 512 = 1024; raise it or leave "
            "it out",
        ),
        (
            RolloutConfig(name="vlm"),
            "name='vlm': there is no such rollout engine; did you mean 'vllm'?; use one of hf, sglang, vllm",
        ),
        (
            RolloutConfig(tensor_model_parallel_size=2),
            "tensor_model_parallel_size=2: is a setting of rollout.name=vllm and sglang; leave it out, or set one of "
            "these",
        ),
        (
            RolloutConfig(name="vllm", pack_weights=True),
            "pack_weights=True: is a setting of rollout.name=hf; leave it out",
        ),
        (
            RolloutConfig(enforce_eager=False, pack_weights=True),
            "pack_weights=True: compiled layers (enforce_eager=False) take plain weights; leave one of them out",
        ),
        (
            RolloutConfig(engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32})),
            "engine_kwargs.vllm={'block_size': 32}: is for rollout.name=vllm, and the name is 'hf'; leave it out, or "
            "set rollout.name=vllm",
        ),
        (
            RolloutConfig(name="vllm", engine_kwargs=EngineKwargsConfig(vllm={"dtype": "float16"})),
            "engine_kwargs.vllm.dtype='float16': use rollout.dtype",
        ),
        (
            RolloutConfig(name="sglang", engine_kwargs=EngineKwargsConfig(sglang={"tp_size": 2})),
            "engine_kwargs.sglang.tp_size=2: use rollout.tensor_model_parallel_size",
        ),
        (
            RolloutConfig(name="vllm", server_urls=["http://gpu7:30000"]),
            "server_urls=['http://gpu7:30000']: is for rollout.name=sglang; leave it out",
        ),
        (
            RolloutConfig(name="sglang", server_urls=["gpu7:30000"]),
            "server_urls: 'gpu7:30000' is no address; write http://host:port",
        ),
        (
            CheckpointConfig(save_contents=["model", "optimiser"]),
            "save_contents='optimiser': expected one of model, optimizer, extra, hf_model; did you mean 'optimizer'?",
        ),
        (
            CheckpointConfig(load_contents=["hf_model"]),
            "load_contents='hf_model': expected one of model, optimizer, extra; did you mean 'model'?",
        ),
    ],
)
def test_bad_values_of_one_section(section, message):
    assert list(find_problems(section)) == [message]
