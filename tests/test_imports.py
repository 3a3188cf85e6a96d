"""What importing costs, and that every module can be imported at all."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import verl

HEAVY = ("torch", "ray", "transformers", "tensordict", "pyarrow")
OPTIONAL = ("vllm", "sglang", "megatron", "wandb", "mlflow", "swanlab", "trackio")


def loaded_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running ``code``."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["verl", "verl.errors", "verl.envs", "verl.cli", "verl.config"])
def test_light_modules_load_no_heavy_package(module: str) -> None:
    assert not loaded_after(f"import {module}") & set(HEAVY)


def test_the_command_line_help_loads_no_heavy_package() -> None:
    assert not loaded_after("import verl.cli, contextlib, io\nverl.cli.main(['--version'])") & {"torch", "ray"}


def test_data_proto_loads_on_first_use_and_is_one_class() -> None:
    assert "torch" in loaded_after("import verl; verl.DataProto")
    from verl.protocol import DataProto

    assert verl.DataProto is DataProto
    with pytest.raises(AttributeError, match="no attribute 'DataPrototype'"):
        _ = verl.DataPrototype


@pytest.mark.parametrize("module", ["verl.algorithms", "verl.protocol"])
def test_tensor_code_loads_neither_ray_nor_transformers(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "ray" not in loaded


def test_every_module_imports_in_one_process_and_optional_packages_stay_out() -> None:
    names = [m.name for m in pkgutil.walk_packages(verl.__path__, "verl.") if not m.name.endswith("__main__")]
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    # Modules whose whole job is an optional package cannot be imported without it.
    bound = {"vllm": "vllm", "sglang": "sglang", "megatron": "megatron"}
    wanted = [n for n in names if not any(package in missing and word in n for package, word in bound.items())]
    loaded = loaded_after("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in wanted))
    assert not loaded & set(missing)
