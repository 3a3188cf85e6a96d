"""Settings and fixtures that every test shares.

Environment first: OpenMP reads its thread count when torch is imported, and the children of a test inherit it.
"""

from __future__ import annotations

import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray's own future default; leaves CUDA_VISIBLE_DEVICES alone
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # a test decides itself whether it is distributed

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Tell xdist (``--dist loadgroup``) what belongs together.

    A file stays in one process, so that its fixtures are made once. Tests that start several processes share one
    process of pytest: side by side they would only fight for the cores. The other one has the rest meanwhile.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        several = (
            item.get_closest_marker("dist") is not None
            or "ray_local" in item.fixturenames
            or hasattr(item.module, "RunningTrainer")
        )
        item.add_marker(
            pytest.mark.xdist_group("processes" if several else item.path.relative_to(REPO_ROOT).as_posix())
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse versions of pytest and xdist whose groups have no effect: tests that start processes would collide."""
    if session.config.getoption("loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests on this pytest; see requirements/dev.txt")


REPO_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _plain_logger() -> Iterator[None]:
    """Every test finds the ``verl`` logger as importing leaves it, whatever program ran in this process before."""
    logger = logging.getLogger("verl")

    def reset() -> None:
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)

    reset()
    yield
    reset()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The top directory of the checkout."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Qwen2 model (hidden 32, 2 layers) with its byte-level tokenizer. Do not write into it."""
    from tests.fixtures.tiny import make_tiny_model_dir

    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A local Ray of 8 logical CPUs and no GPU, started once."""
    import ray

    from verl.single_controller.ray.session import start_ray

    if not ray.is_initialized():
        start_ray(
            num_cpus=8,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=256 * 2**20,
        )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _leave_process_group() -> Iterator[None]:
    """A module that joins a process group must not pass it on to the next one."""
    yield
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _forget_plug_ins() -> Iterator[None]:
    """What a test registers must not be known to the next one."""
    yield
    import sys

    for module, name in (
        ("verl.algorithms.registry", "ADV_ESTIMATORS"),
        ("verl.algorithms.registry", "POLICY_LOSSES"),
        ("verl.rewards.manager", "REWARD_MANAGERS"),
        ("verl.utils.tracking", "TRACKERS"),
    ):
        registry = getattr(sys.modules.get(module), name, None)
        if registry is not None:
            for key in [key for key in registry if not registry[key].__module__.startswith("verl.")]:
                del registry._items[key]
