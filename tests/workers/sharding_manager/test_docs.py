"""The example of the page runs and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from verl.workers.sharding_manager.reshard.grid import transition_cost


def test_the_pages_example_moves_what_the_formula_says(repo_root: Path) -> None:
    text = (repo_root / "docs" / "hybrid_engine.md").read_text("utf-8")
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "generation_groups" in code]
    scope: dict = {}
    exec(block, scope)
    size = 80 * 28672 * 8192 * 2
    assert scope["changes"].received.max() == transition_cost("hybridflow", size, tp=8, generation_tp=4).moved
    assert scope["changes"].redundant.max() == 0
