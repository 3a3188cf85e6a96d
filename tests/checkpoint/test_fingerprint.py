"""What decides the numbers of a run is part of its checkpoints, and a run under other values does not resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.checkpoint.fingerprint import FINGERPRINT_FILE, Fingerprint
from verl.checkpoint.manager import CheckpointManager
from verl.config import PPOConfig, SFTConfig, load_config
from verl.data.files import Rows
from verl.errors import CheckpointError, ConfigError
from verl.trainer.run_record import fingerprint_of_run, open_run

ROWS = [{"prompt": f"say {i}", "data_source": "x"} for i in range(6)]


class Data:
    """The part of a data set that matters here."""

    def __init__(self, path: Path) -> None:
        self.rows = Rows([str(path)])

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self, items: Any = None) -> str:
        return self.rows.fingerprint(items)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Data, a reward function and something like a model."""
    write_rows(tmp_path / "train.parquet", ROWS)
    write_rows(tmp_path / "val.parquet", ROWS[:2])
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def ppo(place: Path, *overrides: str) -> PPOConfig:
    given = {
        "data.train_files": f"{place}/train.parquet",
        "data.val_files": f"{place}/val.parquet",
        "data.train_batch_size": "4",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
        "actor_rollout_ref.model.path": f"{place}/model",
        "reward.custom_reward_function.path": f"{place}/reward.py",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": "2",
        "trainer.n_gpus_per_node": "1",
        "trainer.default_local_dir": f"{place}/run",
    }
    given.update(override.split("=", 1) for override in overrides)
    return load_config(PPOConfig, "ppo_trainer", [f"{key}={value}" for key, value in given.items()])


def datasets(config: PPOConfig) -> dict[str, Data]:
    return {f"data.{name}": Data(Path(getattr(config.data, name)[0])) for name in ("train_files", "val_files")}


def saved(place: Path, *overrides: str) -> Path:
    """A checkpoint of a run under these settings."""
    config = ppo(place, *overrides)
    manager = CheckpointManager.from_config(config.trainer)
    assert open_run(config, config.trainer, manager, datasets(config)) is None
    return manager.begin(2).commit()


def resume(place: Path, *overrides: str) -> Path | None:
    config = ppo(place, *overrides)
    return open_run(config, config.trainer, CheckpointManager.from_config(config.trainer), datasets(config))


def test_a_checkpoint_holds_settings_and_contents(place: Path) -> None:
    path = saved(place)
    text = (path / FINGERPRINT_FILE).read_text()
    assert '"algorithm.adv_estimator": "grpo"' in text
    assert '"6 rows, ' in text
    assert FINGERPRINT_FILE in (path / "checksums.sha256").read_text()


def test_equal_runs_resume(place: Path) -> None:
    assert resume(place, "trainer.total_epochs=3") is None  # nothing is there
    assert saved(place) == resume(place)


@pytest.mark.parametrize(
    "change",
    [
        "trainer.total_epochs=99",
        "trainer.total_training_steps=7",
        "trainer.logger=[file]",
        "trainer.project_name=other",
        "trainer.save_freq=5",
        "trainer.test_freq=5",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
        "critic.optim.lr=0.5",  # there is no critic
        "actor_rollout_ref.actor.megatron.seed=3",  # the engine is the other one
        "ray_kwargs.ray_init.num_cpus=3",
    ],
)
def test_lengths_places_reports_and_cuts_may_change(place: Path, change: str) -> None:
    assert saved(place) == resume(place, change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.0001"),
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator: 'grpo' -> 'rloo'"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n: 2 -> 4"),
        ("trainer.seed=2", "trainer.seed: 1 -> 2"),
        ("reward.reward_kwargs.bonus=1", "reward.reward_kwargs.bonus: None -> 1"),
        ("actor_rollout_ref.model.override_config.attention_dropout=0.1", "attention_dropout: None -> 0.1"),
        ("reward.custom_reward_function.path=null", "reward.py' -> None"),
        ("data.max_response_length=64", "data.max_response_length: 512 -> 64"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "use_kl_loss: False -> True"),
    ],
)
def test_what_decides_numbers_may_not(place: Path, change: str, told: str) -> None:
    saved(place)
    with pytest.raises(ConfigError, match="made by a run with other settings") as raised:
        resume(place, change)
    assert told in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3, "what follows from another key is not listed"
    assert "trainer.on_resume_mismatch=allow" in str(raised.value)


def test_all_differences_are_listed_together(place: Path) -> None:
    saved(place)
    (place / "reward.py").write_text("def compute_score(**kwargs):\n    return 2.0\n")
    with pytest.raises(ConfigError) as raised:
        resume(place, "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=1e-4", "trainer.save_freq=3")
    lines = str(raised.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == [
        "actor_rollout_ref.actor.optim.lr",
        "reward.custom_reward_function.path",
        "algorithm.adv_estimator",
    ]
    assert "the content of reward.py has changed" in lines[1]


def test_rows_in_another_order_are_refused(place: Path) -> None:
    saved(place)
    write_rows(place / "train.parquet", ROWS[::-1])
    with pytest.raises(ConfigError, match=r"data\.train_files: the rows have changed \(6 rows, .* -> 6 rows, "):
        resume(place)


def test_the_same_rows_and_files_elsewhere_resume(place: Path) -> None:
    saved(place)
    other = place / "moved"
    (other / "model").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (other / "model" / name).write_bytes((place / "model" / name).read_bytes())
    (other / "model" / "README.md").write_text("not what the model computes")
    (other / "r.py").write_bytes((place / "reward.py").read_bytes())
    lines = "".join(f'{{"prompt": "{row["prompt"]}", "data_source": "x"}}\n' for row in ROWS)
    (other / "train.jsonl").write_text(lines)
    moved = [
        f"data.train_files={other}/train.jsonl",
        f"actor_rollout_ref.model.path={other}/model",
        f"reward.custom_reward_function.path={other}/r.py",
    ]
    assert resume(place, *moved) is not None


def test_another_model_under_the_same_name_is_refused(place: Path) -> None:
    saved(place)
    (place / "model" / "model.safetensors").write_bytes(b"WEIGHTS")
    (place / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError) as raised:
        resume(place)
    assert "actor_rollout_ref.model.path: chat_template.jinja is new, the content of model.safetensors" in str(
        raised.value
    )
    assert "critic.model.path" not in str(raised.value)


def test_other_validation_rows_count_only_where_they_choose_checkpoints(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    saved(place)
    write_rows(place / "val.parquet", ROWS[2:4])
    with caplog.at_level(logging.INFO):
        assert resume(place) is not None
    assert "data.val_files: the rows have changed" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.val_files"):
        resume(place, "trainer.best_ckpt_metric=val-core/x/reward/mean@1")


def test_allow_tells_and_resumes(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    saved(place)
    assert resume(place, "trainer.seed=2", "trainer.on_resume_mismatch=allow") is not None
    assert "trainer.seed: 1 -> 2" in caplog.text


def test_an_older_checkpoint_without_a_fingerprint_is_accepted(place: Path) -> None:
    config = ppo(place)
    path = CheckpointManager.from_config(config.trainer).begin(2).commit()
    assert not (path / FINGERPRINT_FILE).exists()
    assert resume(place, "trainer.seed=2") == path


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 7}', '{"format": 1, "settings": 5, "contents": {}}'])
def test_a_damaged_fingerprint_is_told(place: Path, text: str) -> None:
    path = saved(place)
    (path / FINGERPRINT_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"fingerprint\.json|holds a list"):
        resume(place, "trainer.verify_checkpoint=False")


def test_a_key_that_a_checkpoint_does_not_know_counts_as_its_default(place: Path) -> None:
    config = ppo(place)
    mine = fingerprint_of_run(config, datasets(config))
    other = mine.as_json()
    del other["settings"]["algorithm.norm_adv_by_std_in_grpo"]
    assert mine.differences(other) == []
    config = ppo(place, "algorithm.norm_adv_by_std_in_grpo=False")
    (found,) = fingerprint_of_run(config, datasets(config)).differences(other)
    assert found.decisive
    other["settings"]["algorithm.of_the_future"] = 3
    assert mine.differences(other) == []


def test_secrets_are_not_kept(place: Path) -> None:
    config = ppo(place, "reward.reward_kwargs.api_key=abcdefghijk")
    assert "abcdefghijk" not in str(fingerprint_of_run(config, {}).as_json())


def test_supervised_runs_have_fingerprints_too(place: Path) -> None:
    config = load_config(
        SFTConfig, "sft_trainer", [f"data.train_files={place}/train.parquet", f"model.path={place}/model"]
    )
    found = fingerprint_of_run(config, {"data.train_files": Data(place / "train.parquet")})
    assert set(found.contents) == {"data.train_files", "model.path"}
    assert not any(key.startswith("model.megatron") for key in found.settings)
    assert isinstance(found, Fingerprint)
