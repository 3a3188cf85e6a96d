"""Numbers about the trajectories of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def agent_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics from the column ``agent_info``.

    Returns:
        ``agent/aborted/<reason>`` and ``agent/aborted_fraction``; ``agent/tool_failures/<kind>`` and the share
        ``agent/tool_failure_fraction``; ``agent/tool_calls/<tool>``; ``agent/tool_seconds/*`` of a call and
        ``agent/generate_seconds/*``, ``agent/trajectory_seconds/*`` of a trajectory; ``agent/truncated``,
        ``agent/history_rewrites``; ``agent/engine_idle_fraction``; ``agent/reported/<name>`` for what loops
        return as metrics.
    """
    infos = [info for info in infos if info]  # further rows of a trajectory have none
    if not infos:
        return {}
    aborted = Counter(info["aborted"] for info in infos if info["aborted"])
    metrics = {f"agent/aborted/{reason}": float(count) for reason, count in aborted.items()}
    metrics["agent/aborted_fraction"] = sum(aborted.values()) / len(infos)
    counts: Counter[str] = Counter()
    for info in infos:
        counts.update(info["counts"])
    metrics |= {f"agent/{name}": float(counts[name]) for name in counts}
    metrics |= {f"agent/{name}": 0.0 for name in ("truncated", "history_rewrites") if name not in counts}
    tools: dict[str, list[float]] = {}
    for info in infos:
        for name, seconds in info["tool_seconds"].items():
            tools.setdefault(name, []).extend(seconds)
    calls = [second for seconds in tools.values() for second in seconds]
    metrics |= {f"agent/tool_calls/{name}": float(len(seconds)) for name, seconds in tools.items()}
    if calls:
        failures = sum(count for name, count in counts.items() if name.startswith("tool_failures/"))
        metrics["agent/tool_failure_fraction"] = failures / len(calls)
        metrics |= _statistics("agent/tool_seconds", calls)
    metrics |= _statistics("agent/generate_seconds", [info["generate_seconds"] for info in infos])
    metrics |= _statistics("agent/trajectory_seconds", [info["seconds"] for info in infos])
    idle = [info["engine_idle_fraction"] for info in infos if "engine_idle_fraction" in info]
    if idle:
        metrics["agent/engine_idle_fraction"] = float(np.mean(idle))
    return metrics | _reported(infos)


_OWN = frozenset({"aborted", "counts", "tool_seconds", "generate_seconds", "seconds", "engine_idle_fraction"})


def _reported(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the numbers that agent loops return as metrics, over the trajectories that have them."""
    found: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            if name not in _OWN and isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return {f"agent/reported/{name}": float(np.mean(values)) for name, values in found.items()}


def _statistics(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}/mean": float(np.mean(values)), f"{prefix}/max": float(np.max(values))}
