"""Splitting sequences of unequal length so that every rank, or every micro-batch, has about the same work.

All functions are deterministic: the same lengths give the same split, on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

Bin = tuple[int, list[int]]  # total cost, indices


def get_seqlen_balanced_partitions(
    seqlens: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Split items into ``k_partitions`` sets with near-equal totals.

    The largest differencing method (Karmarkar and Karp, 1982), for k sets: partial solutions are merged, always the
    two with the widest spread between largest and smallest set, the large sets of one onto the small sets of the
    other. Merging never widens a spread, hence the bound: **the totals of any two sets differ by at most the largest
    length** (with ``equal_size``, by at most the largest length minus the smallest).

    Args:
        seqlens: cost of each item, non-negative integers; usually its number of tokens.
        k_partitions: number of sets, at most the number of items.
        equal_size: every set has the same number of items, which must then be divisible.

    Returns:
        ``k_partitions`` non-empty lists of indices, each in ascending order; the sets are ordered by their first index.

    Raises:
        ValueError: fewer items than sets, a number that is not divisible, or a negative length.
    """
    count = len(seqlens)
    if k_partitions < 1:
        raise ValueError(f"k_partitions={k_partitions}: at least one set is needed")
    if count < k_partitions:
        raise ValueError(f"{count} sequences cannot fill {k_partitions} partitions; use at most {count}")
    if equal_size and count % k_partitions:
        raise ValueError(f"{count} sequences do not divide into {k_partitions} partitions of equal size")
    lengths = [int(length) for length in seqlens]
    if min(lengths) < 0:
        raise ValueError(f"a sequence has the negative length {min(lengths)}")
    if k_partitions == 1:
        return [list(range(count))]

    # Longest first; ties by index keep the result independent of the sort's input order.
    order = sorted(range(count), key=lambda i: (-lengths[i], i))
    if equal_size:
        seeds = [order[start : start + k_partitions] for start in range(0, count, k_partitions)]
    else:
        seeds = [[i] for i in order]

    tie = itertools.count()
    heap: list[tuple[int, int, list[Bin]]] = []
    for seed in seeds:
        bins: list[Bin] = [(lengths[i], [i]) for i in seed]
        bins += [(0, []) for _ in range(k_partitions - len(seed))]
        heap.append((-(bins[0][0] - bins[-1][0]), next(tie), bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, wide = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(wide, reversed(other), strict=True)]
        # More items first among equal totals, so that sets of zero-length items do not stay empty.
        merged.sort(key=lambda item: (-item[0], -len(item[1])))
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), next(tie), merged))
    return sorted((sorted(indices) for _, indices in heap[0][2]), key=lambda part: part[0])


def plan_micro_batches(
    seqlens: Sequence[int], max_tokens: int, *, min_count: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Group samples into micro-batches of at most ``max_tokens`` tokens, few and of near-equal size.

    Args:
        seqlens: tokens per sample, without padding.
        max_tokens: the most tokens of one micro-batch.
        min_count: at least this many micro-batches; ranks that must run the same number agree on it beforehand.
        multiple_of: the number of micro-batches is a multiple of this (as pipeline schedules need).

    Returns:
        Lists of sample indices; every sample is in exactly one, none is empty.

    Raises:
        ValueError: one sample alone is longer than ``max_tokens``, or there are fewer samples than micro-batches.
    """
    if not len(seqlens):
        return []
    longest = max(int(length) for length in seqlens)
    if longest > max_tokens:
        raise ValueError(
            f"a sample has {longest} tokens and max_tokens is {max_tokens}; raise the token limit of the micro-batch "
            "or shorten prompts and responses"
        )
    total = sum(int(length) for length in seqlens)
    count = _round_up(max(min_count, -(-total // max_tokens), 1), multiple_of)
    while count <= len(seqlens):
        parts = get_seqlen_balanced_partitions(seqlens, count)
        if max(sum(int(seqlens[i]) for i in part) for part in parts) <= max_tokens:
            return parts
        count = _round_up(count + 1, multiple_of)
    if len(seqlens) % multiple_of == 0 and len(seqlens) >= min_count:
        return [[i] for i in range(len(seqlens))]
    raise ValueError(
        f"{len(seqlens)} samples cannot be split into a number of micro-batches that is at least {min_count} and a "
        f"multiple of {multiple_of}"
    )


def arrange_mini_batches(seqlens: Sequence[int], mini_batch_size: int, dp_size: int, balance: bool = True) -> list[int]:
    """An order of samples that keeps global mini-batches the same for any number of data-parallel ranks.

    Samples ``[i * M, (i + 1) * M)`` are mini-batch ``i``. After reordering, the batch is cut into ``dp_size`` chunks
    and each chunk into pieces of ``M / dp_size``; piece ``i`` of all ranks together is then exactly mini-batch ``i``.
    A plain cut would instead give every rank other samples in its first mini-batch, and the order of optimizer
    steps, hence the result, would depend on the number of ranks.

    Args:
        seqlens: tokens per sample, (B,).
        mini_batch_size: M, samples of one optimizer step over all ranks; the last mini-batch may be shorter.
        dp_size: number of data-parallel ranks.
        balance: give the ranks near-equal token totals within each mini-batch (bound as in
            :func:`get_seqlen_balanced_partitions`) and over the whole batch; otherwise keep the given order.

    Returns:
        Indices into the given order, a permutation of ``range(B)``.

    Raises:
        ValueError: a size is not divisible by ``dp_size``.
    """
    count = len(seqlens)
    if mini_batch_size < 1 or dp_size < 1:
        raise ValueError(f"mini_batch_size={mini_batch_size} and dp_size={dp_size} must be positive")
    for name, size in (("mini-batch", mini_batch_size), ("batch", count)):
        if size % dp_size:
            raise ValueError(f"a {name} of {size} samples does not divide over {dp_size} data-parallel ranks")
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for start in range(0, count, mini_batch_size):
        members = range(start, min(start + mini_batch_size, count))
        share = len(members) // dp_size
        if not balance:
            for rank in range(dp_size):
                ranks[rank].extend(members[rank * share : (rank + 1) * share])
            continue
        lengths = [int(seqlens[i]) for i in members]
        parts = get_seqlen_balanced_partitions(lengths, dp_size, equal_size=True)
        sizes = [sum(lengths[i] for i in part) for part in parts]
        # The heaviest part goes to the rank that has had least so far, so that whole-batch passes are even as well.
        heaviest_first = sorted(range(dp_size), key=lambda p: (-sizes[p], p))
        lightest_first = sorted(range(dp_size), key=lambda r: (totals[r], r))
        for part, rank in zip(heaviest_first, lightest_first, strict=True):
            ranks[rank].extend(start + i for i in parts[part])
            totals[rank] += sizes[part]
    return [index for rank in ranks for index in rank]


def seqlen_balance_metrics(
    seqlens: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Token totals per rank as the batch came (contiguous cut) and as it was arranged.

    Args:
        seqlens: tokens per sample, (B,).
        partitions: the samples of each rank.

    Returns:
        ``min``, ``max``, ``minmax_diff`` of the plain cut, ``balanced_min``, ``balanced_max`` of ``partitions`` and
        ``mean`` per rank, each below ``prefix``.
    """
    ranks = len(partitions)
    bounds = [len(seqlens) * rank // ranks for rank in range(ranks + 1)]
    plain = [sum(int(n) for n in seqlens[lo:hi]) for lo, hi in itertools.pairwise(bounds)]
    balanced = [sum(int(seqlens[i]) for i in part) for part in partitions]
    return {
        f"{prefix}/min": min(plain),
        f"{prefix}/max": max(plain),
        f"{prefix}/minmax_diff": max(plain) - min(plain),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(plain) / ranks,
    }


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
