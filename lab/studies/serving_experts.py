"""Times MXFP4 experts of gpt-oss-120b, its decode attention and its small products with cold data, in CUDA graphs.

    python3 serving_experts.py LIB OUT.json [SECONDS [JOBS]]

LIB holds parts of the wheel of vLLM 0.20.2 (built for torch 2.11): `_moe_C.abi3.so` (Marlin), `fa3.so`
(FlashAttention 3) and the folder `triton_kernels`. Microseconds a call, the median of 10 replays. Every call
of a graph has its own routing, and layers or pages of the cache take turns. Rows: `marlin`, `triton` with
ranks, tokens, part (`gate_up`, `down`, `all`) ; `topk` with tokens; `decode` with ranks, sequences, keys of a
sequence, window (0: all) and most splits; `bf16` with m, n, k.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EXPERTS, TOP, HIDDEN, WIDTH = 128, 4, 2880, 2880
TOKENS = (1, 4, 16, 64, 256, 1024, 2, 8, 32, 128, 512, 2048, 8192)
FP4 = 562949953487106
"""vLLM's number of the type float4_e2m1f (vllm/scalar_type.py)."""
START = time.time()
ROWS: list[tuple[Any, ...]] = []
Call = Callable[[int], Any]
"""A call by its number, which chooses routing and layer."""


def replayed_us(call: Call, calls: int) -> float:
    """Microseconds of a call in a graph of `calls` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for at in range(2):
            call(at)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(calls):
            call(at)
    times = []
    for _ in range(11):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times[1:])[5]


def record(*row: Any) -> None:
    """Keep a row and print it."""
    ROWS.append((*row[:-1], round(row[-1], 3)))
    print(*ROWS[-1], flush=True)


def up(size: int, to: int) -> int:
    """The next multiple."""
    return -(-size // to) * to


def calls_of(tokens: int) -> int:
    """Calls of a graph: enough that the experts of few tokens leave the cache before they come again."""
    return 32 if tokens <= 64 else 12 if tokens <= 1024 else 4


def logits(tokens: int, calls: int) -> list[torch.Tensor]:
    """Scores of a random router, one tensor a call."""
    return [torch.randn(tokens, EXPERTS, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]


# -- Marlin ------------------------------------------------------------------------------------------


def marlin_layer(n: int, k: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random packed weights, scales and bias of [experts, k, n]."""
    packed = torch.randint(-(2**31), 2**31 - 1, (experts, k // 16, n * 2), dtype=torch.int32, device="cuda")
    scale = torch.randint(116, 120, (experts, k // 32, n), dtype=torch.uint8, device="cuda")
    return packed, scale.view(torch.float8_e8m0fnu), torch.randn(experts, n, device="cuda").bfloat16()


def block_of(tokens: int, top: int = TOP, experts: int = EXPERTS) -> int:
    """Rows of a block, as vLLM's fused_marlin_moe chooses them."""
    return next((b for b in (8, 16, 32, 48, 64) if tokens * top / experts / b < 0.9), 64)


def aligned(ids: torch.Tensor, block: int, experts: int = EXPERTS) -> tuple[torch.Tensor, ...]:
    """Rows sorted by expert and padded to blocks."""
    most = ids.numel() + experts * (block - 1)
    if ids.numel() < experts:
        most = min(ids.numel() * block, most)
    made = [torch.empty(size, dtype=torch.int32, device="cuda") for size in (most, -(-most // block), 1)]
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, *made, None)
    return tuple(made)


def marlin(x: torch.Tensor, layer: tuple[torch.Tensor, ...], n: int, order: tuple[torch.Tensor, ...],
           weights: torch.Tensor, space: torch.Tensor, block: int, top: int) -> torch.Tensor:  # fmt: skip
    """A grouped product; `top` is 1 for the second, which weighs its rows."""
    packed, scale, bias = layer
    out = torch.empty(x.shape[0] * top, n, dtype=x.dtype, device="cuda")
    return torch.ops._moe_C.moe_wna16_marlin_gemm(
        x, out, packed, bias, scale, None, None, None, None, None, space, *order, weights, block, top,
        top == 1, FP4, x.shape[0], n, x.shape[1], True, False, True, False, -1, -1, -1,
    )  # fmt: skip


def check_marlin() -> None:
    """Compare a small grouped product with its weights widened to float64."""
    experts, k, n, tokens, top = 8, 512, 256, 24, 2
    code = torch.randint(0, 16, (experts, k, n), device="cuda")
    scale = torch.randint(116, 120, (experts, k // 32, n), dtype=torch.uint8, device="cuda")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")
    wide = (
        values[code % 8] * (1 - 2.0 * (code // 8)) * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    )
    order = []
    for i in range(32):
        one = [16 * (2 * (i % 4) + r) + i // 4 + 8 * b for b in (0, 1) for r in (0, 1, 8, 9)]
        order += [p + 256 * j for j in range(4) for p in one]
    perm = torch.tensor(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel().cuda()
    tiles = code.reshape(experts, k // 16, 16, n // 16, 16).permute(0, 1, 3, 2, 4).reshape(experts, -1, 1024)
    tiles = tiles[:, :, perm].reshape(experts, k // 16, n * 2, 8)
    packed = (tiles << (4 * torch.arange(8, device="cuda"))).sum(-1).to(torch.int32)
    mixed = [i + 8 * j for i in range(8) for j in range(8)]
    scales = scale.reshape(experts, -1, 64)[:, :, mixed].reshape(experts, -1, 4)[:, :, [0, 2, 1, 3]]
    scales = scales.reshape(experts, k // 32, n).contiguous().view(torch.float8_e8m0fnu)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(experts, device="cuda")[:top] for _ in range(tokens)]).int()
    space = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")
    zero = torch.zeros(experts, n, device="cuda").bfloat16()
    ones = torch.ones(tokens, top, device="cuda")
    got = marlin(x, (packed, scales, zero), n, aligned(ids, 8, experts), ones, space, 8, top)
    want = torch.einsum("tk,tekn->ten", x.double(), wide[ids.long()]).reshape(-1, n)
    error = float((got.double() - want).norm() / want.norm())
    print("marlin error", error)
    assert error < 1e-2


def marlin_rows(ranks: int, tokens: int, layers: list[Any], width: int, hidden: int) -> None:
    """Time both products alone and the whole of routed experts."""
    from activation import swiglu  # written beside this script by main

    calls, block = calls_of(tokens), block_of(tokens)
    chosen = [torch.topk(one.float(), TOP) for one in logits(tokens, calls)]
    weights = [torch.softmax(c.values, 1).contiguous() for c in chosen]
    ids = [c.indices.int().contiguous() for c in chosen]
    orders = [aligned(i, block) for i in ids]
    space = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    y = torch.randn(tokens * TOP, width, device="cuda").bfloat16()
    total = torch.empty_like(x)

    def first(at: int, order: Any = None) -> torch.Tensor:
        order = order or orders[at]
        return marlin(x, layers[at % len(layers)][0], 2 * width, order, weights[at], space, block, TOP)

    def second(at: int, inner: torch.Tensor = y, order: Any = None) -> torch.Tensor:
        order = order or orders[at]
        return marlin(inner, layers[at % len(layers)][1], hidden, order, weights[at], space, block, 1)

    def whole(at: int) -> None:
        order = aligned(ids[at], block)
        inner = swiglu(first(at, order))
        torch.ops._moe_C.moe_sum(second(at, inner, order).view(-1, TOP, hidden), total)

    for part, call in (("gate_up", first), ("down", second), ("all", whole)):
        record("marlin", ranks, tokens, part, replayed_us(call, calls))


# -- triton_kernels ----------------------------------------------------------------------------------


def triton_weight(n: int, k: int, experts: int = EXPERTS) -> tuple[Any, Any]:
    """Random MXFP4 weights in the layout that triton_kernels wants on the card."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4 as ELEMENT
    from triton_kernels.tensor import convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    packed = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda").transpose(-2, -1)
    scale = torch.randint(116, 120, (experts, n, k // 32), dtype=torch.uint8, device="cuda").transpose(-2, -1)
    of_value, value = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    of_scale, scales = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    weight = convert_layout(wrap_torch_tensor(packed, dtype=ELEMENT), of_value, **value)
    scale = convert_layout(wrap_torch_tensor(scale), of_scale, **scales)
    torch.cuda.empty_cache()
    return weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))


def triton_routing(scores: torch.Tensor) -> tuple[Any, Any, Any]:
    """Choice of experts and the order of rows, all in triton_kernels."""
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
    from triton_kernels.tensor import make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    chosen = topk(scores, TOP, apply_softmax=True)
    out, back = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
    ragged = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, out.shape[0])
    scale = chosen.vals.flatten()[back]
    data = RoutingData(scale, ragged.block_sizes, EXPERTS, TOP, ragged)
    return data, GatherIndx(back, out), ScatterIndx(out, back)


def triton_rows(ranks: int, tokens: int, layers: list[Any], width: int) -> None:
    """Time both products alone and the whole of routed experts with the choice."""
    import triton_kernels.swiglu
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs

    calls = calls_of(tokens)
    scores = logits(tokens, calls)
    routes = [triton_routing(one) for one in scores]
    act = FusedActivation(
        FnSpecs("swiglu", triton_kernels.swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0)
    )
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    y = torch.randn(tokens * TOP, width, device="cuda").bfloat16()

    def first(at: int, route: Any = None) -> torch.Tensor:
        data, gather, _ = route or routes[at]
        (weight, precision), bias = layers[at % len(layers)][0]
        return matmul_ogs(
            x, weight, bias, data, gather_indx=gather, precision_config=precision, fused_activation=act
        )

    def second(at: int, inner: torch.Tensor = y, route: Any = None) -> torch.Tensor:
        data, _, scatter = route or routes[at]
        (weight, precision), bias = layers[at % len(layers)][1]
        return matmul_ogs(
            inner, weight, bias, data, scatter_indx=scatter, precision_config=precision, gammas=data.gate_scal
        )

    def whole(at: int) -> None:
        route = triton_routing(scores[at])
        second(at, first(at, route), route)

    for part, call in (("gate_up", first), ("down", second), ("all", whole)):
        record("triton", ranks, tokens, part, replayed_us(call, calls))


def expert_rows(kind: str, ranks: int, end: float) -> None:
    """All numbers of tokens of a split over `ranks`; engines pad both sizes."""
    layer_count = 2 if ranks <= 2 else 4
    if kind == "marlin":  # vllm 0.20.2 oracle/mxfp4.py
        width, hidden = up(WIDTH // ranks, 128), up(HIDDEN, 256)
        made: list[Any] = [
            (marlin_layer(2 * width, hidden), marlin_layer(hidden, width)) for _ in range(layer_count)
        ]
    else:
        width, hidden = up(WIDTH // ranks, 64), HIDDEN
        made = [
            (
                (triton_weight(2 * width, hidden), torch.randn(EXPERTS, 2 * width, device="cuda")),
                (triton_weight(hidden, width), torch.randn(EXPERTS, hidden, device="cuda")),
            )
            for _ in range(layer_count)
        ]
    for tokens in TOKENS:
        if time.time() - START > end:
            print("out of time at", kind, ranks, tokens)
            return
        if kind == "marlin":
            marlin_rows(ranks, tokens, made, width, hidden)
        else:
            triton_rows(ranks, tokens, made, width)


# -- attention and small products --------------------------------------------------------------------


def decode_rows(end: float) -> None:
    """FlashAttention 3 with sinks over a paged cache, one query a sequence."""
    page, dim = 16, 64
    for ranks in (8, 2, 1, 4):
        heads, kv = 64 // ranks, 8 // ranks
        for keys in (1024, 8192):
            for batch in (1, 4, 16, 64, 256):
                need = batch * keys // page
                pool = max(2 * need, int(3e8 / (page * kv * dim * 4)))
                cache = [torch.randn(pool, page, kv, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
                calls = max(2, min(24, pool // need))
                tables = [
                    torch.randperm(pool, device="cuda")[:need].view(batch, -1).int().contiguous()
                    for _ in range(calls)
                ]
                q = torch.randn(batch, heads, dim, device="cuda").bfloat16()
                sinks = torch.randn(heads, device="cuda").bfloat16()
                used = torch.full((batch,), keys - 3, dtype=torch.int32, device="cuda")
                starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
                for window in (0, 128):
                    if time.time() - START > end:
                        return
                    for splits in (32, 0):

                        def call(at: int) -> Any:
                            return torch.ops._vllm_fa3_C.fwd(
                                q, cache[0], cache[1], None, None, None, None, starts, None, None, None, used,
                                1, keys, tables[at], None, None, None, None, None, None, None, None,
                                dim**-0.5, True, window - 1 if window else -1, 0 if window else -1, 0.0, True,
                                None, splits, None, 0, sinks, 1, 0, None,
                            )  # fmt: skip

                        record("decode", ranks, batch, keys - 3, window, splits, replayed_us(call, calls))


def small_rows() -> None:
    """The choice of experts, and products of few columns."""
    for tokens in (1, 16, 64, 256, 1024):
        scores = [one.float() for one in logits(tokens, 8)]
        made = [
            torch.empty(tokens, TOP, device="cuda", dtype=t)
            for t in (torch.float32, torch.int32, torch.int32)
        ]
        call = lambda at: torch.ops._moe_C.topk_softmax(*made, scores[at % 8], True, None)  # noqa: B023, E731
        record("topk", tokens, replayed_us(call, 20))
    for n, k in (
        (128, 2880),
        (640, 2880),
        (1280, 2880),
        (5120, 2880),
        (2880, 512),
        (2880, 1024),
        (2880, 4096),
    ):
        many = min(64, int(3e8 // (n * k * 2)) + 2)
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(many)]
        for m in (1, 4, 16, 64, 256):
            x = torch.randn(m, k, device="cuda").bfloat16()
            call = lambda at: torch.mm(x, weights[at % many].t())  # noqa: B023, E731
            record("bf16", m, n, k, replayed_us(call, many))


ACTIVATION = """
import torch, triton, triton.language as tl
@triton.jit
def _act(x, y, n, B: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    g = tl.load(x + row * 2 * n + 2 * at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(x + row * 2 * n + 2 * at + 1, mask=at < n, other=0.0).to(tl.float32)
    g, u = tl.minimum(g, 7.0), tl.minimum(tl.maximum(u, -7.0), 7.0)
    tl.store(y + row * n + at, (g / (1 + tl.exp(-1.702 * g)) * (u + 1)).to(tl.bfloat16), mask=at < n)
def swiglu(x):
    n = x.shape[1] // 2
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    _act[(x.shape[0], triton.cdiv(n, 1024))](x, y, n, B=1024)
    return y
"""


def main() -> None:
    """Measure what the time allows, the splits in use first, and write all rows."""
    lib, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    end = float(sys.argv[3]) if len(sys.argv) > 3 else 500.0
    scratch = Path("/tmp/activation")
    scratch.mkdir(exist_ok=True)
    (scratch / "activation.py").write_text(ACTIVATION)
    sys.path[:0] = [str(lib), str(scratch)]
    torch.ops.load_library(str(lib / "_moe_C.abi3.so"))
    torch.ops.load_library(str(lib / "fa3.so"))
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    card = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True
    )
    head = {"device": card.stdout.decode().strip(), "torch": torch.__version__, "wheel": "vllm 0.20.2"}

    def constrained(kind: str, ranks: int) -> None:
        if kind == "triton":
            from triton_kernels.matmul_ogs_details import opt_flags

            opt_flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
        expert_rows(kind, ranks, end)

    jobs: list[tuple[str, Callable[[], None]]] = [("check", check_marlin), ("small", small_rows)]
    for ranks in (8, 2, 1, 4):
        for kind in ("marlin", "triton"):
            jobs.append((f"{kind} {ranks}", lambda kind=kind, ranks=ranks: constrained(kind, ranks)))
    jobs.insert(6, ("decode", lambda: decode_rows(end)))
    for name, job in jobs:
        if not re.match(sys.argv[4] if len(sys.argv) > 4 else "", name):
            continue
        try:
            job()
        except Exception as error:
            print("FAILED", name, type(error).__name__, str(error)[:1500], flush=True)
        torch.cuda.empty_cache()
        print(name, "done at", round(time.time() - START), flush=True)
        out.write_text(json.dumps({**head, "rows": ROWS}))


if __name__ == "__main__":
    main()
