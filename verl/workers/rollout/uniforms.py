"""Uniform random numbers that belong to a request: a pure function of its seed and the token's number.

A counter-based generator costs one vectorised call for all rows, where a generator object per request costs
microseconds each; and a sample cannot depend on who else is in the batch, on the device or on the torch version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: step of the Weyl sequence
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.ArrayLike, count: int, first: npt.ArrayLike = 0) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea, Flood 2014: a Weyl sequence through a 64-bit mixing function), started from the mixed
    seed so that neighbouring seeds are unrelated.

    Args:
        seeds: (B,) integers in [0, 2**64).
        count: numbers per seed.
        first: (B,) or one number: how many numbers of each seed to pass over.

    Returns:
        (B, count) float64; entry (b, t) depends on ``seeds[b]`` and ``first[b] + t`` only.
    """
    start = mix(np.asarray(seeds, dtype=np.uint64))
    with np.errstate(over="ignore"):
        number = np.asarray(first, dtype=np.uint64).reshape(-1, 1) + np.arange(1, count + 1, dtype=np.uint64)
        state = start[:, None] + number * GOLDEN
    return (mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's mixing function."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
