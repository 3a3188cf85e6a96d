"""Composing: overrides, YAML files, interpolations, other spellings, and what is refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from verl.config import PPOConfig, load_config, to_yaml
from verl.config.load import _logged
from verl.errors import ConfigError

ARR = "actor_rollout_ref"


# ---- values


def test_values_reach_their_keys_with_their_types(ppo):
    config = ppo(
        f"{ARR}.actor.optim.lr=1e-5",
        f"{ARR}.actor.optim.weight_decay=0",
        f"{ARR}.actor.optim.betas=[0.9,0.95]",
        f"{ARR}.actor.fsdp_config.param_offload=True",
        "trainer.experiment_name=123",
        "trainer.total_training_steps=1e2",
        "trainer.resume_from_path=null",
    )
    actor = config.actor_rollout_ref.actor
    assert actor.optim.lr == 1e-5
    assert actor.optim.weight_decay == 0.0
    assert isinstance(actor.optim.weight_decay, float)
    assert actor.optim.betas == [0.9, 0.95]
    assert actor.fsdp_config.param_offload is True
    assert config.trainer.experiment_name == "123"
    assert config.trainer.total_training_steps == 100
    assert isinstance(config.trainer.total_training_steps, int)
    assert config.trainer.resume_from_path is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_files=a.parquet", ["a.parquet"]),
        ("data.train_files=[a.parquet,b.jsonl]", ["a.parquet", "b.jsonl"]),
        ("data.train_files=['my data/a.parquet']", ["my data/a.parquet"]),
        ('data.train_files="my data/a=1.parquet"', ["my data/a=1.parquet"]),
        ("++data.train_files=a.parquet", ["a.parquet"]),
        ("+data.train_files=a.parquet", ["a.parquet"]),
    ],
)
def test_files_are_one_path_or_a_list(ppo, override, expected):
    assert ppo(override).data.train_files == expected


def test_one_logger_or_a_list(ppo):
    assert ppo("trainer.logger=console").trainer.logger == ["console"]
    assert ppo('trainer.logger=["console","wandb"]').trainer.logger == ["console", "wandb"]


def test_spellings_of_dtypes(ppo):
    config = ppo(
        f"{ARR}.actor.fsdp_config.model_dtype=fp32",
        f"{ARR}.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        f"{ARR}.rollout.dtype=half",
    )
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "float32"
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.dtype == "float16"


def test_free_form_keys_take_any_key_with_or_without_plus(ppo):
    config = ppo(
        f"{ARR}.model.override_config.attention_dropout=0.1",
        f"+{ARR}.model.override_config.rope_scaling.factor=2",
        f"++{ARR}.model.override_config.rope_scaling.type=linear",
        "data.apply_chat_template_kwargs.enable_thinking=False",
        "+reward.custom_reward_function.reward_kwargs={weights: [1, 2], strict: true}",
        "reward.custom_reward_function.reward_kwargs.extra='a, b'",
        "+ray_kwargs.ray_init.num_cpus=4",
    )
    assert config.actor_rollout_ref.model.override_config == {
        "attention_dropout": 0.1,
        "rope_scaling": {"factor": 2, "type": "linear"},
    }
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.reward.custom_reward_function.reward_kwargs == {"weights": [1, 2], "strict": True, "extra": "a, b"}
    assert config.ray_kwargs.ray_init == {"num_cpus": 4}


def test_a_section_as_one_value(ppo):
    config = ppo(
        "data={shuffle: false, max_prompt_length: 7}",
        f"{ARR}.rollout.val_kwargs={{n: 4, do_sample: true, temperature: 1}}",
    )
    assert (config.data.shuffle, config.data.max_prompt_length, config.data.train_batch_size) == (False, 7, 8)
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 4


def test_the_last_override_of_a_key_wins(ppo):
    assert ppo("trainer.seed=2", "trainer.seed=3").trainer.seed == 3


def test_delete_goes_back_to_the_default(ppo):
    assert ppo("trainer.seed=2", "~trainer.seed").trainer.seed == 1
    assert ppo("~trainer.seed", "trainer.seed=2").trainer.seed == 2
    config = ppo(f"{ARR}.model.override_config={{a: 1, b: 2}}", f"~{ARR}.model.override_config.a")
    assert config.actor_rollout_ref.model.override_config == {"b": 2}


# ---- interpolation and inheritance


def test_interpolations(ppo, monkeypatch):
    monkeypatch.setenv("RUN_TAG", "night")
    config = ppo("trainer.experiment_name=${oc.env:RUN_TAG}-${trainer.seed}", "trainer.project_name=p")
    assert config.trainer.experiment_name == "night-1"
    assert config.trainer.default_local_dir == "checkpoints/p/night-1"


def test_environment_values_are_converted(ppo, monkeypatch):
    monkeypatch.setenv("NUM", "16")
    monkeypatch.setenv("FILES", "a.parquet")
    config = ppo("data.train_batch_size=${oc.env:NUM}", "data.train_files=${oc.env:FILES}")
    assert config.data.train_batch_size == 16
    assert config.data.train_files == ["a.parquet"]


def test_reference_and_critic_follow_the_actor(ppo):
    config = ppo(
        f"{ARR}.actor.strategy=fsdp2",
        f"{ARR}.actor.ppo_micro_batch_size_per_gpu=2",
        f"{ARR}.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
        f"{ARR}.model.trust_remote_code=True",
        "data.max_response_length=100",
    )
    arr, critic = config.actor_rollout_ref, config.critic
    assert (arr.ref.strategy, critic.strategy) == ("fsdp2", "fsdp2")
    assert arr.rollout.log_prob_micro_batch_size_per_gpu == 2
    assert arr.ref.log_prob_micro_batch_size_per_gpu == 2
    assert (critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu) == (2, 2)
    assert critic.ppo_mini_batch_size == 4
    assert arr.ref.fsdp_config.mixed_precision.param_dtype == "bfloat16"
    assert critic.fsdp_config.mixed_precision.param_dtype == "bfloat16"
    assert critic.model.path == "Qwen/Qwen2.5-0.5B"
    assert critic.model.trust_remote_code is True
    assert config.data.trust_remote_code is True
    assert arr.rollout.response_length == 100
    assert critic.optim.lr == 1e-5


def test_a_given_key_does_not_follow(ppo):
    config = ppo(
        f"{ARR}.actor.fsdp_config.param_offload=True",
        f"{ARR}.ref.fsdp_config.param_offload=False",
        "critic.model.path=other/critic",
        f"{ARR}.actor.clip_ratio=0.1",
        f"{ARR}.actor.clip_ratio_high=0.28",
    )
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is False
    assert config.critic.fsdp_config.param_offload is True
    assert config.critic.model.path == "other/critic"
    assert (config.actor_rollout_ref.actor.clip_ratio_low, config.actor_rollout_ref.actor.clip_ratio_high) == (
        0.1,
        0.28,
    )


def test_sizes_over_all_ranks_become_sizes_per_rank(ppo):
    config = ppo(f"{ARR}.actor.ppo_micro_batch_size=4", f"{ARR}.ref.log_prob_micro_batch_size=16")
    arr = config.actor_rollout_ref
    assert arr.actor.ppo_micro_batch_size_per_gpu == 2
    assert arr.rollout.log_prob_micro_batch_size_per_gpu == 2
    assert arr.ref.log_prob_micro_batch_size_per_gpu == 8
    assert config.critic.forward_micro_batch_size_per_gpu == 2


def test_sizes_over_all_ranks_that_do_not_fit(problems):
    assert problems(f"{ARR}.actor.ppo_micro_batch_size=3") == [
        f"{ARR}.actor.ppo_micro_batch_size=3: counts samples over all 2 ranks, so it must be a multiple of 2; better "
        "give "
        f"{ARR}.actor.ppo_micro_batch_size_per_gpu, the samples per rank"
    ]
    assert problems(f"{ARR}.actor.ppo_micro_batch_size=4", f"{ARR}.actor.ppo_micro_batch_size_per_gpu=1") == [
        f"{ARR}.actor.ppo_micro_batch_size=4: is 2 samples on each of 2 ranks, but "
        f"{ARR}.actor.ppo_micro_batch_size_per_gpu=1 is given too; keep the second"
    ]


# ---- other spellings


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("custom_reward_function.path=r.py", lambda c: (c.reward.custom_reward_function.path, "r.py")),
        (
            "+custom_reward_function.reward_kwargs.k=1",
            lambda c: (c.reward.custom_reward_function.reward_kwargs, {"k": 1}),
        ),
        ("reward_model.reward_manager=dapo", lambda c: (c.reward.reward_manager.name, "dapo")),
        ("reward_model.overlong_buffer.len=5", lambda c: (c.reward.reward_kwargs, {"overlong_buffer_cfg": {"len": 5}})),
        ("reward_model.num_workers=3", lambda c: (c.reward.num_workers, 3)),
        (f"{ARR}.actor.grad_clip=0.5", lambda c: (c.actor_rollout_ref.actor.optim.clip_grad, 0.5)),
        (
            f"{ARR}.actor.optim.warmup_style=cosine",
            lambda c: (c.actor_rollout_ref.actor.optim.lr_scheduler_type, "cosine"),
        ),
        ("critic.optim.lr_decay_style=linear", lambda c: (c.critic.optim.lr_scheduler_type, "linear")),
        ("critic.model.fsdp_config.param_offload=True", lambda c: (c.critic.fsdp_config.param_offload, True)),
        (
            "reward_model.model.fsdp_config.param_offload=True",
            lambda c: (c.reward_model.fsdp_config.param_offload, True),
        ),
        (
            f"{ARR}.ref.ulysses_sequence_parallel_size=1",
            lambda c: (c.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size, 1),
        ),
        (
            f"+{ARR}.model.override_config.model_config.max_position_embeddings=64",
            lambda c: (c.actor_rollout_ref.model.override_config, {"max_position_embeddings": 64}),
        ),
        ("ray_init.num_cpus=2", lambda c: (c.ray_kwargs.ray_init, {"num_cpus": 2})),
    ],
)
def test_other_spellings(ppo, override, read):
    value, expected = read(ppo(override))
    assert value == expected


def test_another_spelling_is_logged_once(ppo, caplog):
    _logged.discard("custom_reward_function.path")
    with caplog.at_level(logging.INFO, "verl.config.load"):
        ppo("custom_reward_function.path=r.py")
        ppo("custom_reward_function.path=r.py")
    assert [r.getMessage() for r in caplog.records] == [
        "configuration key custom_reward_function.path is read as reward.custom_reward_function.path"
    ]


def test_two_spellings_must_agree(ppo, problems):
    assert (
        ppo(f"{ARR}.actor.grad_clip=2", f"{ARR}.actor.optim.clip_grad=2").actor_rollout_ref.actor.optim.clip_grad == 2
    )
    assert problems(f"{ARR}.actor.grad_clip=2", f"{ARR}.actor.optim.clip_grad=1") == [
        f"{ARR}.actor.optim.clip_grad=1: is the same key as {ARR}.actor.grad_clip=2; give one of them "
        f"({ARR}.actor.optim.clip_grad is the name here)"
    ]


def test_interpolations_may_use_other_spellings(ppo):
    config = ppo("custom_reward_function.path=r.py", "trainer.experiment_name=${custom_reward_function.path}")
    assert config.trainer.experiment_name == "r.py"


# ---- unknown and unsupported keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ARR}.actor.optim.lrr=1", f"{ARR}.actor.optim.lrr=1: unknown key; did you mean {ARR}.actor.optim.lr?"),
        (f"+{ARR}.actor.optim.lrr=1", f"{ARR}.actor.optim.lrr=1: unknown key; did you mean {ARR}.actor.optim.lr?"),
        (f"++{ARR}.actor.optim.lrr=1", f"{ARR}.actor.optim.lrr=1: unknown key; did you mean {ARR}.actor.optim.lr?"),
        (f"{ARR}.rolout.n=8", f"{ARR}.rolout.n=8: unknown key; did you mean {ARR}.rollout.n?"),
        ("actor_rolout_ref.rollout.n=8", f"actor_rolout_ref.rollout.n=8: unknown key; did you mean {ARR}.rollout.n?"),
        ("rollout.n=8", f"rollout.n=8: unknown key; did you mean {ARR}.rollout.n?"),
        ("+trainer.bogus_option=1", "trainer.bogus_option=1: unknown key"),
        ("seed=2", "seed=2: unknown key; did you mean data.seed or trainer.seed or critic.megatron.seed?"),
        ("~trainer.sed", "~trainer.sed: there is no such key to delete; did you mean trainer.seed?"),
        ("data=3", "data=3: is a section; set its keys, for example data.train_files=..."),
        (
            f"{ARR}.actor.optim=null",
            f"{ARR}.actor.optim=None: is a section; set its keys, for example {ARR}.actor.optim.optimizer=...",
        ),
        ("trainer.seed.value=3", "trainer.seed.value=3: unknown key; did you mean trainer.seed?"),
    ],
)
def test_unknown_keys(problems, override, message):
    assert message in problems(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ARR}.actor.optim.lr=fast", f"{ARR}.actor.optim.lr='fast': expected a number"),
        (f"{ARR}.rollout.n=2.5", f"{ARR}.rollout.n=2.5: expected a whole number"),
        (f"{ARR}.rollout.n=null", f"{ARR}.rollout.n=None: expected a whole number, got null"),
        ("data.shuffle=maybe", "data.shuffle='maybe': expected true or false"),
        ("data.shuffle=3", "data.shuffle=3: expected true or false"),
        ("data.train_files={a: 1}", "data.train_files.a=1: unknown key"),
        (f"{ARR}.actor.optim.betas=0.9", f"{ARR}.actor.optim.betas=0.9: expected a list of numbers"),
        (f"{ARR}.actor.optim.betas=[a,b]", f"{ARR}.actor.optim.betas=['a', 'b']: expected a number"),
        ("trainer.project_name=[a]", "trainer.project_name=['a']: expected text"),
        (f"{ARR}.model.override_config=3", f"{ARR}.model.override_config=3: expected a mapping"),
        (
            "trainer.experiment_name=${trainer.nope}",
            "trainer.experiment_name='${trainer.nope}': Interpolation key 'trainer.nope' not found",
        ),
        ("trainer.seed=${trainer.seed}", "trainer.seed='${trainer.seed}': the interpolation refers to itself"),
        ("trainer.experiment_name=???", "trainer.experiment_name='???': must be given"),
        ("a=1,2", "a=1,2: one run takes one value; write a list as a=[a,b]"),
    ],
)
def test_values_of_the_wrong_type(problems, override, message):
    assert any(problem.startswith(message) for problem in problems(override))


def test_overrides_that_are_none(problems):
    first, second = problems("justaword", "data.shuffle=[")
    assert first.startswith("justaword: not of the form key=value")
    assert second.startswith("data.shuffle=[: not of the form key=value")


def test_all_problems_come_together(problems):
    found = problems(
        f"{ARR}.actor.optim.lrr=1",
        f"{ARR}.actor.optim.lr=fast",
        f"{ARR}.actor.clip_ratio=-1",
        "algorithm.adv_estimator=grop",
        f"{ARR}.actor.grad_clip=2",
        f"{ARR}.actor.optim.clip_grad=1",
        f"{ARR}.rollout.data_parallel_size=8",
        "data.train_batch_size=10",
    )
    starts = [p.split("=")[0] for p in found]
    assert sorted(starts) == sorted(
        [
            f"{ARR}.actor.optim.lrr",
            f"{ARR}.actor.optim.lr",
            f"{ARR}.actor.clip_ratio",
            "algorithm.adv_estimator",
            f"{ARR}.actor.optim.clip_grad",
            f"{ARR}.rollout.data_parallel_size",
            "data.train_batch_size",
        ]
    )


def test_a_problem_that_only_follows_is_not_repeated(problems):
    assert problems("data.train_batch_size=8.5") == ["data.train_batch_size=8.5: expected a whole number"]
    assert problems(f"{ARR}.actor.strategy=deepspeed") == [
        f"{ARR}.actor.strategy='deepspeed': there is no such engine; use 'fsdp' or 'fsdp2', which both mean the FSDP2 "
        "engine, or 'megatron'"
    ]


def test_keys_with_one_reason_share_one_line(problems):
    (line,) = problems(
        f"{ARR}.rollout.data_parallel_size=2",
        f"{ARR}.rollout.expert_parallel_size=2",
        f"{ARR}.rollout.pipeline_model_parallel_size=4",
    )
    assert line.startswith(
        f"{ARR}.rollout.data_parallel_size=2, {ARR}.rollout.expert_parallel_size=2, "
        f"{ARR}.rollout.pipeline_model_parallel_size=4: splits the rollout engine"
    )


def test_values_that_mean_off_are_accepted(ppo):
    ppo(
        f"{ARR}.model.lora_rank=0",
        f"{ARR}.model.lora_alpha=16",
        f"{ARR}.rollout.data_parallel_size=1",
        f"{ARR}.actor.ulysses_sequence_parallel_size=1",
        f"{ARR}.actor.fsdp_config.use_orig_params=True",
        "algorithm.filter_groups.enable=False",
        "trainer.profile_steps=null",
    )


def test_off_is_a_value_of_the_same_type(problems):
    (line,) = problems(f"{ARR}.rollout.data_parallel_size=True")
    assert line.startswith(f"{ARR}.rollout.data_parallel_size=True: splits the rollout engine")


# ---- YAML files of the user


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


BASE = """
data: {train_files: t.parquet, train_batch_size: 8}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-0.5B}
  actor: {ppo_mini_batch_size: 4}
trainer: {n_gpus_per_node: 2}
"""


def load(directory: Path, name: str, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, name, overrides, str(directory))


@pytest.mark.parametrize("head", ["", "defaults: [ppo_trainer, _self_]\n", "defaults:\n  - /ppo_trainer\n  - _self_\n"])
def test_a_yaml_file_with_and_without_the_preset(tmp_path, head):
    write(tmp_path / "mine.yaml", head + BASE)
    config = load(tmp_path, "mine", f"{ARR}.actor.optim.lr=3e-6")
    assert (config.data.train_files, config.data.train_batch_size) == (["t.parquet"], 8)
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert load(tmp_path, "mine.yaml", "data.train_batch_size=16").data.train_batch_size == 16


def test_scientific_notation_in_yaml_is_a_number(tmp_path):
    write(tmp_path / "mine.yaml", BASE + "critic: {optim: {lr: 1e-4}}\n")
    assert load(tmp_path, "mine").critic.optim.lr == 1e-4


def test_config_groups_and_the_command_line(tmp_path):
    (tmp_path / "size").mkdir()
    write(tmp_path / "size" / "small.yaml", "# @package _global_\ndata: {max_prompt_length: 16}\n")
    write(tmp_path / "size" / "large.yaml", "# @package _global_\ndata: {max_prompt_length: 64}\n")
    write(tmp_path / "mine.yaml", "defaults: [_self_, size: small]\n" + BASE)
    assert load(tmp_path, "mine").data.max_prompt_length == 16
    assert load(tmp_path, "mine", "size=large").data.max_prompt_length == 64
    assert load(tmp_path, "mine", "size=large", "data.max_prompt_length=3").data.max_prompt_length == 3


def test_unknown_keys_in_yaml_are_reported_like_those_of_the_command_line(tmp_path):
    write(tmp_path / "mine.yaml", BASE + "critic: {optim: {lrr: 1}, _target_: x.Y}\nalgoritm: {lam: 0.9}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "mine", "trainer.sed=1", "critic.ppo_epochs=many")
    text = str(caught.value)
    assert "  critic.optim.lrr=1: unknown key; did you mean critic.optim.lr?" in text
    assert "  algoritm.lam=0.9: unknown key; did you mean algorithm.lam?" in text
    assert "  trainer.sed=1: unknown key; did you mean trainer.seed?" in text
    assert "  critic._target_='x.Y': names the class of a section" in text
    assert "  critic.ppo_epochs='many': expected a whole number" in text


def test_the_command_line_overrides_another_spelling_in_yaml(tmp_path):
    write(tmp_path / "mine.yaml", BASE + "custom_reward_function: {path: old.py, name: f}\n")
    config = load(tmp_path, "mine", "reward.custom_reward_function.path=new.py")
    assert config.reward.custom_reward_function.path == "new.py"
    assert config.reward.custom_reward_function.name == "f"


def test_delete_removes_what_yaml_says(tmp_path):
    write(
        tmp_path / "mine.yaml",
        BASE + "critic: {optim: {lr: 1e-3}}\nray_kwargs: {ray_init: {num_cpus: 2, address: x}}\n",
    )
    config = load(tmp_path, "mine", "~critic.optim", "~ray_kwargs.ray_init.address=x")
    assert config.critic.optim.lr == 1e-5
    assert config.ray_kwargs.ray_init == {"num_cpus": 2}


def test_a_section_may_be_one_interpolation(tmp_path):
    write(
        tmp_path / "mine.yaml",
        "defaults: [_self_]\n" + BASE + "critic:\n  optim: ${actor_rollout_ref.actor.optim}\n",
    )
    config = load(tmp_path, "mine", f"{ARR}.actor.optim.lr=2e-3", "critic.optim.weight_decay=0.5")
    assert (config.critic.optim.lr, config.critic.optim.weight_decay) == (2e-3, 0.5)


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(ConfigError, match="Cannot find primary config 'nope'"):
        load(tmp_path, "nope")
    with pytest.raises(ConfigError, match=r"--config-path=nowhere: no such directory \(looked at .*nowhere"):
        load_config(PPOConfig, "x", [], "nowhere")
    write(tmp_path / "broken.yaml", "data: [1\n")
    with pytest.raises(ConfigError, match="broken"):
        load(tmp_path, "broken")


def test_a_relative_config_path_is_seen_from_the_working_directory_then_from_the_entry_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf" / "mine.yaml", BASE)
    assert load_config(PPOConfig, "mine", [], "conf").data.train_batch_size == 8
    with pytest.raises(ConfigError, match="data.train_files"):
        load_config(PPOConfig, "ppo_trainer", [], "config")


def test_nothing_is_left_behind(tmp_path, monkeypatch, ppo):
    monkeypatch.chdir(tmp_path)
    ppo("hydra.run.dir=somewhere")
    assert os.listdir(tmp_path) == []
    assert Path.cwd() == tmp_path
    assert not GlobalHydra.instance().is_initialized()


def test_the_yaml_of_a_configuration_loads_to_the_same(tmp_path, ppo):
    config = ppo(
        f"{ARR}.actor.ppo_micro_batch_size=4",
        f"{ARR}.model.override_config.a.b=[1,2]",
        "trainer.logger=[console,file]",
        "trainer.experiment_name=x",
        "custom_reward_function.path=r.py",
    )
    write(tmp_path / "again.yaml", to_yaml(config))
    assert load(tmp_path, "again") == config


def test_a_config_without_name_is_the_defaults_and_the_overrides():
    config = load_config(PPOConfig, None, ["data.train_files=a", f"{ARR}.model.path=x/y"])
    assert config.data.train_batch_size == 1024


SCRIPT = """
    algorithm.adv_estimator=grpo
    data.train_files=/data/gsm8k/train.parquet
    data.val_files=/data/gsm8k/test.parquet
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation='error'
    actor_rollout_ref.model.path=Qwen/Qwen3-8B
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    algorithm.use_kl_in_reward=False
    trainer.critic_warmup=0
    trainer.logger=["console","wandb"]
    trainer.project_name=grpo_gsm8k
    trainer.experiment_name=qwen3_8b
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
"""
ENGINE = (
    "rollout.name=vllm",
    "rollout.gpu_memory_utilization=0.6",
    "rollout.tensor_model_parallel_size=2",
    "rollout.enforce_eager=False",
    "rollout.free_cache_engine=True",
    "rollout.load_format=dummy",
    "rollout.layered_summon=True",
    "rollout.multi_stage_wake_up=True",
    "+rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=PIECEWISE",
)


def test_a_script_as_users_write_it():
    config = load_config(PPOConfig, "ppo_trainer", SCRIPT.split())
    arr = config.actor_rollout_ref
    assert (arr.rollout.n, arr.actor.use_kl_loss, config.use_critic, config.use_reference_policy) == (
        5,
        True,
        False,
        True,
    )
    assert (arr.rollout.response_length, arr.ref.log_prob_micro_batch_size_per_gpu) == (1024, 64)
    script = [*SCRIPT.split(), *(f"+{ARR}.{key[1:]}" if key[0] == "+" else f"{ARR}.{key}" for key in ENGINE)]
    rollout = load_config(PPOConfig, "ppo_trainer", script).actor_rollout_ref.rollout
    assert (rollout.name, rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size) == ("vllm", 0.6, 2)
    assert rollout.engine_kwargs.vllm == {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
