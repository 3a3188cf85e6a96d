"""Every key that public scripts use is read or refused with its own sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import PPOConfig, PreferenceConfig, SFTConfig, load_config
from verl.config.algorithm import ADV_ESTIMATORS, NEEDS_GROUPS, NEEDS_VALUES, POLICY_LOSSES
from verl.config.base import Config
from verl.config.generation import EvalConfig, GenerationConfig
from verl.config.keys import ALIASES, UNSUPPORTED, Unsupported, find_unsupported, resolve_alias
from verl.config.load import _free_parent
from verl.config.schema import keys_of, nearest
from verl.config.trainer import LOGGERS
from verl.errors import ConfigError

KNOWN = (Path(__file__).parent / "known_keys.txt").read_text(encoding="utf-8").split()
ROOTS: dict[str, type[Config]] = {
    "PPOConfig": PPOConfig,
    "SFTConfig": SFTConfig,
    "PreferenceConfig": PreferenceConfig,
    "GenerationConfig": GenerationConfig,
    "EvalConfig": EvalConfig,
}


def fate(root: str, path: str) -> str:
    """Return what happens to a key: ``"read"``, ``"refused"`` or ``"unknown"``."""
    keys, ours = keys_of(ROOTS[root]), resolve_alias(root, path)
    if (ours in keys and keys[ours].kind != "section") or _free_parent(ours, keys) is not None:
        return "read"
    return "refused" if find_unsupported(ours) else "unknown"


def test_the_list_is_complete():
    assert len(KNOWN) == 326


@pytest.mark.parametrize("path", KNOWN)
def test_a_known_key_is_never_unknown(path):
    fates = {fate(root, path) for root in ROOTS}
    assert fates & {"read", "refused"}


def test_known_keys_are_refused_through_the_command_line_with_a_sentence():
    refused = [k for k in KNOWN if fate("PPOConfig", k) == "refused"]
    assert len(refused) > 30
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, "ppo_trainer", [f"{k}=surely_not_off" for k in refused])
    text = str(caught.value)
    assert "unknown key" not in text
    assert all(f"{k}='surely_not_off'" in text for k in refused)


def test_every_reason_says_what_it_is_and_what_to_do():
    for entry in UNSUPPORTED:
        assert len(entry.reason.split()) >= 8, entry.pattern
        assert any(
            word in entry.reason
            for word in ("leave it out", "use ", "name the", "train on", "keeps", "writes", "copy", "text")
        ), entry


def test_an_alias_leads_to_a_key_and_hides_none():
    for root, table in ALIASES.items():
        keys = keys_of(ROOTS[root])
        for other, ours in table.items():
            target = resolve_alias(root, ours)
            assert target in keys or _free_parent(target, keys) is not None, (other, ours)
            assert other not in keys, other


def test_an_unsupported_pattern_hides_no_key():
    for schema in ROOTS.values():
        for path in keys_of(schema):
            assert find_unsupported(path) is None, path


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.b*", "a.bc", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("a.**", "a", True),
        ("**.c", "a.b.c", True),
        ("**.c", "c", True),
        ("**.c", "a.bc", False),
        ("**.m.**", "a.m.x.y", True),
    ],
)
def test_patterns(pattern, path, matches, monkeypatch):
    monkeypatch.setattr("verl.config.keys.UNSUPPORTED", (Unsupported(pattern, "reason"),))
    assert (find_unsupported(path) is not None) == matches


def test_suggestions():
    keys = keys_of(PPOConfig)
    assert nearest("actor_rollout_ref.actor.kl_los_coef", keys) == ["actor_rollout_ref.actor.kl_loss_coef"]
    assert nearest("trainer.total_epoch", keys) == ["trainer.total_epochs"]
    assert nearest("algorithm.kl_ctrl.kl_coeff", keys) == ["algorithm.kl_ctrl.kl_coef"]
    assert nearest("optim.lr", keys) == [
        f"{role}.optim.lr" for role in ("critic", "reward_model", "actor_rollout_ref.actor")
    ]
    assert nearest("something.entirely.different", keys) == []


def test_the_names_in_the_table_are_those_that_are_registered():
    from verl.algorithms import registry
    from verl.algorithms.registry import fields_needed
    from verl.trainer.ppo import core_algos  # noqa: F401  registers all
    from verl.utils.tracker import TRACKERS

    assert set(ADV_ESTIMATORS) == set(registry.ADV_ESTIMATORS)
    assert set(POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    assert set(LOGGERS) == set(TRACKERS)
    needs = {name: fields_needed(registry.ADV_ESTIMATORS[name]) for name in ADV_ESTIMATORS}
    assert {name for name, fields in needs.items() if "values" in fields} == NEEDS_VALUES
    assert {name for name, fields in needs.items() if "uid" in fields} == NEEDS_GROUPS
