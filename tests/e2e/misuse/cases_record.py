"""Resuming under other settings or data, directories of another experiment, and reruns from a record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.misuse.case import BASE, Case, Outcome, Place

ROWS = "data.train_files={tmp}/rows"


def earlier(program: str, *changes: str, model: bool = False) -> Callable[[Place], None]:
    """A run of the base command, with changes, that has saved step 2 in the output directory.

    Args:
        program: of the base command.
        changes: of the earlier run.
        model: it left its final model and no checkpoint.
    """

    def prepare(place: Place) -> None:
        from verl.checkpoint.final_model import provenance, provenance_file
        from verl.checkpoint.manager import CheckpointManager
        from verl.config import PPOConfig, PreferenceConfig, SFTConfig, load_config
        from verl.trainer.run_record import open_run

        schema: Any = {"train": PPOConfig, "sft": SFTConfig, "preference": PreferenceConfig}[program]
        preset = {"train": "ppo_trainer", "sft": "sft_trainer", "preference": "preference_trainer"}[program]
        words = {word.partition("=")[0]: place.fill(word) for word in (*BASE[program], *changes)}
        config = load_config(schema, preset, list(words.values()))
        manager = CheckpointManager.from_config(config.trainer)
        open_run(config, config.trainer, manager, {"data.train_files": _dataset(program, config)})
        if model:
            file = provenance_file(manager.root)
            file.parent.mkdir()
            file.write_text(json.dumps(provenance(program, 2, manager.fingerprint)))
        else:
            manager.begin(2).commit()

    return prepare


def _dataset(program: str, config: Any) -> Any:
    from verl.data import create_dataset
    from verl.data.preference_dataset import PreferenceDataset
    from verl.data.sft_dataset import SFTDataset, create_examples
    from verl.utils.tokenizer import load_tokenizer

    model = config.actor_rollout_ref.model.path if program == "train" else config.model.path
    tokenizer = load_tokenizer(model)
    if program == "train":
        return create_dataset(config.data.train_files, tokenizer, config.data, None, -1)
    kind = SFTDataset if program == "sft" else PreferenceDataset
    return create_examples(kind, config.data.train_files, tokenizer, config.data, -1, None)


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def then(*steps: Callable[[Place], None]) -> Callable[[Place], None]:
    """One after the other."""

    def prepare(place: Place) -> None:
        for step in steps:
            step(place)

    return prepare


def rows_in_order(place: Place) -> None:
    """A copy of the prompts that a case may change."""
    import pyarrow.parquet as pq

    _write_rows(place.tmp / "rows.jsonl", pq.read_table(place.task / "train.parquet").to_pylist())


def rows_reversed(place: Place) -> None:
    """The same rows in another order."""
    file = place.tmp / "rows.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def examples(place: Place) -> None:
    """A copy of the demonstrations that a case may change."""
    shutil.copyfile(place.task / "sft.jsonl", place.tmp / "rows.jsonl")


def one_example_changed(place: Place) -> None:
    """One answer is another one."""
    file = place.tmp / "rows.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text(json.dumps({**json.loads(first), "response": "zz"}) + "\n" + "".join(rest))


def own_reward(place: Place) -> None:
    """A copy of the reward function that a case may change."""
    shutil.copyfile(place.task / "reward.py", place.tmp / "reward.py")


def reward_changed(place: Place) -> None:
    """The same function, and a line more."""
    with (place.tmp / "reward.py").open("a") as file:
        file.write("SCALE = 2\n")


def own_model(place: Place) -> None:
    """A copy of the model that a case may change."""
    shutil.copytree(place.model, place.tmp / "model")


def template_changed(place: Place) -> None:
    """Another chat template: other tokens for the same rows."""
    template = place.tmp / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")


def fingerprint_damaged(place: Place) -> None:
    """No JSON any more."""
    (place.out / "global_step_2" / "fingerprint.json").write_text("{")


def record_with_a_secret(place: Place) -> None:
    """As the record of a run has it."""
    (place.tmp / "config.yaml").write_text("reward:\n  reward_kwargs:\n    api_key: '***'\n")


def record_of_sft(place: Place) -> None:
    """The record of another program."""
    (place.tmp / "config.yaml").write_text("optim:\n  lr: 0.001\nmodel:\n  path: m\n")


def untouched(place: Place, done: Outcome) -> None:
    """The checkpoint of the earlier run is as it was, and nothing is recorded."""
    assert sorted(path.name for path in place.out.iterdir() if path.name != "global_step_2") == [
        "latest_checkpointed_iteration.txt"
    ], done.stderr


LEFT = ["global_step_2/*", "latest_checkpointed_iteration.txt"]
REMEDY = ["made by a run with other settings or data", "trainer.on_resume_mismatch=allow", "trainer.experiment_name"]
RECORD = ("--config-path", "{tmp}", "--config-name", "config")

CASES = [
    Case(
        "another estimator and rate in the same place",
        "train",
        ["algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=1e-4"],
        words=[*REMEDY, "optim.lr: 0.001 -> 0.0001", "algorithm.adv_estimator: 'grpo' -> 'rloo'", "global_step_2"],
        prepare=earlier("train"),
        leaves=LEFT,
        check=untouched,
    ),
    Case(
        "another seed",
        "train",
        ["trainer.seed=7"],
        words=[*REMEDY, "trainer.seed: 1 -> 7"],
        prepare=earlier("train"),
        leaves=LEFT,
    ),
    Case(
        "other samples per prompt and longer answers",
        "train",
        ["actor_rollout_ref.rollout.n=4", "data.max_response_length=12"],
        words=[*REMEDY, "rollout.n: 2 -> 4", "data.max_response_length: 8 -> 12"],
        absent=["rollout.response_length"],  # follows from the other one
        prepare=earlier("train"),
        leaves=LEFT,
    ),
    Case(
        "rows in another order",
        "train",
        [f"{ROWS}.jsonl"],
        words=[*REMEDY, "data.train_files: the rows have changed (20 rows, "],
        prepare=then(rows_in_order, earlier("train", f"{ROWS}.jsonl"), rows_reversed),
        leaves=LEFT,
    ),
    Case(
        "a reward function with other content",
        "train",
        ["custom_reward_function.path={tmp}/reward.py"],
        words=[*REMEDY, "reward.custom_reward_function.path: the content of reward.py has changed"],
        prepare=then(own_reward, earlier("train", "custom_reward_function.path={tmp}/reward.py"), reward_changed),
        leaves=LEFT,
    ),
    Case(
        "another chat template in the model directory",
        "train",
        ["actor_rollout_ref.model.path={tmp}/model"],
        words=[*REMEDY, "actor_rollout_ref.model.path: the content of chat_template.jinja has changed"],
        prepare=then(own_model, earlier("train", "actor_rollout_ref.model.path={tmp}/model"), template_changed),
        leaves=LEFT,
    ),
    Case(
        "a reference policy that the earlier run did not have",
        "train",
        ["actor_rollout_ref.actor.use_kl_loss=True"],
        words=[*REMEDY, "use_kl_loss: False -> True"],
        prepare=earlier("train"),
        leaves=LEFT,
    ),
    Case(
        "a checkpoint of another experiment by its path",
        "train",
        [
            "trainer.resume_mode=resume_path",
            "trainer.resume_from_path={tmp}/out/global_step_2",
            "trainer.default_local_dir={tmp}/other",
            "actor_rollout_ref.rollout.temperature=0.7",
        ],
        words=[*REMEDY, "rollout.temperature: 1.0 -> 0.7"],
        prepare=earlier("train"),
        leaves=LEFT,
    ),
    Case(
        "the final model of another experiment in the way",
        "train",
        ["trainer.seed=7"],
        words=[*REMEDY, "out/huggingface", "trainer.seed: 1 -> 7"],
        prepare=earlier("train", model=True),
        leaves=["huggingface/training.json"],
    ),
    Case(
        "a misspelt consequence of a mismatch",
        "train",
        ["trainer.on_resume_mismatch=alow"],
        words=["trainer.on_resume_mismatch='alow'", "did you mean 'allow'"],
    ),
    Case(
        "a fingerprint that was edited",
        "train",
        code=1,
        words=["fingerprint.json has changed", "checksums.sha256", "trainer.resume_mode=disable"],
        prepare=then(earlier("train"), fingerprint_damaged),
        leaves=LEFT,
    ),
    Case(
        "a fingerprint that is no JSON, without checksums",
        "train",
        ["trainer.verify_checkpoint=False"],
        code=1,
        words=["fingerprint.json cannot be read"],
        prepare=then(earlier("train"), fingerprint_damaged),
        leaves=LEFT,
    ),
    Case(
        "a rerun from a record with a hidden secret",
        "train",
        argv=[*RECORD, *BASE["train"]],
        words=["reward.reward_kwargs.api_key='***'", "give its value on the command line"],
        prepare=record_with_a_secret,
    ),
    Case(
        "a rerun from the record of another program",
        "train",
        argv=[*RECORD, *BASE["train"]],
        words=["optim.lr=0.001", "unknown key", "actor_rollout_ref.actor.optim.lr"],
        prepare=record_of_sft,
    ),
    Case(
        "a rerun from a directory without a record",
        "train",
        argv=["--config-path", "{tmp}", "--config-name", "config"],
        words=["config"],
    ),
    Case(
        "another rate",
        "sft",
        ["optim.lr=1e-2"],
        words=[*REMEDY, "optim.lr: 0.001 -> 0.01"],
        prepare=earlier("sft"),
        leaves=LEFT,
    ),
    Case(
        "one changed demonstration",
        "sft",
        [f"{ROWS}.jsonl"],
        words=[*REMEDY, "data.train_files: the rows have changed (24 rows, "],
        prepare=then(examples, earlier("sft", f"{ROWS}.jsonl"), one_example_changed),
        leaves=LEFT,
    ),
    Case(
        "another strength of the reference",
        "preference",
        ["loss.beta=0.5"],
        words=[*REMEDY, "loss.beta: 0.1 -> 0.5"],
        prepare=earlier("preference"),
        leaves=LEFT,
    ),
]
