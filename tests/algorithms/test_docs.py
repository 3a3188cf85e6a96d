"""The pages of docs/algorithms: complete, and naming only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from verl.config import PPOConfig
from verl.config.schema import keys_of
from verl.trainer.ppo.glossary import describe

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "algorithms").glob("*.md"))
ROOTS = "algorithm|actor_rollout_ref|critic|reward|reward_model|data|trainer"


def text(name: str) -> str:
    return (DOCS / "algorithms" / name).read_text(encoding="utf-8")


def linked(page: str) -> dict[str, str]:
    """Names in link texts of the index, with the page they lead to."""
    found = re.findall(r"\[((?:`[^`]+`(?:, )?)+)\]\((\w+\.md)\)", page)
    return {name: target for names, target in found for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize("registry", [ADV_ESTIMATORS, POLICY_LOSSES], ids=["estimators", "losses"])
def test_every_built_in_algorithm_has_a_page_that_the_index_links(registry) -> None:
    index = linked(text("README.md"))
    for name in registry:
        if registry[name].__module__.startswith("verl."):
            assert name in index, f"docs/algorithms/README.md does not link a page for {name}"
            assert f"`{name}`" in text(index[name]).splitlines()[0], f"{index[name]} is not about {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_exist(page: Path) -> None:
    keys = set(keys_of(PPOConfig))
    content = page.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w./])((?:{ROOTS})\.[a-z_.0-9]+)", content)
    for name in named:
        path = name.rstrip(".")
        assert path in keys or any(key.startswith(path + ".") for key in keys), f"{page.name} names {path}"
    for prefix in re.findall(r"key \(under `([a-z_.]+)`\)", content):
        table = content.split(f"(under `{prefix}`)")[1].split("\n\n")[0]
        for row in table.splitlines()[2:]:
            for name in re.findall(r"`([a-z_]+)`", row.split("|")[1]):
                assert f"{prefix}.{name}" in keys, f"{page.name} names {prefix}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_exist(page: Path) -> None:
    named = re.findall(r"`((?:actor|critic|filter_groups|reward_model)/[\w/]+)`", page.read_text(encoding="utf-8"))
    for name in named:
        assert describe(name), f"{page.name} names {name}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in ("README.md", "own.md", "recipes.md")], ids=lambda page: page.name
)
def test_pages_say_what_differs(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    assert content.startswith("# ")
    if page.name not in ("value_and_entropy.md", "differences.md"):
        assert "**Differences**" in content
    if page.name not in ("differences.md", "aggregation.md", "kl.md", "value_and_entropy.md"):
        assert "**When to use**" in content
        assert "arxiv.org/abs/" in content
