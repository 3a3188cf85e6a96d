"""No module imports itself by way of others, type-only and function-level imports included."""

from __future__ import annotations

import graphlib

import grimp
import pytest


def circle(imports: dict[str, set[str]]) -> list[str] | None:
    """One circle of modules; None without any."""
    try:
        tuple(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return None


def test_no_import_circles() -> None:
    graph = grimp.build_graph("verl", exclude_type_checking_imports=False)
    found = circle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert found is None, f"imports go round: {' -> '.join(found)}"


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"a"}}])
def test_a_circle_is_found(imports: dict[str, set[str]]) -> None:
    assert circle(imports) is not None
