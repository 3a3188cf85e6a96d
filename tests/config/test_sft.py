"""Rules of a fine-tuning configuration."""

from __future__ import annotations

import pytest

from verl.config import PreferenceConfig, load_config
from verl.errors import ConfigError


def test_defaults_and_keys_that_scripts_use(sft):
    config = sft(
        "data.micro_batch_size=4",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        "data.multiturn.enable=true",
        "data.multiturn.messages_key=chat",
        "model.fsdp_config.model_dtype=bf16",
        "optim.lr=1e-4",
        "optim.warmup_steps_ratio=0.05",
        "trainer.total_training_steps=3",
    )
    assert config.data.micro_batch_size_per_gpu == 4
    assert (config.data.prompt_dict_keys, config.data.response_dict_keys) == (["question"], ["answer"])
    assert config.data.multiturn.messages_key == "chat"
    assert config.model.fsdp_config.model_dtype == "bfloat16"
    assert (config.optim.lr, config.optim.lr_warmup_steps_ratio, config.optim.lr_scheduler_type) == (
        1e-4,
        0.05,
        "cosine",
    )
    assert config.trainer.checkpoint.save_contents == ["model", "optimizer", "extra", "hf_model"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("model.partial_pretrain=a/b", lambda c: c.model.path == "a/b"),
        ("engine.fsdp_size=1", lambda c: c.model.fsdp_config.fsdp_size == 1),
        ("engine.strategy=fsdp2", lambda c: c.model.strategy == "fsdp2"),
        ("data.messages_key=chat", lambda c: c.data.multiturn.messages_key == "chat"),
        ("use_remove_padding=False", lambda c: c.model.use_remove_padding is False),
        ("optim.lr_scheduler=linear", lambda c: c.optim.lr_scheduler_type == "linear"),
        ("checkpoint.save_contents=[model]", lambda c: c.trainer.checkpoint.save_contents == ["model"]),
    ],
)
def test_other_spellings(monkeypatch, override, read):
    from tests.config.conftest import SFT
    from verl.config import SFTConfig, load_config

    base = [o for o in SFT if not (o.startswith("model.path") and "partial" in override)]
    assert read(load_config(SFTConfig, "sft_trainer", [*base, override]))


def test_the_number_of_processes_is_what_torchrun_says(sft, monkeypatch):
    assert sft().trainer.world_size == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert sft().trainer.world_size == 8
    assert sft("trainer.n_gpus_per_node=2").trainer.world_size == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.micro_batch_size_per_gpu=3"],
            "data.micro_batch_size_per_gpu=3: must divide the 8 samples that a rank has of a mini-batch (8 samples "
            "over 1 "
            "rank); use 2, or use_dynamic_bsz=True",
        ),
        (
            ["trainer.n_gpus_per_node=3"],
            "data.train_batch_size=8: 8 samples do not split evenly over 3 ranks; make it a multiple of 3",
        ),
        (
            ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=100"],
            "data.max_token_len_per_gpu=100: the longest sample has data.max_length = 1024 tokens; give at least "
            "that many",
        ),
        (
            ["trainer.test_freq=2"],
            "data.val_files=[]: trainer.test_freq=2 needs validation data, data.val_files=test.parquet or a list of "
            "files",
        ),
        (
            ["data.pad_mode=left_right"],
            "data.pad_mode='left_right': expected one of no_padding, right; did you mean 'right'?",
        ),
        (
            ["model.strategy=megatron", "engine.tensor_model_parallel_size=2"],
            "model.megatron.tensor_model_parallel_size=2: with pipeline_model_parallel_size=1 and "
            "context_parallel_size=1 one copy of the model takes 2 ranks, which do not divide the trainer.nnodes * "
            "trainer.n_gpus_per_node = 1 ranks",
        ),
        (
            ["model.strategy=megatron", "data.pad_mode=right"],
            "data.pad_mode='right': the Megatron engine always removes padding; use pad_mode=no_padding",
        ),
        (
            ["model.strategy=megatron", "trainer.checkpoint.async_save=True"],
            "trainer.checkpoint.async_save=True: the Megatron engine writes its checkpoints before the training goes "
            "on; leave it out",
        ),
        (["data.max_lenght=3"], "data.max_lenght=3: unknown key; did you mean data.max_length?"),
    ],
)
def test_what_is_refused(problems, sft, overrides, message):
    assert problems(*overrides, load=sft) == [message]


def test_check_files(sft, tmp_path):
    config = sft(f"data.train_files={tmp_path}/gone.parquet")
    with pytest.raises(ConfigError, match=r"data.train_files=.*gone.parquet: no such file"):
        config.check_files()
    (tmp_path / "gone.parquet").touch()
    config.check_files()


def test_passes_over_the_data_when_nobody_says_how_many(sft):
    assert sft().trainer.total_epochs == 4
    files = ["data.train_files=pairs.parquet", "model.path=model"]
    assert load_config(PreferenceConfig, "preference_trainer", files).trainer.total_epochs == 1
