"""Times core attention with sliding windows, chunks and sinks on one GPU, forward and backward.

    python -m lab.studies.windowed_attention --out DIR [--part ...] [--compile I OF]

It needs torch, and for the part `cudnn` the wheel nvidia-cudnn-frontend. The parts are `cudnn` (cuDNN's
graphs as Transformer Engine calls them), `sdpa` (PyTorch's call of cuDNN, the control), `fa2` (the
FlashAttention 2 that PyTorch ships) and `flex` (its compiled flex_attention). `--compile I OF` compiles every
OF-th flex kernel from I on, so that several processes fill the compiler's cache before the timing run.

Every time is the median of CUDA-event times after warm-up, with a buffer larger than L2 overwritten before
each; random inputs in BF16, in memory order [batch, sequence, heads, size]. Short sequences are compared with
attention in FP32. The script writes windowed_attention.json after every row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

REPEATS, WARM_UP = 20, 3
DEVICE, BF16 = "cuda", torch.bfloat16


class Case(NamedTuple):
    """One attention: sizes, reach and whether sinks join the softmax. `size` is the window or chunk."""

    heads: int
    kv_heads: int
    dim: int
    batch: int
    sequence: int
    reach: str = "full"
    size: int = 0
    sinks: bool = False


HEADS = {64: (64, 8), 128: (32, 4), 256: (16, 4)}
"""Query and key-value heads by head size; gpt-oss has 64 and 8 of 64 elements."""


def grid(part: str) -> Iterator[Case]:
    """Cases of a part; the compiled part has fewer, because each takes seconds to compile."""
    yield Case(8, 2, 64, 2, 1024)
    yield Case(8, 2, 128, 2, 1024, "window", 128)
    for dim, (heads, kv) in HEADS.items():
        for s in (4096, 8192, 16384, 32768):
            yield Case(heads, kv, dim, max(1, 16384 // s), s)
        lengths = (8192, 32768) if part == "flex" else (4096, 8192, 16384, 32768)
        for window in (128, 512, 1024, 4096):
            for s in lengths if not (part == "flex" and window in (512, 1024)) else (8192,):
                if s > window:
                    yield Case(heads, kv, dim, max(1, 16384 // s), s, "window", window)
        if part == "flex":
            yield Case(heads, kv, dim, 1, 32768, "chunk", 8192)
    for s in (4096, 8192, 32768):
        yield Case(32, 32, 128, max(1, 16384 // s), s)
        yield Case(32, 32, 128, max(1, 16384 // s), s, "window", 1024)
    for s in (8192, 32768):
        yield Case(64, 8, 64, max(1, 16384 // s), s, "full", 0, True)
        yield Case(64, 8, 64, max(1, 16384 // s), s, "window", 128, True)


def machine() -> dict[str, Any]:
    """Hardware and software of the run."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "gpu": smi.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "repeats": REPEATS,
    }


_FLUSH: list[torch.Tensor] = []


def micros(call: Callable[[], Any]) -> dict[str, float]:
    """Median, least and greatest microseconds of a call on an L2 that holds other data."""
    if not _FLUSH:
        _FLUSH.append(torch.empty(256 * 1024 * 1024, dtype=torch.int8, device=DEVICE))
    for _ in range(WARM_UP):
        call()
    pairs = []
    for _ in range(REPEATS):
        _FLUSH[0].zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted(1e3 * start.elapsed_time(end) for start, end in pairs)
    return {"us": statistics.median(times), "least_us": times[0], "most_us": times[-1]}


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the gradient of the output as [batch, sequence, heads, size]."""
    shape = [(case.batch, case.sequence, n, case.dim) for n in (case.heads, case.kv_heads, case.kv_heads)]
    return tuple(torch.randn(s, dtype=BF16, device=DEVICE) for s in [*shape, shape[0]])


def difference(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> dict[str, float]:
    """Greatest difference from attention in FP32, [batch, heads, sequence, size]; none for long sequences."""
    if case.sequence > 1024 or case.sinks:
        return {}
    at = torch.arange(case.sequence, device=DEVICE)
    apart = at[:, None] - at[None, :]
    seen = (apart >= 0) & (
        (apart < case.size) if case.reach == "window" else torch.ones_like(apart, dtype=torch.bool)
    )
    k, v = (t.float().repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
    scores = (q.float() @ k.transpose(2, 3) * case.dim**-0.5).masked_fill(~seen, float("-inf"))
    return {"difference": float((scores.softmax(-1) @ v - o.float()).abs().max())}


# --- cuDNN's graphs -------------------------------------------------------------------------------


def cudnn_case(case: Case) -> dict[str, Any]:
    """cuDNN's fused attention, with the band of the window as a bound of its mask."""
    cudnn: Any = importlib.import_module("cudnn")  # an optional wheel
    handle = cudnn.create_handle()
    q, k, v, do = (t.transpose(1, 2) for t in tensors(case))
    o, (dq, dk, dv) = torch.empty_like(q), (torch.empty_like(t) for t in (q, k, v))
    stats = torch.empty((case.batch, case.heads, case.sequence, 1), dtype=torch.float32, device=DEVICE)
    sink = torch.randn((1, case.heads, 1, 1), dtype=torch.float32, device=DEVICE)
    mask: dict[str, Any] = {"diagonal_band_right_bound": 0}
    if case.reach == "window":
        mask["diagonal_band_left_bound"] = case.size
    scale = case.dim**-0.5

    def graph() -> Any:
        return cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

    def out(node: Any, like: torch.Tensor) -> Any:
        return node.set_output(True).set_dim(like.size()).set_stride(like.stride())

    def built(g: Any) -> torch.Tensor:
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        g.check_support()
        g.build_plans()
        return torch.empty(max(1, g.get_workspace_size()), dtype=torch.uint8, device=DEVICE)

    f = graph()
    fq, fk, fv = (f.tensor_like(t) for t in (q, k, v))
    fs = f.tensor_like(sink) if case.sinks else None
    more = {"sink_token": fs} if case.sinks else {}
    fo, fstats = f.sdpa(name="f", q=fq, k=fk, v=fv, generate_stats=True, attn_scale=scale, **mask, **more)
    out(fo, o)
    out(fstats, stats).set_data_type(cudnn.data_type.FLOAT)
    space = built(f)
    args = {fq: q, fk: k, fv: v, fo: o, fstats: stats, **({fs: sink} if case.sinks else {})}
    row: dict[str, Any] = {"forward": micros(lambda: f.execute(args, space, handle=handle))}
    row |= difference(case, q, k, v, o)

    b = graph()
    bq, bk, bv, bo, bdo, bst = (b.tensor_like(t) for t in (q, k, v, o, do, stats))
    dsink = torch.zeros_like(sink)
    bs, bds = (b.tensor_like(t) for t in (sink, dsink)) if case.sinks else (None, None)
    more = {"sink_token": bs, "dSink_token": bds} if case.sinks else {}
    bdq, bdk, bdv = b.sdpa_backward(
        name="b", q=bq, k=bk, v=bv, o=bo, dO=bdo, stats=bst, attn_scale=scale, **mask, **more
    )
    for node, like in ((bdq, dq), (bdk, dk), (bdv, dv)):
        out(node, like)
    space_b = built(b)
    args_b = {bq: q, bk: k, bv: v, bo: o, bdo: do, bst: stats, bdq: dq, bdk: dk, bdv: dv}
    if case.sinks:
        args_b |= {bs: sink, bds: dsink}
    row["backward"] = micros(lambda: b.execute(args_b, space_b, handle=handle))
    return row


# --- FlashAttention 2 of PyTorch ------------------------------------------------------------------


def fa2_case(case: Case) -> dict[str, Any]:
    """PyTorch's own FlashAttention 2, called below scaled_dot_product_attention, which has no windows."""
    if case.sinks:
        raise ValueError("no sinks in this kernel")
    q, k, v, do = tensors(case)
    left = case.size - 1 if case.reach == "window" else None
    bounds = {"window_size_left": left, "window_size_right": 0 if left is not None else None}
    s = case.sequence

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, s, s, 0.0, True, False, scale=case.dim**-0.5, **bounds
        )

    o, lse, seed, unused, _ = forward()

    def backward() -> Any:
        return torch.ops.aten._flash_attention_backward(
            do, q, k, v, o, lse, None, None, s, s, 0.0, True, seed, unused, scale=case.dim**-0.5, **bounds
        )

    return {
        **difference(case, *(t.transpose(1, 2) for t in (q, k, v, o))),
        "forward": micros(forward),
        "backward": micros(backward),
    }


def sdpa_case(case: Case) -> dict[str, Any]:
    """The control: scaled_dot_product_attention with cuDNN, full causal."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.reach != "full" or case.sinks:
        raise ValueError("full causal only")
    q, k, v, do = (t.transpose(1, 2) for t in tensors(case))
    for t in (q, k, v):
        t.requires_grad_()

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    o = forward()
    grads = (q, k, v)
    return {
        "forward": micros(forward),
        "backward": micros(lambda: torch.autograd.grad(o, grads, do, retain_graph=True)),
    }


# --- flex_attention -------------------------------------------------------------------------------


def _mask(case: Case) -> Callable[..., Any]:
    size = case.size
    if case.reach == "window":
        return lambda b, h, i, j: (i >= j) & (i - j < size)
    if case.reach == "chunk":
        return lambda b, h, i, j: (i >= j) & (i // size == j // size)
    return lambda b, h, i, j: i >= j


def flex_case(case: Case, compile_only: bool = False) -> dict[str, Any]:
    """Compiled flex_attention; sinks rescale its output by the log-sum-exp, as gpt-oss recipes do."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    q, k, v, do = (t.transpose(1, 2) for t in tensors(case))
    sink = torch.randn(case.heads, dtype=torch.float32, device=DEVICE)
    for t in (q, k, v, sink):
        t.requires_grad_()
    mask = create_block_mask(_mask(case), None, None, case.sequence, case.sequence, device=DEVICE)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        if not case.sinks:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return (out * torch.sigmoid(lse - sink[None, :, None]).unsqueeze(-1)).to(out.dtype)

    started = time.perf_counter()
    compiled = torch.compile(call, dynamic=False)
    o = compiled(q, k, v, sink)
    grads = (q, k, v, sink) if case.sinks else (q, k, v)
    torch.autograd.grad(o, grads, do, retain_graph=True)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"compile_s": time.perf_counter() - started}
    if compile_only:
        return row
    with torch.no_grad():
        row |= difference(case, q, k, v, o)
    row["forward"] = micros(lambda: compiled(q, k, v, sink))
    row["backward"] = micros(lambda: torch.autograd.grad(o, grads, do, retain_graph=True))
    return row


PARTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "cudnn": cudnn_case,
    "sdpa": sdpa_case,
    "fa2": fa2_case,
    "flex": flex_case,
}


def main() -> None:
    """Run the parts; a case that fails is written down with its reason."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compile", nargs=2, type=int)
    options = parser.parse_args()
    if options.compile:
        first, of = options.compile
        for case in list(grid("flex"))[first::of]:
            try:
                print(case, flex_case(case, compile_only=True), flush=True)
            except Exception as error:
                print(case, repr(error)[:300], flush=True)
        return
    data: dict[str, Any] = {"machine": machine(), "rows": []}
    for part in options.part:
        failures = 0
        for case in grid(part):
            if part == "sdpa" and (case.reach != "full" or case.sinks):
                continue
            row: dict[str, Any] = {"part": part, **case._asdict()}
            try:
                row |= PARTS[part](case)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                failures += 1
                if failures == 1:
                    print(part, case, row["error"], flush=True)
            data["rows"].append(row)
            (options.out / "windowed_attention.json").write_text(json.dumps(data, indent=1) + "\n")
        print(part, failures, "failed,", machine()["gpu"], flush=True)
    data["after"] = machine()
    (options.out / "windowed_attention.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
