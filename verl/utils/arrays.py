"""NumPy arrays of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array; unlike ``np.array`` it never turns equal-length lists into a matrix."""
    out = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # one by one: a slice assignment would unpack nested lists
        out[index] = value
    return out
