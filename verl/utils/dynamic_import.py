"""Load a function or class, or a YAML file, that a user names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from verl.errors import ConfigError


def load_module(path: str) -> ModuleType:
    """Import a Python file, or a module when ``path`` is ``"pkg://package.module"`` or a dotted name.

    A file is executed once per process: loading it again returns the same module, so that classes keep their
    identity. The module is registered in ``sys.modules``, which makes its objects picklable within the process tree.

    Raises:
        ConfigError: the file or module does not exist, or raised while it was imported.
    """
    file = Path(path).expanduser()
    if path.startswith("pkg://") or (file.suffix != ".py" and "/" not in path and not file.exists()):
        return _import_module(path.removeprefix("pkg://"))
    if not file.is_file():
        raise ConfigError(f"file {path!r} does not exist (looked at {file.absolute()}); give the path of a Python file")
    resolved = file.resolve()
    digest = hashlib.blake2b(str(resolved).encode(), digest_size=6).hexdigest()
    name = f"verl_user_{resolved.stem.replace('-', '_')}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"importing {path!r} raised {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ConfigError(
                f"no module {name!r}: give the path of a .py file, or a module that can be imported"
            ) from error
        raise ConfigError(f"importing {name!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ConfigError(f"importing {name!r} raised {type(error).__name__}: {error}") from error


def load_object(path: str, name: str) -> Any:
    """The object called ``name`` in the file or module ``path``.

    Raises:
        ConfigError: the file is missing or broken, or has no such object; the message lists what it defines.
    """
    module = load_module(path)
    if hasattr(module, name):
        return getattr(module, name)
    defined = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]
    listing = ", ".join(defined) if defined else "no function or class"
    raise ConfigError(f"{path!r} has no {name!r}; it defines {listing}")


def load_target(target: str) -> Any:
    """The object that is named ``package.module.Name`` or ``file.py:Name``.

    Raises:
        ConfigError: the name is of neither form, or there is no such object.
    """
    path, _, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    if not path:
        raise ConfigError(f"{target!r}: write package.module.Name or file.py:Name")
    return load_object(path, name)


def read_yaml(path: str, key: str) -> Any:
    """The content of a YAML file that the configuration key ``key`` names.

    Raises:
        ConfigError: the file cannot be read or is no YAML.
    """
    try:
        return yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}={path}: cannot be read: {error}") from error
