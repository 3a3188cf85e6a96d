"""Rules between sections of a reinforcement-learning configuration."""

from __future__ import annotations

import pytest

from verl.config.actor import POLICY_LOSSES
from verl.errors import ConfigError

ARR = "actor_rollout_ref"
GRPO = ("algorithm.adv_estimator=grpo", f"{ARR}.rollout.n=4")


def test_the_smallest_command_line(ppo):
    config = ppo()
    assert config.use_critic
    assert not config.use_reference_policy
    assert config.trainer.world_size == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # batches: data.train_batch_size=8, ppo_mini_batch_size=4, 2 ranks
        (
            ["data.train_batch_size=10"],
            f"data.train_batch_size=10: must be a multiple of {ARR}.actor.ppo_mini_batch_size=4, which counts "
            "prompts per optimizer step",
        ),
        (
            [f"{ARR}.actor.ppo_mini_batch_size=1"],
            f"{ARR}.actor.ppo_mini_batch_size=1: 1 samples do not split evenly over 2 ranks; make it a multiple of 2",
        ),
        (
            [*GRPO, f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"],
            f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3: must divide the 8 samples that a rank has of a mini-batch "
            "(4 prompts * 4 samples over 2 ranks); use 2, or use_dynamic_bsz=True",
        ),
        (
            [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=16"],
            f"{ARR}.actor.ppo_micro_batch_size_per_gpu=16: must divide the 2 samples that a rank has of a mini-batch "
            "(4 samples over 2 ranks); use 2, or use_dynamic_bsz=True",
        ),
        (
            ["critic.ppo_mini_batch_size=3"],
            "data.train_batch_size=8: must be a multiple of critic.ppo_mini_batch_size=3, which counts prompts per "
            "optimizer step",
        ),
        (
            [f"{ARR}.actor.use_dynamic_bsz=True", f"{ARR}.actor.ppo_max_token_len_per_gpu=1000"],
            f"{ARR}.actor.ppo_max_token_len_per_gpu=1000: the longest sample has data.max_prompt_length + "
            "data.max_response_length = 1024 tokens; give at least that many",
        ),
        # devices
        (
            ["trainer.controller=local"],
            "trainer.controller='local': runs one worker, but trainer.nnodes * trainer.n_gpus_per_node = 1 * 2 = 2; "
            "set "
            "both to 1, or use trainer.controller=ray",
        ),
        (
            ["trainer.n_gpus_per_node=0"],
            "trainer.n_gpus_per_node=0: must be >= 1",
        ),
        (
            ["trainer.n_gpus_per_node=4", "data.train_batch_size=12", f"{ARR}.actor.fsdp_config.fsdp_size=3"],
            f"{ARR}.actor.fsdp_config.fsdp_size=3: must divide trainer.nnodes * trainer.n_gpus_per_node = 4",
        ),
        (
            [f"{ARR}.rollout.name=vllm", f"{ARR}.rollout.tensor_model_parallel_size=3"],
            f"{ARR}.rollout.tensor_model_parallel_size=3: must divide trainer.n_gpus_per_node = 2",
        ),
        (
            [f"{ARR}.actor.fsdp_config.fsdp_size=0"],
            f"{ARR}.actor.fsdp_config.fsdp_size=0: must be -1 (all ranks) or a positive number of ranks",
        ),
        (
            [f"{ARR}.actor.ulysses_sequence_parallel_size=3"],
            f"{ARR}.actor.fsdp_config.ulysses_sequence_parallel_size=3: must divide trainer.nnodes * "
            "trainer.n_gpus_per_node = 2",
        ),
        (
            [f"{ARR}.actor.ulysses_sequence_parallel_size=2", f"{ARR}.model.use_remove_padding=False"],
            f"{ARR}.actor.fsdp_config.ulysses_sequence_parallel_size=2: shares the tokens of packed rows, so it needs "
            f"{ARR}.model.use_remove_padding=True",
        ),
        (
            [*GRPO, f"{ARR}.actor.skip_old_log_prob=True"],
            f"{ARR}.actor.skip_old_log_prob=True: only the first update of a step runs on the policy that sampled; "
            "with ppo_epochs=1 and ppo_mini_batch_size=4 of data.train_batch_size=8 there are more, so leave it out",
        ),
        (
            [
                f"{ARR}.actor.skip_old_log_prob=True",
                f"{ARR}.actor.ppo_mini_batch_size=8",
                "algorithm.use_kl_in_reward=True",
            ],
            f"{ARR}.actor.skip_old_log_prob=True: algorithm.use_kl_in_reward=True needs or replaces them before the "
            "update; leave one of the two out",
        ),
        # algorithm
        (
            ["algorithm.adv_estimator=grpo"],
            f"{ARR}.rollout.n=1: algorithm.adv_estimator='grpo' compares the samples of one prompt, so it needs at "
            "least "
            "2; 5 to 16 are usual",
        ),
        (
            ["critic.enable=False"],
            "critic.enable=False: algorithm.adv_estimator='gae' needs values; leave critic.enable out, or choose an "
            "estimator without a critic, for example grpo",
        ),
        (
            [*GRPO, "critic.enable=True"],
            "critic.enable=True: algorithm.adv_estimator='grpo' uses no values, so the critic would train for nothing; "
            "leave critic.enable out",
        ),
        (
            [*GRPO, "trainer.critic_warmup=5"],
            "trainer.critic_warmup=5: there is no critic to warm up with algorithm.adv_estimator='grpo'; use 0",
        ),
        (
            [f"{ARR}.rollout.do_sample=False", f"{ARR}.rollout.n=2"],
            f"{ARR}.rollout.do_sample=False: the 2 samples of a prompt would be equal; use do_sample=True or n=1",
        ),
        (
            [f"{ARR}.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"],
            f"algorithm.use_kl_in_reward=True: {ARR}.actor.use_kl_loss is True too, which would penalise the KL "
            "divergence "
            "twice; keep one of them",
        ),
        (
            [f"{ARR}.actor.kl_loss_type=low_var"],
            f"{ARR}.actor.kl_loss_type='low_var': expected one of kl, k1, abs, mse, k2, low_var_kl, k3, full, kl+, "
            "k1+, abs+, "
            "mse+, k2+, low_var_kl+, k3+, full+; did you mean 'low_var_kl'?",
        ),
        (
            [f"{ARR}.actor.policy_loss.loss_mode=vanila"],
            f"{ARR}.actor.policy_loss.loss_mode='vanila': expected one of {', '.join(POLICY_LOSSES)}; did you mean "
            "'vanilla'? (a "
            "plug-in's "
            f"name needs its module in {ARR}.model.external_lib)",
        ),
        (
            [f"{ARR}.rollout.repetition_penalty=1.1"],
            f"{ARR}.rollout.repetition_penalty=1.1: responses are then not samples of the policy that is trained, "
            "whose log-probabilities know no penalty; set algorithm.rollout_correction.rollout_is=token (or "
            "bypass_mode=True), or leave the penalty out (for validation alone there is val_kwargs.repetition_penalty)",
        ),
        # lengths
        (
            [f"{ARR}.rollout.response_length=100"],
            f"{ARR}.rollout.response_length=100: differs from data.max_response_length=512; give "
            "data.max_response_length "
            "alone",
        ),
        (
            ["data.gen_batch_size=16"],
            "data.gen_batch_size=16: differs from data.train_batch_size=8, which is for "
            "algorithm.filter_groups.enable=True; leave it out",
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=reinforce_plus_plus"],
            f"{ARR}.rollout.n=1: algorithm.filter_groups compares the samples of one prompt, so it needs at least 2",
        ),
        (
            ["algorithm.filter_groups.metric=seq_final_reward"],
            "algorithm.filter_groups.metric='seq_final_reward': is the score less the KL penalty, which makes equal "
            "outcomes differ; use seq_reward, or leave metric out",
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token", "algorithm.rollout_correction.rollout_rs_threshold=0.9"],
            "algorithm.rollout_correction.rollout_rs_threshold_lower=1.11111: must be below rollout_rs_threshold=0.9; "
            "ratios around 1 are those that agree",
        ),
        (
            ["algorithm.rollout_correction.rollout_is_batch_normalize=True"],
            "algorithm.rollout_correction.rollout_is_batch_normalize=True: there are no weights to normalise; set "
            "rollout_is",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"],
            "algorithm.rollout_correction.rollout_is='token': with bypass_mode=True and loss_type=ppo_clip the clipped "
            "ratio is already that of the policy to the rollout, so weights would count it twice; leave rollout_is out "
            "or use loss_type=reinforce",
        ),
        (
            ["algorithm.rollout_correction.loss_type=reinforce"],
            "algorithm.rollout_correction.loss_type='reinforce': is read only with bypass_mode=True",
        ),
        # data, models, rewards
        (
            ["trainer.test_freq=5"],
            "data.val_files=[]: trainer.test_freq=5 needs validation data, data.val_files=test.parquet or a list of "
            "files",
        ),
        (
            ["trainer.val_only=True"],
            "data.val_files=[]: trainer.val_only=True needs validation data, data.val_files=test.parquet or a list "
            "of files",
        ),
        (
            ["reward_model.enable=True"],
            "reward_model.model.path=None: reward_model.enable=True needs a sequence-classification model, a "
            "directory or id",
        ),
        (
            ["reward_model.enable=True", "reward_model.model.path=a/b", "data.return_raw_chat=False"],
            "data.return_raw_chat=False: the reward model applies its own chat template, so it needs the chat "
            "messages; use "
            "data.return_raw_chat=True",
        ),
        (["data.custom_cls.path=d.py"], "data.custom_cls.name=None: path='d.py' is given, so name must be given too"),
        # the run
        (
            ["trainer.resume_mode=resume_path"],
            "trainer.resume_from_path=None: resume_mode=resume_path needs the global_step_N directory to go on from",
        ),
        (
            ["trainer.resume_from_path=x/global_step_3"],
            "trainer.resume_from_path='x/global_step_3': is read only with resume_mode=resume_path, which is 'auto'",
        ),
        (["trainer.save_freq=0"], "trainer.save_freq=0: must be -1 (never) or a positive number of steps"),
        (["trainer.device=gpu"], "trainer.device='gpu': expected one of auto, cpu, cuda; did you mean 'cpu'?"),
        (
            ["trainer.logger=[console,wandbb]"],
            "trainer.logger='wandbb': expected one of console, tensorboard, wandb, mlflow, swanlab, trackio, file; "
            "did you "
            "mean 'wandb'?",
        ),
        (
            [f"{ARR}.rollout.val_kwargs.n=4"],
            f"{ARR}.rollout.val_kwargs.n=4: greedy samples of one prompt are all the same; set do_sample=True and a "
            "temperature",
        ),
        (
            [f"{ARR}.rollout.val_kwargs.do_sample=True"],
            f"{ARR}.rollout.val_kwargs.do_sample=True: with temperature=0 nothing is sampled; give a temperature > 0",
        ),
        (
            [f"{ARR}.rollout.mode=asynch"],
            f"{ARR}.rollout.mode='asynch': expected one of sync, async; did you mean 'async'?",
        ),
        (
            [f"{ARR}.rollout.mode=async", "trainer.controller=local", "trainer.n_gpus_per_node=1"],
            "trainer.controller='local': actor_rollout_ref.rollout.mode='async' runs servers as Ray actors; use "
            "trainer.controller=ray, or mode=sync",
        ),
        (
            [f"{ARR}.rollout.num_replicas=2", f"{ARR}.rollout.server.timeout=5"],
            f"{ARR}.rollout.num_replicas, server.timeout: for servers, and mode='sync' has none; leave out, or set "
            "mode=async",
        ),
        (
            [
                f"{ARR}.rollout.mode=async",
                f"{ARR}.rollout.server.openai_api=True",
                f"{ARR}.rollout.server.host=::",
            ],
            f"{ARR}.rollout.server.host='::': whoever reaches that address could generate; set the environment "
            "variable VERL_SERVER_API_KEY, which clients send as their api_key, or listen on 127.0.0.1",
        ),
        (
            [
                "trainer.deterministic=True",
                f"{ARR}.rollout.mode=async",
                f"{ARR}.rollout.max_num_seqs=1",
                f"{ARR}.rollout.over_sample_rate=0.5",
            ],
            "trainer.deterministic=True: with actor_rollout_ref.rollout.over_sample_rate=0.5 and mode='async' the "
            "moments at which requests reach the servers decide which samples a step takes; use mode=sync, or leave "
            "one of them off",
        ),
        (
            ["trainer.deterministic=True", f"{ARR}.rollout.agent.default_agent_loop=single_turn_agent"],
            "trainer.deterministic=True: agent loops are batched as they arrive, and what a batch rounds depends on "
            "who is in it; generate with rollout.name=hf and rollout.max_num_seqs=1, which computes one sequence at a "
            "time, or leave it off",
        ),
        (
            [f"{ARR}.rollout.mode=async", f"{ARR}.rollout.checkpoint_engine.backend=disk"],
            f"{ARR}.rollout.checkpoint_engine.directory=None: backend='disk'; a directory is for backend=disk, which "
            "needs one",
        ),
        (
            [f"{ARR}.hybrid_engine=False"],
            f"{ARR}.hybrid_engine=False: leave it True. Generation in processes of its own is rollout.mode=async; "
            "roles on devices of their own are not in this version",
        ),
    ],
)
def test_what_is_refused(problems, overrides, message):
    assert problems(*overrides) == [message]


def test_the_data_and_the_model_must_be_given(problems):
    from verl.config import PPOConfig, load_config

    assert problems(load=lambda: load_config(PPOConfig, "ppo_trainer", [])) == [
        "data.train_files=[]: give the training data, data.train_files=train.parquet or a list of files",
        f"{ARR}.model.path=None: give the model to train, a directory or a Hugging Face id",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        GRPO,
        (*GRPO, f"{ARR}.actor.ppo_micro_batch_size_per_gpu=8"),
        (*GRPO, "data.train_batch_size=3", f"{ARR}.actor.ppo_mini_batch_size=3"),
        (f"{ARR}.actor.use_dynamic_bsz=True", f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"),
        ("algorithm.adv_estimator=reinforce_plus_plus",),
        ("trainer.controller=local", "trainer.n_gpus_per_node=1"),
        ("trainer.val_only=True", "data.val_files=v.parquet", "data.train_files=[]"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=x/global_step_3"),
        (f"{ARR}.rollout.response_length=64", "data.max_response_length=64"),
        ("data.gen_batch_size=8",),
        (f"{ARR}.rollout.do_sample=False",),
        (f"{ARR}.actor.strategy=fsdp2", "critic.strategy=fsdp"),
        ("trainer.n_gpus_per_node=4", f"{ARR}.actor.fsdp_config.fsdp_size=2"),
    ],
)
def test_what_is_accepted(ppo, overrides):
    ppo(*overrides)


def test_who_takes_part(ppo):
    assert not ppo(*GRPO).use_critic
    assert ppo(f"{ARR}.actor.use_kl_loss=True").use_reference_policy
    assert ppo("algorithm.use_kl_in_reward=True").use_reference_policy


def test_a_plug_in_may_bring_estimators_and_losses_and_use_a_critic(ppo):
    config = ppo(
        "algorithm.adv_estimator=my_estimator",
        f"{ARR}.actor.policy_loss.loss_mode=my_loss",
        f"{ARR}.model.external_lib=my_package.plugin",
        "critic.enable=True",
    )
    assert config.use_critic


def test_rules_of_an_unused_critic_and_reference_are_not_checked(ppo):
    ppo(*GRPO, "critic.ppo_micro_batch_size_per_gpu=7", f"{ARR}.ref.log_prob_max_token_len_per_gpu=1")


def test_check_files_names_everything_that_is_missing(ppo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.parquet").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").touch()
    config = ppo(
        "data.train_files=[there.parquet,gone.parquet]",
        f"data.val_files=[{tmp_path}/gone.jsonl,'hdfs://host/x.parquet']",
        f"{ARR}.model.path={tmp_path}/empty",
        "critic.model.path=half",
        "reward_model.enable=True",
        "reward_model.model.path=./nowhere",
        "data.return_raw_chat=True",
        "custom_reward_function.path=gone.py",
        "data.custom_cls={path: empty, name: C}",
    )
    with pytest.raises(ConfigError) as caught:
        config.check_files()
    assert str(caught.value).split("\n") == [
        "files that the configuration names are missing:",
        f"  data.train_files=gone.parquet: no such file (seen from {tmp_path})",
        f"  data.val_files={tmp_path}/gone.jsonl: no such file (seen from {tmp_path})",
        "  data.val_files=hdfs://host/x.parquet: only local paths are read; copy it to this machine first",
        f"  {ARR}.model.path={tmp_path}/empty: has no config.json, so it is not a Hugging Face model directory",
        "  critic.model.path=half: has no weights (a file *.safetensors or *.bin); was it copied or downloaded whole?",
        f"  reward_model.model.path=./nowhere: no such directory (seen from {tmp_path})",
        f"  reward.custom_reward_function.path=gone.py: no such file (seen from {tmp_path})",
        "  data.custom_cls.path=empty: is a directory, expected a file",
    ]


def test_check_files_accepts_files_model_directories_and_hugging_face_ids(ppo, tmp_path):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    ppo(f"data.train_files={tmp_path}/a.parquet").check_files()
    ppo(f"data.train_files={tmp_path}/a.parquet", f"{ARR}.model.path={tmp_path}/model").check_files()
    # the critic does not take part, so its model is not looked for
    ppo(*GRPO, f"data.train_files={tmp_path}/a.parquet", "critic.model.path=/nowhere").check_files()
