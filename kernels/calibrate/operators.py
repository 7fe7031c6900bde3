"""Measures the operators of one model's step, at the model's own sizes, as PyTorch's code runs them.

The command line passes a table of plain operators (`use`, `bytes`, `launches` and sizes of the tensors):
what the simulator prices, one row each. A use such as `permute/eager_expand` names a piece of PyTorch code
below; `bytes` are those that the simulator counts, so that a curve over them gives back the measured time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moesim.hwmodels.calibration import Entry, GemmClass, GemmTable, MeasuredCurve, load_profile
from moesim.kernels.calibrate.compute import Graphs, TorchWork, attention, gemm, torch
from moesim.kernels.calibrate.entries import Rows, spread
from moesim.kernels.calibrate.pieces import COMPILED, EAGER, RANKS, TENSORS, Call
from moesim.kernels.calibrate.pieces import normal as _normal
from moesim.kernels.calibrate.pieces import passes as _passes
from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample, TimedRow
from moesim.kernels.export import curve, gemm_table, residual

Operator = Mapping[str, Parameter]
"""One row of the table."""
SPIN_CYCLES, SPIN_HZ, LONGEST_SPIN_S = 4_000_000, 2e9, 0.2
"""The GPU waits at least 2 ms while the host launches a piece, and as long as twice the host's own time:
FSDP2's packing makes a table of blocks on the host, milliseconds of it for a large tensor."""
FLUSH_BYTES = 256 << 20
GRAPHED = ("gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm", "attention_forward", "attention_backward")
"""Uses that are limited by compute: timed as CUDA graphs at the clock of a long load."""
GEMMS: tuple[GemmClass, ...] = ("gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm")
NAME, COMPILED_NAME = "operators", "compiled"
LAUNCHES_FROM = "hopper-launch"
"""Profile with the gap between two launches."""
FIRST = ("permute", "grouped_gemm", "wgrad_gemm", "gemm", "attention_forward", "attention_backward", "norm")
"""Classes by importance; the others follow, because a time budget cuts off the last ones."""


# -- pieces ------------------------------------------------------------------------------------------


def norm(p: Mapping[str, Any], backward: bool) -> Call:
    """RMS norm over the last side; `norm/eager_forward_add` adds the residual first."""
    f, width = torch().nn.functional, p["width"]
    x, gain = _normal(p["rows"], width, grad=True), _normal(width, grad=True)
    if p["use"].endswith("_add"):
        r = _normal(p["rows"], width)
        return lambda: f.rms_norm(x + r, (width,), gain)
    return _passes(lambda x, gain: f.rms_norm(x, (width,), gain), x, gain, backward=backward)


def rope(p: Mapping[str, Any], backward: bool) -> Call:
    """Rotary embedding with complex numbers in FP32, as torchtitan writes it."""
    t = torch()
    x = _normal(1, p["tokens"], p["heads"], p["width"])
    angle = t.rand(1, p["tokens"], 1, p["width"] // 2, device="cuda")
    turn = t.polar(t.ones_like(angle), angle)

    def turned() -> Any:
        z = t.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return t.view_as_real(z * turn).flatten(3).to(x.dtype)

    return turned


def rope_in_halves(p: Mapping[str, Any], backward: bool) -> Call:
    """Rotary embedding that rotates halves, as torchtitan writes it for Qwen3 and gpt_oss."""
    t = torch()
    tables = [_normal(1, p["tokens"], 1, p["width"]) for _ in range(2)]

    def turned(x: Any) -> Any:
        first, second = x[..., : p["width"] // 2], x[..., p["width"] // 2 :]  # slices: their backwards fill
        return x * tables[0] + t.cat((-second, first), dim=-1) * tables[1]

    return _passes(turned, _normal(1, p["tokens"], p["heads"], p["width"], grad=True), backward=backward)


def joined(p: Mapping[str, Any], backward: bool) -> Call:
    """Heads of MLA as torchtitan joins them: a slice of every wider row, and a part that keys share."""
    t, (tokens, heads, width, more) = torch(), (p[key] for key in ("tokens", "heads", "width", "more"))
    own = _normal(1, tokens, heads, p["whole"])[..., :width]
    other = _normal(1, tokens, 1 if p["shared"] else heads, more).expand(-1, -1, heads, -1)
    return lambda: t.cat((own, other), dim=-1)


def joined_rows(p: Mapping[str, Any], backward: bool) -> Call:
    """Gradient of MLA's down-projection, of contiguous rows, and the latent's slice, made contiguous."""
    t, width = torch(), p["width"]
    parts = _normal(p["tokens"], width), _normal(p["tokens"], p["more"])
    whole = _normal(p["tokens"], p["whole"])
    return lambda: (t.cat(parts, dim=-1), whole[:, :width].contiguous())


def embedding(p: Mapping[str, Any], backward: bool) -> Call:
    """Rows of a table by token, or (`embedding/scatter`) their gradients summed into a table of zeros."""
    t = torch()
    table = _normal(p["vocabulary"], p["hidden"], grad=True)
    chosen = t.randint(0, p["vocabulary"], (p["tokens"],), device="cuda")
    return _passes(
        lambda table: t.nn.functional.embedding(chosen, table), table, backward=p["use"].endswith("scatter")
    )


def gather_in(p: Mapping[str, Any], backward: bool) -> Call:
    """FP32 shards copied into the BF16 buffer of an all-gather, as FSDP2 does."""
    t, size = torch(), p["elements"] // TENSORS
    shards = [_normal(size, wide=True) for _ in range(TENSORS)]
    buffer = t.empty(size * TENSORS, device="cuda", dtype=t.bfloat16).split(size)
    return lambda: t._foreach_copy_(buffer, shards)


def swiglu(p: Mapping[str, Any], backward: bool) -> Call:
    """silu(gate) * up, in two kernels."""
    f = torch().nn.functional
    leaves = [_normal(p["elements"], grad=True) for _ in range(2)]
    return _passes(lambda gate, up: f.silu(gate) * up, *leaves, backward=backward)


def topk(p: Mapping[str, Any], backward: bool) -> Call:
    """The router from its logits on: scores, choice, histograms and the order of the rows."""
    t = torch()
    experts, k = p["experts"], p["top_k"]
    logits, bias = _normal(p["tokens"], experts, grad=True), t.zeros(experts, device="cuda")

    def gate(z: Any) -> Any:
        scores = t.softmax(z.float(), dim=1)
        chosen = t.topk(scores + bias, k=k, dim=-1, sorted=False)[1]
        if not backward:
            for _ in range(2):
                t.histc(chosen.view(-1), bins=experts, min=0, max=experts)
            t.argsort(chosen.view(-1), stable=True)
        return scores.gather(1, chosen) * 1.0

    return _passes(gate, logits, backward=backward)


def permute(p: Mapping[str, Any], backward: bool) -> Call:
    """Rows of tokens to their experts (expand) and back with weights (reduce), as torchtitan writes both.

    A gradient of the expansion is the backward of the reduction, and the other way round.
    """
    t = torch()
    tokens, k, hidden, experts = p["tokens"], p["top_k"], p["hidden"], p["experts"]
    rows = tokens * k
    chosen = t.rand(tokens, experts, device="cuda").topk(k, dim=-1)[1]
    order = t.argsort(chosen.view(-1), stable=True)
    shuffle = t.cat((t.randperm(rows, device="cuda"), t.full((8 * min(experts, 64),), rows, device="cuda")))
    if p["use"] in ("permute/eager_expand", "permute/eager_reduce_gradient"):

        def expand(x: Any) -> Any:
            sent = x[order // k]
            return t.vstack((sent, sent.new_zeros(hidden)))[shuffle, :]

        return _passes(expand, _normal(tokens, hidden, grad=True), backward=backward)
    weights = t.rand(tokens, k, device="cuda", requires_grad=True)

    def reduce(z: Any, w: Any) -> Any:
        target = z.new_empty(rows + 1, hidden)
        target[shuffle, :] = z
        home = t.zeros(rows, hidden, device="cuda", dtype=z.dtype)
        home[order] = target[:-1]
        return t.bmm(w.view(-1, 1, k), home.view(-1, k, hidden).float()).to(z.dtype).squeeze(1)

    return _passes(reduce, _normal(len(shuffle), hidden, grad=True), weights, backward=backward)


def loss(p: Mapping[str, Any], backward: bool) -> Call:
    """Cross-entropy of logits as they are: FP32 (`wide`), to which torchtitan casts them, or BF16."""
    t = torch()
    logits = _normal(p["tokens"], p["vocabulary"], wide=bool(p["wide"]), grad=True)
    labels = t.randint(0, p["vocabulary"], (p["tokens"],), device="cuda")
    return _passes(lambda z: t.nn.functional.cross_entropy(z, labels), logits, backward=backward)


def moved(p: Mapping[str, Any], backward: bool) -> Call:
    """Element-wise kernels and copies of one tensor, and FSDP2's packing of gradients into a buffer."""
    t, kind, n = torch(), p["use"].partition("/")[2], p["elements"]
    if kind == "pack":
        ranks = int(p.get("ranks", RANKS))
        grads = [_normal(n // TENSORS // ranks * ranks) for _ in range(TENSORS)]
        reduced = t.float32 if p["wide"] else t.bfloat16
        out = t.empty(ranks, sum(grad.numel() for grad in grads) // ranks, device="cuda", dtype=reduced)
        return lambda: t._chunk_cat(grads, dim=0, num_chunks=ranks, out=out)
    x = _normal(n, wide=kind == "narrow")
    y = _normal(n, wide=kind == "add_widened")
    calls: dict[str, Call] = {
        "add": lambda: x + y,
        "scale": lambda: x * 1.0001,
        "widen": lambda: x.float(),
        "narrow": lambda: x.bfloat16(),
        "flat": lambda: y.copy_(x),
        "add_widened": lambda: y.add_(x),
    }
    return calls[kind]


def optimizer(p: Mapping[str, Any], backward: bool) -> Call:
    """The norm of all gradients, or fused AdamW, with FP32 parameters, gradients and moments."""
    t = torch()
    values = [_normal(p["elements"] // TENSORS, wide=True) for _ in range(TENSORS)]
    grads = [t.randn_like(value) for value in values]
    if p["use"] == "optimizer/norm":
        return lambda: t.linalg.vector_norm(t.stack(t._foreach_norm(grads, 2.0)), 2.0)
    for value, grad in zip(values, grads, strict=True):
        value.grad = grad
    adam = t.optim.AdamW(values, lr=1e-5, fused=True)
    return lambda: adam.step()


PIECES: dict[str, Callable[[Mapping[str, Any], bool], Call]] = {
    "norm": norm,
    "rope": rope,
    "swiglu": swiglu,
    "topk": topk,
    "permute": permute,
    "loss": loss,
    "embedding": embedding,
    "elementwise": moved,
    "copy": moved,
    "optimizer": optimizer,
}
"""What stands for the operators of a class; the second argument asks for the backward."""
OF_USE: dict[str, Callable[[Mapping[str, Any], bool], Call]] = {
    "rope/eager_halves": rope_in_halves,
    "rope/eager_halves_backward": rope_in_halves,
    "copy/eager_cat": joined,
    "copy/eager_cat_rows": joined_rows,
    "copy/gather_in": gather_in,
}
"""What stands for single uses in the place of their class's code."""


def matrix_work(p: Mapping[str, Any]) -> TorchWork:
    """A GEMM or a core attention in BF16."""
    use = p["use"]
    if use.startswith("attention"):
        return attention(p["heads"], p["length"], p["dqk"], p["dv"], backward=use.endswith("backward"))
    t, m, n, k, groups = torch(), p["m"], p["n"], p["k"], p["groups"]
    if use == "gemm" or (use == "gate_gemm" and not p["turned"]):
        return gemm("bf16", m, n, k)
    if groups == 1:  # a weight gradient: both operands are transposed views
        data = [(_normal(k, m).t(), _normal(k, n)) for _ in range(2)]
        return TorchWork(lambda i: t.mm(*data[i]), 2, flop=2.0 * m * n * k)
    rows = k if use == "wgrad_gemm" else m
    ends = t.arange(1, groups + 1, device="cuda", dtype=t.int32) * (rows // groups)
    if use == "wgrad_gemm":
        pairs = [(_normal(k, m).t(), _normal(k, n)) for _ in range(2)]
    else:
        pairs = [(_normal(m, k), _normal(groups, n, k).transpose(-2, -1)) for _ in range(2)]
    return TorchWork(lambda i: t._grouped_mm(*pairs[i], offs=ends), 2, flop=2.0 * m * n * k)


# -- the measurement ---------------------------------------------------------------------------------


def _grid(facts: Facts, quick: bool) -> Sequence[Operator]:
    def rank(p: Operator) -> tuple[int, float]:
        cls = str(p["use"]).partition("/")[0]
        return FIRST.index(cls) if cls in FIRST else len(FIRST), -float(p["bytes"])

    return sorted((p for p in facts.operators if "compiled" not in p and _piece(p)), key=rank)


def _compiled_grid(facts: Facts, quick: bool) -> Sequence[Operator]:
    found = [p for p in facts.operators if "compiled" in p and _piece(p)]
    return sorted(found, key=lambda p: -float(p["bytes"]))


def _piece(p: Operator) -> Callable[[Mapping[str, Any], bool], Any] | None:
    """What stands for an operator: matrix work, or the piece that its row, its use or its class names."""
    use = str(p["use"])
    if len(p) <= len(("use", "bytes", "launches")):
        return None
    if use in GRAPHED:
        return lambda p, _: matrix_work(p)
    cls = use.partition("/")[0]
    if "compiled" in p:
        return COMPILED.get(cls)
    known = {**PIECES, **EAGER, **OF_USE}
    return known.get(str(p.get("piece", use))) or known.get(cls)


def without_piece(found: Iterable[Operator]) -> list[str]:
    """Uses of operators that a prediction prices and that nothing here measures."""
    return sorted({str(p["use"]) for p in found if _piece(p) is None})


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    t, use = torch(), str(p["use"])
    key = ("operators", *sorted(p.items()))
    if use in GRAPHED:
        graphs = session.keep(key, lambda: Graphs(session.devices[0], lambda: matrix_work(p)))
        return Sample(tuple(graphs.seconds() for _ in range(session.repeats)), {"flop": graphs.work.flop})
    t.cuda.set_device(session.devices[0])
    piece = _piece(p)
    assert piece is not None  # the grids hold no others
    call = session.keep(key, lambda: piece(p, use.endswith(("backward", "_gradient"))))
    flush = t.empty(FLUSH_BYTES, device="cuda", dtype=t.uint8)
    times, spin = [], SPIN_CYCLES
    for i in range(2 + session.repeats):
        flush.zero_()
        t.cuda._sleep(spin)
        marks = [t.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        began = time.perf_counter()
        call()
        host_s = min(LONGEST_SPIN_S, time.perf_counter() - began)
        spin = max(SPIN_CYCLES, int(2.0 * host_s * SPIN_HZ))
        marks[1].record()
        marks[1].synchronize()
        times += [marks[0].elapsed_time(marks[1]) * 1e-3] if i >= 2 else []
    return Sample(tuple(times))


MEASUREMENT = Grid(
    name=NAME,
    title="operators of the model's step",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.6,
    setup_s=4.0,
    libraries=("cupy", "torch"),
    of_model=True,
)
COMPILED_MEASUREMENT = Grid(
    name=COMPILED_NAME,
    title="operators of the model's step that torch.compile compiles",
    grid=_compiled_grid,
    on_gpu=_on_gpu,
    task_s=3.0,
    setup_s=10.0,
    libraries=("cupy", "torch", "triton", "C compiler"),
    of_model=True,
)


# -- entries -----------------------------------------------------------------------------------------


def curves(rows: Rows) -> Iterable[MeasuredCurve]:
    """A curve of effective bandwidth over bytes for every use that memory limits.

    The gaps between the launches of an operator are taken off, because a prediction adds them.
    """
    gap = load_profile(LAUNCHES_FROM).launch_gap
    found = [row for row in rows.of(NAME) if row.parameters["use"] not in GRAPHED]
    found += rows.of(COMPILED_NAME)
    for use in dict.fromkeys(str(row.parameters["use"]) for row in found):
        of_use = [row for row in found if row.parameters["use"] == use]
        points = averaged(
            (float(r.parameters["bytes"]), r.seconds - _gaps_s(r, gap.value if gap else 0.0)) for r in of_use
        )
        code = "torch.compile's" if of_use[0].measurement == COMPILED_NAME else "PyTorch's"
        yield curve(
            f"{rows.name}.{use.strip('/').replace('/', '.')}",
            [(size / 1e6, size / seconds / 1e9) for size, seconds in points],
            x=("bytes read and written", "MB"),
            y=("effective bandwidth", "GB/s"),
            origin=rows.origin,
            what=rows.how or f"{code} code of {use} at the sizes of a model, cold L2 cache",
            error=residual(max(0.05, spread(of_use)), "spread of repeats, at least 5 %"),
            used_for=(use,),
            conditions=rows.origin.conditions(compute_sms=rows.accelerator.n_sms),
        )


def _gaps_s(row: TimedRow, gap_s: float) -> float:
    """Seconds between an operator's launches; at most half of what was measured, where launches overlap."""
    launches = int(row.parameters["launches"])
    return min(launches * gap_s, 0.5 * row.seconds) if launches > 1 else 0.0


def averaged(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, seconds) by size, or (tokens, rate) by length, with the mean of equal sizes.

    Times may fall with more bytes, where rows of other widths are measured: a prediction at a size gives back
    its own time.
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, seconds in points:
        by_size[size].append(seconds)
    return [(size, statistics.fmean(by_size[size])) for size in sorted(by_size)]


def tables(rows: Rows) -> Iterable[GemmTable]:
    """Rates of the model's GEMMs in BF16, with those at the sizes that every calibration measures."""
    for cls in GEMMS:
        found = [(row, row.parameters) for row in rows.of(NAME, use=cls)]
        if found and cls == "gemm":
            found += [
                (row, row.parameters) for row in rows.of("gemm", kind="product", dtype="bf16", groups=1)
            ]
        rates: dict[tuple[float, float, float, float], list[float]] = defaultdict(list)
        for row, p in found:
            key = float(p["m"]), float(p["n"]), float(p["k"]), float(p["groups"])
            rates[key].append(row.values["flop"] / row.seconds)
        points = {key: statistics.harmonic_mean(of) for key, of in rates.items()}
        if points:
            yield gemm_table(
                f"{rows.name}.{cls}_bf16",
                cls,
                "bf16",
                [(*key, rate) for key, rate in points.items()],
                sm_aware=False,
                origin=rows.origin,
                what=rows.how or "PyTorch bf16 products, random inputs beyond L2, graph replay",
                error=residual(
                    max(0.03, spread([row for row, _ in found])), "spread of repeats, at least 3 %"
                ),
                conditions=rows.origin.conditions(compute_sms=rows.accelerator.n_sms, duty="sustained"),
            )


def attentions(rows: Rows) -> Iterable[MeasuredCurve]:
    """Rates of the model's core attention over the sequence length, by the widths of its heads."""
    for use in ("attention_forward", "attention_backward"):
        found = rows.of(NAME, use=use)
        widths = list(dict.fromkeys(int(row.parameters["dqk"]) for row in found))
        for width in widths:
            at = [row for row in found if row.parameters["dqk"] == width]
            conditions = rows.origin.conditions(compute_sms=rows.accelerator.n_sms, duty="sustained")
            yield curve(
                f"{rows.name}.{use}.{width}",
                averaged((float(r.parameters["length"]), r.values["flop"] / r.seconds / 1e12) for r in at),
                x=("sequence", "tokens"),
                y=(f"causal {use.partition('_')[2]} rate", "TFLOP/s"),
                origin=rows.origin,
                what=rows.how or "PyTorch scaled_dot_product_attention at the sizes of a model, whole",
                error=residual(max(0.03, spread(at)), "spread of repeats, at least 3 %"),
                used_for=(use, f"{use}/{width}") if width == widths[0] else (f"{use}/{width}",),
                conditions=conditions.model_copy(update={"whole_backward": use.endswith("backward")}),
            )


def entries(rows: Rows) -> list[Entry]:
    """Every entry of the model's operators; they come before those of fixed sizes, so that they count."""
    return [*tables(rows), *curves(rows), *attentions(rows)]
