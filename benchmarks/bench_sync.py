"""What changing the layout of weights costs: bytes, seconds and memory, against the plan and HybridFlow's formulas.

Four gloo ranks really move a Llama-shaped model from tensor parallel 4 to 2 and from FSDP over 4 to tensor parallel 2,
each way alternating with the plain all-gather of the whole model, so that a busy machine slows both alike. A simulation
plans the same for 1,024 ranks and a 70B model. Transports between processes are timed on the same weights.

    python benchmarks/bench_sync.py [--megabytes 64] [--bucket-megabytes 4] [--rounds 5] [--plot sync.png]

Bytes are per rank (the largest of the ranks). ``extra_rss`` is the growth of the process's resident memory at its peak
beyond the shards that it had. Prints one JSON line, last.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plots import saved_figure
from torch import Tensor

from verl.utils.distributed import destroy_process_group, free_port, init_process_group
from verl.workers.engine.megatron.slices import WeightPlace, sliced_weights
from verl.workers.engine.megatron.weights import weight_table
from verl.workers.sharding_manager.reshard.grid import RankGrid, generation_groups, transition_cost
from verl.workers.sharding_manager.reshard.held_weights import HeldWeights
from verl.workers.sharding_manager.reshard.layout import (
    Layout,
    Split,
    TensorInfo,
    aligned_shard_dim,
    dense_splits,
    parallel_layout,
    pipeline_stages,
)
from verl.workers.sharding_manager.reshard.plan import Plan
from verl.workers.sharding_manager.reshard.planner import plan
from verl.workers.sharding_manager.reshard.resharder import Resharder
from verl.workers.sharding_manager.transports.base import Transport
from verl.workers.sharding_manager.transports.broadcast import BroadcastTransport, transfer_group
from verl.workers.sharding_manager.transports.colocated import SharedMemoryTransport
from verl.workers.sharding_manager.transports.disk import DiskTransport

RANKS = 4


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, dtype: torch.dtype
) -> dict[str, TensorInfo]:
    """Names and shapes of a Llama-like model."""
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}


def size_of(tensors: dict[str, TensorInfo]) -> int:
    return sum(info.nbytes for info in tensors.values())


def model_of(megabytes: int) -> dict[str, TensorInfo]:
    """About that size in float32: 64 · hidden² parameters."""
    hidden = max(32, round(math.sqrt(megabytes * 2**20 / 256) / 32) * 32)
    return llama(hidden, 3 * hidden, 4, 8, 4, 8 * hidden, torch.float32)


def cases(tensors: dict[str, TensorInfo]) -> dict[str, tuple[Layout, Layout]]:
    splits: tuple[Split, ...] = dense_splits(kv_heads=4)
    tp4, fsdp4 = RankGrid.regular(tp=4), RankGrid.regular(fsdp=4)

    def tensor_parallel(grid: RankGrid) -> Layout:
        return parallel_layout(tensors, grid, splits=splits)

    rows = parallel_layout(tensors, fsdp4)
    aligned = parallel_layout(tensors, fsdp4, shard_dim=aligned_shard_dim(splits))
    return {
        "tp4_to_tp2": (tensor_parallel(tp4), tensor_parallel(generation_groups(tp4, tp=2))),
        "tp4_to_tp2_consecutive_groups": (tensor_parallel(tp4), tensor_parallel(RankGrid.regular(tp=2, dp=2))),
        "fsdp4_to_tp2": (rows, tensor_parallel(generation_groups(fsdp4, tp=2))),
        "fsdp4_aligned_to_tp2": (aligned, tensor_parallel(generation_groups(fsdp4, tp=2))),
    }


# ---- measuring --------------------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def watched(action: Callable[[], object]) -> tuple[float, int]:
    """(seconds, growth of resident memory at its peak) of an action whose result is dropped."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    dist.barrier()
    started = time.perf_counter()
    result = action()
    dist.barrier()
    seconds = time.perf_counter() - started
    peak = resident("VmHWM")
    del result
    return seconds, peak - before


def gather_whole(source: Layout, shards: dict[str, Tensor], target: Layout, rank: int) -> dict[str, Tensor]:
    """The plain way: every rank gathers the whole model, then keeps its part."""
    whole = {}
    for name, info in source.tensors.items():
        placement = source.placements[name]
        shapes = [placement.local_shapes[peer] for peer in range(RANKS)]
        if shapes[0] == info.shape:  # on every rank already
            whole[name] = shards[name]
            continue
        flat = [torch.empty(math.prod(shape), dtype=info.dtype) for shape in shapes]
        dist.all_gather(flat, shards[name].reshape(-1))
        whole[name] = torch.empty(info.shape, dtype=info.dtype)
        for peer, (part, shape) in enumerate(zip(flat, shapes, strict=True)):
            for box, local in placement.boxes_of(peer):
                whole[name][box] = part.view(shape)[local]
    return target.shard(whole, rank)


def largest(value: float) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def run_case(name: str, source: Layout, target: Layout, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    whole = {key: torch.randn(info.shape, generator=generator) for key, info in source.tensors.items()}
    shards, want = source.shard(whole, rank), target.shard(whole, rank)
    model = size_of(dict(source.tensors))
    del whole
    started = time.perf_counter()
    made = plan(source, target, bucket_bytes=options.bucket_megabytes << 20)
    planning = time.perf_counter() - started

    change = Resharder(made)
    result = change.run(shards)
    assert all(torch.equal(result[key], value) for key, value in want.items())
    gathered = gather_whole(source, shards, target, rank)
    assert all(torch.equal(gathered[key], value) for key, value in want.items())
    del result, gathered, want

    seconds, plain_seconds, memory, plain_memory = [], [], [], []
    for _ in range(options.rounds):
        took, grew = watched(lambda: change.run(shards))
        seconds.append(took)
        memory.append(grew)
        took, grew = watched(lambda: gather_whole(source, shards, target, rank))
        plain_seconds.append(took)
        plain_memory.append(grew)
    report = change.report
    shard_bytes, target_bytes = source.local_bytes()[rank], target.local_bytes()[rank]
    formula = transition_cost("hybridflow", model, tp=4, generation_tp=2)
    gather = transition_cost("vanilla", model, tp=4)
    received = largest(report.received)
    found = {
        "model_bytes": model,
        "received": int(received),
        "planned_minimum": int(made.received.max()),
        "formula": int(formula.moved),
        # the formula, exact also for tensors that generation does not cut, such as norms
        "shard_difference": int(largest(target_bytes - shard_bytes)),
        "all_gather_formula": int(gather.moved),
        "received_over_minimum": round(received / int(made.received.max()), 4),
        "received_over_formula": round(received / formula.moved, 4),
        "received_over_shard_difference": round(received / largest(target_bytes - shard_bytes), 4),
        "received_over_all_gather": round(received / gather.moved, 4),
        "redundant": int(made.redundant.max()),
        "peak": int(largest(report.peak)),
        "peak_bound": int(largest(shard_bytes + (options.bucket_megabytes << 20) + target_bytes)),
        "extra_rss": int(largest(statistics.median(memory))),
        "all_gather_extra_rss": int(largest(statistics.median(plain_memory))),
        "seconds": round(statistics.median(seconds), 4),
        "all_gather_seconds": round(statistics.median(plain_seconds), 4),
        "speedup_over_all_gather": round(
            statistics.median(slow / fast for slow, fast in zip(plain_seconds, seconds, strict=True)), 2
        ),
        "plan_seconds": round(planning, 4),
        "buckets": len(made.buckets),
    }
    if name == "tp4_to_tp2":
        found |= adopted(made, source, shards, rank)
    return found


def adopted(made: Plan, source: Layout, shards: dict[str, Tensor], rank: int) -> dict[str, Any]:
    """The same with the training shard inside the generation shard: the paper's peak, M/(t_g·p_g)."""
    change = Resharder(made, adopt=True)
    result = change.run(shards)
    peak = largest(change.report.peak)
    change.reclaim(shards, result)
    formula = transition_cost("hybridflow", size_of(dict(source.tensors)), tp=4, generation_tp=2)
    return {"adopted_peak": int(peak), "peak_formula": int(formula.peak)}


def run_transports(rank: int, tensors: dict[str, TensorInfo], folder: str, bucket: int) -> dict[str, Any]:
    """GB/s from rank 0 to the three others at once."""
    result: dict[str, Any] = {}
    weights = {name: torch.randn(info.shape) for name, info in tensors.items()} if rank == 0 else {}
    size = size_of(tensors)
    for kind in ("shared_memory", "broadcast", "disk"):
        store = dist.FileStore(f"{folder}/{kind}", -1)
        transport: Transport
        if kind == "disk":
            transport = DiskTransport(Path(folder) / "weights", bucket_bytes=bucket)
        elif kind == "broadcast":
            transport = BroadcastTransport(transfer_group(store, rank, RANKS), bucket_bytes=bucket)
        else:
            receiver = None if rank == 0 else rank - 1
            transport = SharedMemoryTransport(store, receivers=RANKS - 1, receiver=receiver, bucket_bytes=bucket)
        dist.barrier()
        for version in range(2):  # the first one touches the memory for the first time
            started = time.perf_counter()
            if rank == 0:
                transport.send(version, weights.items())
            else:
                for items in transport.receive(newer_than=version - 1).buckets:
                    for _, tensor in items:
                        tensor.clone()
            dist.barrier()
            result[f"{kind}_gb_per_s"] = round(size / 1e9 / (time.perf_counter() - started), 3)
        transport.close()
    return result


def rank_main(rank: int, port: int, options: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    init_process_group("cpu", timeout_s=300)
    tensors = model_of(options.megabytes)
    result: dict[str, Any] = {"cases": {}}
    for name, (source, target) in cases(tensors).items():
        result["cases"][name] = run_case(name, source, target, rank, options)
    result["transports"] = run_transports(rank, tensors, folder, options.bucket_megabytes << 20)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    destroy_process_group()


# ---- 1,024 ranks ------------------------------------------------------------------------------------------------


def megatron_layout(tensors: dict[str, TensorInfo], grid: RankGrid) -> Layout:
    """The layout of Megatron-core's ranks, fused projections included, from the engine's own table of weights."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    table = weight_table(config, head="lm", multiple_of=8, grouped=False)
    shapes = {name: info.shape for name, info in tensors.items()}
    whole = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    stages = pipeline_stages(tensors, grid.size("pp"))
    held: dict[tuple[int, int], HeldWeights] = {}
    where = [(int(tp), int(pp)) for tp, pp in zip(grid.axis("tp"), grid.axis("pp"), strict=True)]
    for tp, pp in dict.fromkeys(where):
        place = WeightPlace(tp=(tp, grid.size("tp")))
        local = {
            weight.megatron: weight.form.shard([whole[name] for name in weight.hf], *place.tp)
            for weight in table
            if pp in stages[weight.hf[0]]
        }
        dtypes = {weight.megatron: torch.bfloat16 for weight in table}
        held[tp, pp] = HeldWeights(sliced_weights(table, shapes, dtypes, local, place, tied=False))
    holdings = {key: weights.holdings() for key, weights in held.items()}
    return held[where[0]].layout([holdings[key] for key in where])


def simulate() -> dict[str, Any]:
    """Plans for 1,024 ranks of a 70B model in bfloat16; GB per rank."""
    tensors = llama(8192, 28672, 80, 64, 8, 128256, torch.bfloat16)
    splits = dense_splits(kv_heads=8)
    model = size_of(tensors)
    grid3d = RankGrid.regular(tp=8, pp=8, dp=16)
    hybrid = RankGrid.regular(fsdp=64, dp=16)
    full = RankGrid.regular(fsdp=1024)
    stages = pipeline_stages(tensors, 8)
    aligned = aligned_shard_dim(splits)
    found: dict[str, Any] = {"model_gb": round(model / 1e9, 2)}
    for name, grid, generation_tp, generation, options in (
        ("tp8_pp8_dp16_to_tp4", grid3d, 4, None, {"splits": splits, "stages": stages}),
        ("megatron_tp8_pp8_dp16_to_tp4", grid3d, 4, None, None),
        (
            "tp8_pp8_dp16_to_tp4_consecutive_groups",
            grid3d,
            4,
            RankGrid.regular(tp=4, dp=256),
            {"splits": splits, "stages": stages},
        ),
        ("fsdp64_dp16_to_tp8", hybrid, 8, None, {}),
        ("fsdp64_dp16_aligned_to_tp8", hybrid, 8, None, {"shard_dim": aligned}),
        ("fsdp1024_to_tp8", full, 8, None, {}),
        ("fsdp1024_aligned_to_tp8", full, 8, None, {"shard_dim": aligned}),
    ):
        started = time.perf_counter()
        source = megatron_layout(tensors, grid) if options is None else parallel_layout(tensors, grid, **options)  # type: ignore[arg-type]
        goal = generation if generation is not None else generation_groups(grid, tp=generation_tp)
        target = parallel_layout(tensors, goal, splits=splits)
        made = plan(source, target, bucket_bytes=1 << 30)
        seconds = time.perf_counter() - started
        shards = grid.size("tp") * grid.size("pp") * grid.size("fsdp")
        formula = transition_cost("hybridflow", model, tp=shards, generation_tp=generation_tp)
        gather = transition_cost("vanilla", model, tp=shards)
        found[name] = {
            "seconds": round(seconds, 2),
            "received_gb": round(made.received.mean() / 1e9, 3),
            "received_max_gb": round(made.received.max() / 1e9, 3),
            "sent_max_gb": round(made.sent.max() / 1e9, 3),
            "formula_gb": round(formula.moved / 1e9, 3),
            "all_gather_gb": round(gather.moved / 1e9, 3),
            "received_over_formula": round(made.received.mean() / formula.moved, 4),
            "redundant_gb": round(made.redundant.max() / 1e9, 4),
            "generation_shard_gb": round(max(target.local_bytes().values()) / 1e9, 3),
            "peak_gb": round(made.peak_bytes().max() / 1e9, 3),
            "all_gather_peak_gb": round(gather.peak / 1e9, 3),
            "buckets": len(made.buckets),
        }
    return found


def draw(cases: dict[str, Any], simulated: dict[str, Any], path: Path) -> None:
    """Bytes that a rank receives, and its peak, against HybridFlow's formula and a plain all-gather."""
    real = {name: case["received_over_formula"] for name, case in cases.items()}
    gathers = {name: real[name] / case["received_over_all_gather"] for name, case in cases.items()}
    planned = {name: case for name, case in simulated.items() if isinstance(case, dict)}
    with saved_figure(path, 2, (6.5, 3.5)) as (moved, peaks):
        rows = range(len(real))
        moved.barh([row - 0.2 for row in rows], list(real.values()), 0.4, label="moved")
        moved.barh([row + 0.2 for row in rows], list(gathers.values()), 0.4, label="all-gather")
        moved.axvline(1.0, color="black", linewidth=0.8)
        moved.set_yticks(rows, list(real))
        moved.set_xlabel(f"bytes per rank, as multiple of HybridFlow's formula; {RANKS} ranks")
        rows = range(len(planned))
        peaks.barh([row - 0.2 for row in rows], [case["peak_gb"] for case in planned.values()], 0.4, label="peak")
        gathered = [case["all_gather_peak_gb"] for case in planned.values()]
        peaks.barh([row + 0.2 for row in rows], gathered, 0.4, label="all-gather")
        peaks.set_yticks(rows, list(planned), fontsize=7)
        peaks.set_xlabel("planned peak of a rank in GB; 1,024 ranks, 70B")
        for axis in (moved, peaks):
            axis.invert_yaxis()
            axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the model that is really moved")
    parser.add_argument("--bucket-megabytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="write a bar chart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (free_port(), options, folder), nprocs=RANKS)
        result = json.loads((Path(folder) / "result.json").read_text())
    for name, case in result["cases"].items():
        print(
            f"{name}: {case['received'] / 2**20:.2f} MiB per rank = {case['received_over_minimum']} × minimum, "
            f"{case['received_over_formula']} × HybridFlow's formula, {case['received_over_all_gather']} × all-gather; "
            f"{case['speedup_over_all_gather']} × as fast; peak {case['peak'] / 2**20:.1f} MiB of "
            f"{case['peak_bound'] / 2**20:.1f} allowed"
        )
    simulated = simulate()
    for name, case in simulated.items():
        if isinstance(case, dict):
            print(
                f"1,024 ranks, 70B, {name}: planned in {case['seconds']} s; {case['received_gb']} GB per rank, formula "
                f"{case['formula_gb']}, all-gather {case['all_gather_gb']}; peak {case['peak_gb']} GB, all-gather "
                f"{case['all_gather_peak_gb']}"
            )
    if options.plot:
        draw(result["cases"], simulated, options.plot)
    print(json.dumps({"benchmark": "sync", "ranks": RANKS, **result, "simulation_1024_ranks_70b": simulated}))


if __name__ == "__main__":
    main()
