"""Files of the base commands, and the process that forks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.misuse.running import Zygote


@pytest.fixture(scope="session")
def misuse_task(task_dir: Path) -> Path:
    """The files of tiny runs, and those of the other programs beside them."""
    letters = "abcdefgh"
    files = {
        "sft": [{"prompt": letters[i % 8], "response": letters[i % 8] * (1 + i % 5)} for i in range(24)],
        "pairs": [
            {"prompt": letters[i % 8], "chosen": letters[i % 4], "rejected": letters[4 + i % 4]} for i in range(16)
        ],
        "answers": [
            {
                "data_source": "digits",
                "prompt": "say 1",
                "responses": ["1", "22"],
                "reward_model": {"style": "rule", "ground_truth": "1"},
            }
            for _ in range(4)
        ],
    }
    for name, rows in files.items():
        (task_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return task_dir


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks for commands; starts when the first case needs it."""
    process = Zygote()
    yield process
    process.close()
