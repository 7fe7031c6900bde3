"""What NCCL's all-to-all and the permutations around a dispatch cost, by width, choices and tokens.

    torchrun --standalone --nproc-per-node 2 -m lab.benchmarks.widths --out widths.jsonl --seconds 150

Parts: `nccl` is `all_to_all_single` with the split sizes of random top-k (`skew` sends three quarters of all
rows to rank 0), every received block checked; `permute` is torchtitan's eager code as `moesim calibrate`
measures it; `fused` are Transformer Engine's Triton kernels (two files of it beside this one, `--te FOLDER`),
`rows` are PyTorch's copies by index of Megatron core without fusion, `pads` torchtitan's code for other numbers
of a rank's experts, each of which adds eight rows of padding. Each row is written at once. Times are
medians behind a waiting kernel with a cold L2, of the slowest rank for `nccl`. The ranks share the points of
the other parts. `our_row_costs.py` measures our kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare()
import torch
import torch.distributed as dist

from lab.benchmarks.row_costs import FLUSHED_BYTES, machine
from moesim.kernels.calibrate.operators import permute

WIDTHS = (1024, 2048, 2880, 4096, 5120, 7168)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
EXPERTS, SEED, MOST_BYTES = 128, 20261126, 4 << 30
EAGER = ("eager_expand", "eager_reduce", "eager_expand_gradient", "eager_reduce_gradient")
SPIN_HZ = 2e9
Point = dict[str, Any]


class Bench:
    """A rank: its device, the flushed buffer and the file of rows."""

    def __init__(self, out: Path, seconds: float) -> None:
        """Start the clock."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(self.rank)
        self.flushed = torch.empty(FLUSHED_BYTES, device="cuda", dtype=torch.uint8)
        self.began, self.seconds = time.monotonic(), seconds
        self.file = out.with_suffix(f".{self.rank}.jsonl").open("w")
        self.write({"torch": torch.__version__, "nccl": torch.cuda.nccl.version(), **machine()})

    def write(self, row: Point) -> None:
        """One line, at once."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def late(self) -> bool:
        """Whether the time is up, on any rank."""
        flag = torch.tensor([float(time.monotonic() - self.began > self.seconds)], device="cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def times(self, call: Callable[[], Any], repeats: int, together: bool = False) -> list[float]:
        """Seconds of every repeat on this rank, launched while the GPU waits."""
        word = torch.zeros(1, device="cuda")
        began = time.perf_counter()
        for _ in range(2):
            call()
        host_s = (time.perf_counter() - began) / 2
        torch.cuda.synchronize()
        marks = []
        torch.cuda._sleep(int(min(0.2, max(0.004, 2.5 * repeats * (host_s + 2e-4))) * SPIN_HZ))
        for _ in range(repeats):
            self.flushed.zero_()
            if together:
                dist.all_reduce(word)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            marks.append(pair)
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in marks]

    def slowest(self, times: list[float]) -> list[float]:
        """The largest of both ranks by repeat."""
        found = torch.tensor(times, device="cuda", dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [float(value) for value in found.tolist()]


def stated(times: list[float]) -> Point:
    """Median and spread in microseconds."""
    cuts = statistics.quantiles(times, n=4)
    return {name: round(value * 1e6, 2) for name, value in
            (("us", cuts[1]), ("p25_us", cuts[0]), ("p75_us", cuts[2]), ("least_us", min(times)))}  # fmt: skip


def nccl_points() -> Iterator[Point]:
    """The designed subset: one figure of the home shape moves at a time, then corners, FP8 and skewed loads."""
    def point(hidden: int, k: int, tokens: int, wire: str = "bf16", skew: float = 0.5) -> Point:
        return {"hidden": hidden, "top_k": k, "tokens": tokens, "wire": wire, "skew": skew}

    yield from (point(64, 1, t) for t in (64, 512))
    yield from (point(h, k, 4096) for h in WIDTHS for k in (1, 2, 4, 6, 8))
    yield from (point(h, k, t) for h in (2048, 7168) for k in (1, 8) for t in TOKENS if t != 4096)
    yield from (point(h, 4, t) for h in (1024, 2880, 4096, 5120) for t in (512, 2048, 16384))
    yield from (point(h, k, 4096, "fp8") for h in WIDTHS for k in (1, 8))
    yield from (point(h, 8, t, "bf16", 0.75) for h in (2048, 7168) for t in (1024, 4096, 16384))


def exchange(bench: Bench, p: Point) -> Point | None:
    """One all-to-all; None where its buffers would be too large."""
    rows, kind = p["tokens"] * p["top_k"], torch.bfloat16 if p["wire"] == "bf16" else torch.uint8
    size = rows * p["hidden"] * (2 if p["wire"] == "bf16" else 1)
    if size > MOST_BYTES:
        return None
    rng = torch.Generator().manual_seed(SEED + bench.rank + p["tokens"])
    share = p["skew"]
    if share == 0.5:
        chosen = torch.rand(p["tokens"], EXPERTS, generator=rng).topk(p["top_k"])[1]
        share = float((chosen < EXPERTS // 2).float().mean())
    sent = [round(rows * share), rows - round(rows * share)]
    counts = torch.tensor(sent, device="cuda")
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    received = [int(n) for n in arriving.tolist()]
    x = torch.randint(0, 100, (rows, p["hidden"]), device="cuda", dtype=torch.uint8).to(kind)
    out = torch.empty(sum(received), p["hidden"], device="cuda", dtype=kind)
    for peer, block in enumerate(x.split(sent)):  # what the receiver looks for
        block[:, 0] = bench.rank * 10 + peer + 1
    dist.all_to_all_single(out, x, received, sent)
    for source, block in enumerate(out.split(received)):
        assert bool((block[:, 0] == source * 10 + bench.rank + 1).all()), "all_to_all_single moved other rows"
    repeats = 9 if size > 1 << 28 else 15
    found = bench.slowest(bench.times(lambda: dist.all_to_all_single(out, x, received, sent), repeats, True))
    crossing = [sent[1 - bench.rank], received[1 - bench.rank]]
    most = torch.tensor([float(max(crossing))], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    row = size / max(rows, 1)
    return {**p, "sent_bytes": size, "crossing_bytes": most.item() * row, **stated(found)}


def counted(bench: Bench) -> Point:
    """The exchange of the counts before it, and what the host waits until it has read them."""
    counts = torch.zeros(EXPERTS, device="cuda", dtype=torch.int64)
    out = torch.empty_like(counts)
    alone = stated(bench.slowest(bench.times(lambda: dist.all_to_all_single(out, counts), 15, True)))
    waits = []
    for _ in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_to_all_single(out, counts)
        out.view(2, -1).sum(1).cpu()
        waits.append(time.perf_counter() - began)
    return {"counts": EXPERTS, **alone, "read_us": round(statistics.median(waits) * 1e6, 1)}


def nccl(bench: Bench) -> None:
    """All points of the all-to-all; both ranks take part in each."""
    bench.write({"part": "counts", **counted(bench)})
    for p in nccl_points():
        if bench.late():
            return
        row = exchange(bench, p)
        if row is not None and bench.rank == 0:
            bench.write({"part": "nccl", **row})


def permute_points(rank: int, ranks: int, part: str) -> Iterator[Point]:
    """A rank's share of the points of the permutations, the largest spread of shapes first."""
    shapes = [(h, k, 4096) for k in (8, 1, 4, 2) for h in WIDTHS]
    shapes += [(h, k, t) for t in (512, 16384, 1024, 8192) for h in (2048, 7168, 4096) for k in (8, 2)]
    shapes += [(h, 6, t) for t in (4096, 16384) for h in (2048, 5120)]
    if part == "pads":
        shapes = [(h, k, 4096) for h in (2048, 7168) for k in (2, 8)]
    for hidden, k, tokens in shapes[rank::ranks]:
        for experts in (8, 16, 32, 64) if part == "pads" else (EXPERTS,):
            shape = {"hidden": hidden, "top_k": k, "tokens": tokens, "experts": experts}
            yield shape | {"padding": 8 * min(experts, 64)}


def eager(bench: Bench, p: Point) -> Iterator[tuple[str, Callable[[], Any]]]:
    """torchtitan's permutations."""
    for use in EAGER:
        name = f"permute/{use}"
        yield name, permute({**p, "use": name}, use.endswith("gradient"))


def by_index(bench: Bench, p: Point) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Megatron core's `permute`, `unpermute` and `sort_chunks_by_idxs` without fusion, behind the map."""
    rows, hidden = p["tokens"] * p["top_k"], p["hidden"]
    x = torch.randn(p["tokens"], hidden, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(rows, device="cuda")[torch.randperm(rows, device="cuda")] // p["top_k"]
    index = index.sort()[0] if p["top_k"] == 1 else index
    wide = index.unsqueeze(1).expand(-1, hidden)
    chunks = list(y.split([rows // 128] * 128 + [rows - rows // 128 * 128]))
    order = [i * 64 + j for j in range(64) for i in range(2)] + [128]
    yield "index_select", lambda: x.index_select(0, index)
    yield "scatter_add", lambda: torch.zeros_like(x).scatter_add_(0, wide, y)
    yield "sort_chunks", lambda: torch.cat([chunks[i] for i in order])


def fused(bench: Bench, p: Point) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Transformer Engine's Triton kernels of `moe_permute_fusion`: map, rows out, sums back, sort, padding."""
    te: Any = importlib.import_module("te_permutation")
    tokens, experts, hidden, rows = p["tokens"], EXPERTS // 2, p["hidden"], p["tokens"] * p["top_k"]
    chosen = torch.rand(tokens, experts, device="cuda").topk(p["top_k"])[1]
    routed = torch.zeros(tokens, experts, device="cuda", dtype=torch.bool).scatter_(1, chosen, True)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    where = te.make_row_id_map(routed, tokens, experts)
    out = te.permute_with_mask_map(x, where, None, None, None, tokens, experts, rows, hidden, 0)[0]
    order = chosen.view(-1).argsort(stable=True) // p["top_k"]
    assert torch.equal(out, x[order]), "permute_with_mask_map moved other rows"
    counts = torch.bincount(chosen.view(-1), minlength=experts)
    padded = (counts + 15) // 16 * 16
    offsets = (padded - counts).cumsum(0).roll(1)
    offsets[0] = 0
    room = int(padded.sum())
    sizes = torch.full((2 * experts,), rows // (2 * experts), device="cuda", dtype=torch.int32)
    sizes[-1] += rows - int(sizes.sum())
    turned = torch.arange(2 * experts, device="cuda", dtype=torch.int32).view(2, -1).t().reshape(-1).contiguous()
    sort = te.make_chunk_sort_map(sizes, turned, rows, 2 * experts)
    yield "map", lambda: te.make_row_id_map(routed, tokens, experts)
    yield "permute/expand", lambda: te.permute_with_mask_map(x, where, None, None, None, tokens, experts, rows, hidden, 0)
    yield "permute/reduce", lambda: te.unpermute_with_mask_map(y, where, None, None, None, tokens, experts, hidden)
    yield "sort", lambda: te.sort_chunks_by_map(y, sort, None, rows, hidden, True)
    if hidden in (2048, 7168):
        yield "expand and pad", lambda: te.permute_with_mask_map(
            x, where, None, None, offsets.int(), tokens, experts, room, hidden, 0
        )


def load_te(folder: Path) -> None:
    """Import Transformer Engine's two files without the package."""
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.triton"):
        sys.modules[name] = types.ModuleType(name)
    for name, file in (("transformer_engine.common.triton.permutation", "kernels.py"), ("te_permutation", "calls.py")):
        spec = importlib.util.spec_from_file_location(name, folder / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


PARTS = {"permute": eager, "pads": eager, "rows": by_index, "fused": fused}


def alone(bench: Bench, part: str, until_s: float) -> None:
    """A part in which each rank has its own points, until a time of the run; a point that fails loses itself."""
    for p in permute_points(bench.rank, bench.world, part):
        if part == "fused" and p["hidden"] not in ((2048, 7168, 1024), (2880, 4096, 5120))[bench.rank]:
            p["hidden"] = (p["hidden"], *((2048, 7168, 1024), (2880, 4096, 5120))[bench.rank])[1 + p["top_k"] % 3]
        try:
            for use, call in PARTS[part](bench, p):
                if time.monotonic() - bench.began > until_s:
                    return
                bench.write({"part": part, "use": use, **p, **stated(bench.times(call, 11))})
        except Exception as error:
            bench.write({"part": part, **p, "failed": repr(error)[-400:]})
        torch.cuda.empty_cache()


def main() -> None:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--parts", default="nccl,permute,fused,rows")
    parser.add_argument("--te", type=Path)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    bench, parts = Bench(options.out, options.seconds), options.parts.split(",")
    if options.te:
        load_te(options.te)
    for i, part in enumerate(parts):
        if part == "nccl":
            nccl(bench)
        else:
            left = options.seconds - (time.monotonic() - bench.began)
            alone(bench, part, time.monotonic() - bench.began + left / (len(parts) - i))
    bench.write({"end": machine()["nvidia_smi"]})
    dist.barrier()


if __name__ == "__main__":
    main()
