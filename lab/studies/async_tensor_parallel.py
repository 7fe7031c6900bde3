"""GEMMs beside the collectives of tensor parallelism: PyTorch's fused operators against their parts.

Part of compiled_blocks.py. Every time is of the device: the host runs ahead behind a kernel that only waits.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lab.studies.host_blocks_study import Study

GEMMS: tuple[tuple[str, int, int, int, int], ...] = (
    ("qkv, hidden 2048", 4096, 2048, 2560, 1),
    ("qkv, hidden 4096", 8192, 4096, 3072, 1),
    ("gate and up, hidden 4096", 8192, 4096, 7168, 2),
    ("qkv, hidden 8192", 8192, 8192, 5120, 1),
    ("gate and up, hidden 8192", 8192, 8192, 14336, 2),
    ("gate and up, hidden 8192, few tokens", 2048, 8192, 14336, 2),
)
"""Name, tokens of both ranks, hidden width, local width of a column-parallel GEMM and how many GEMMs share
the gathered input. The row-parallel GEMM has the same widths the other way round."""
WINDOWS, CALLS, WAIT_CYCLES = 5, 8, 24_000_000


def parts(study: Study) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The measurements by name, the small ones first."""
    for name, *sizes in GEMMS:
        if study.dry:
            sizes = [64, 32, 32, sizes[-1]]
        yield f"gather and GEMM, {name}", partial(gather, study, *sizes)
        yield f"GEMM and scatter, {name}", partial(scatter, study, *sizes)


def gather(study: Study, tokens: int, hidden: int, width: int, gemms: int) -> dict[str, Any]:
    """An all-gather of the input before `gemms` column-parallel GEMMs."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    shard = _random(study, tokens // ranks, hidden)
    weights = [_random(study, width, hidden).t() for _ in range(gemms)]
    whole = torch.empty(tokens, hidden, dtype=shard.dtype, device=study.device)

    def collective() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, shard)
        return whole

    def separate() -> list[torch.Tensor]:
        collective()
        return [whole @ weight for weight in weights]

    def fused() -> list[torch.Tensor]:
        out: list[torch.Tensor] = _operator(study, "all_gather_matmul")(shard, weights, 0, group.group_name)[
            1
        ]
        return out

    calls = {
        "gemm": lambda: [whole @ weight for weight in weights],
        "piece": lambda: [shard @ weight for weight in weights],
        "collective": collective,
        "separate": separate,
        "fused": fused,
    }
    if study.device == "cuda":
        calls |= transfers(shard)
    wrong = max(_difference(a, b) for a, b in zip(fused(), separate(), strict=True))
    flop = 2.0 * tokens * hidden * width * gemms
    return {"tokens": tokens, "hidden": hidden, "width": width, "gemms": gemms} | measured(
        study, calls, flop, wrong
    )


def scatter(study: Study, tokens: int, hidden: int, width: int, gemms: int) -> dict[str, Any]:
    """A row-parallel GEMM before a reduce-scatter of its output; `gemms` is not used."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    rows, weight = _random(study, tokens, width), _random(study, hidden, width).t()
    product = rows @ weight
    out = torch.empty(tokens // ranks, hidden, dtype=rows.dtype, device=study.device)
    function = importlib.import_module("torch.distributed._functional_collectives")

    def collective() -> torch.Tensor:
        if study.device == "cuda":
            dist.reduce_scatter_tensor(out, product)
            return out
        waited: torch.Tensor = function.wait_tensor(function.reduce_scatter_tensor(product, "sum", 0, group))
        return waited

    def separate() -> torch.Tensor:
        torch.mm(rows, weight, out=product)
        return collective()

    def fused() -> torch.Tensor:
        y: torch.Tensor = _operator(study, "matmul_reduce_scatter")(rows, weight, "sum", 0, group.group_name)
        return y

    calls: dict[str, Callable[[], Any]] = {
        "gemm": lambda: rows @ weight,
        "piece": lambda: rows[: tokens // ranks] @ weight,
        "collective": collective,
        "separate": separate,
        "fused": fused,
        "sum": lambda: product.view(ranks, tokens // ranks, hidden).sum(0),
    }
    if study.device == "cuda":
        calls |= transfers(out)
    wrong = _difference(fused(), separate())
    flop = 2.0 * tokens * hidden * width
    return {"tokens": tokens, "hidden": hidden, "width": width} | measured(study, calls, flop, wrong)


def transfers(piece: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What the fused operators are made of: a copy from the other rank, one inside a rank, and a barrier."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    name = dist.group.WORLD.group_name
    workspace = symmetric.get_symm_mem_workspace(name, 2 * piece.numel() * piece.element_size())
    own = workspace.get_buffer(workspace.rank, piece.shape, piece.dtype)
    other = workspace.get_buffer((workspace.rank + 1) % workspace.world_size, piece.shape, piece.dtype)
    target = torch.empty_like(piece)
    return {
        "copy from the other rank": lambda: target.copy_(other),
        "copy into the buffer": lambda: own.copy_(piece),
        "barrier": lambda: workspace.barrier(channel=0),
    }


def measured(study: Study, calls: dict[str, Callable[[], Any]], flop: float, wrong: float) -> dict[str, Any]:
    """Microseconds of every call, what it leaves exposed beside the GEMM, and the error of the fused one."""
    out: dict[str, Any] = {"relative difference": wrong}
    for name, call in calls.items():
        try:
            out[name] = timed(study, call)
        except Exception as error:
            out[name] = {"failed": repr(error)[-400:]}
    gemm = out["gemm"].get("us", 0.0)
    out["gemm_tflop_per_s"] = flop / gemm / 1e6 if gemm else None
    for name in ("separate", "fused"):
        if "us" in out[name]:
            out[f"exposed {name}_us"] = out[name]["us"] - gemm
    return out


def timed(study: Study, call: Callable[[], Any]) -> dict[str, float]:
    """Device microseconds of a call, mean of both ranks' medians, and the host's time to start it."""
    windows, calls = (2, 2) if study.dry else (WINDOWS, CALLS)
    device, host = [], []
    for _ in range(2):
        call()
    study.synchronise()
    for _ in range(windows):
        dist.barrier()
        study.synchronise()
        if study.device == "cuda":
            torch.cuda._sleep(WAIT_CYCLES)
            call()  # both ranks start together behind it, where it waits for the other rank
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        host.append((time.perf_counter() - began) / calls)
        if study.device == "cuda":
            marks[1].record()
            study.synchronise()
            device.append(marks[0].elapsed_time(marks[1]) * 1e-3 / calls)
    own = statistics.median(device or host)
    both = torch.tensor([own, own * own], dtype=torch.float64, device=study.device)
    dist.all_reduce(both)
    mean = float(both[0]) / dist.get_world_size()
    return {
        "us": mean * 1e6,
        "own_us": own * 1e6,
        "least_us": min(device or host) * 1e6,
        "most_us": max(device or host) * 1e6,
        "host_us": statistics.median(host) * 1e6,
    }


def _operator(study: Study, name: str) -> Any:
    """A fused operator of PyTorch; on a CPU the function that stands for it without symmetric memory."""
    if study.device == "cuda":
        return getattr(torch.ops.symm_mem, f"fused_{name}")
    return getattr(importlib.import_module("torch.distributed._symmetric_memory"), f"_fused_{name}_fallback")


def _random(study: Study, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=study.device) * 0.1


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())
