"""Pure makers of compute entries: GEMMs, attention, memory, interference, and rates for information."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from moesim.hwmodels.calibration import GemmTable, Law, MeasuredCurve
from moesim.hwmodels.calibration_entry import LawGroup, entry_id_suffix
from moesim.kernels.calibrate.entries_common import FLOOR, Rows, sm_curve, spread
from moesim.kernels.export import curve, gemm_table, law, residual
from moesim.kernels.fit import fit_slow_down

_LAW_GROUP: dict[str, LawGroup] = {"attention": "attention", "memory": "memory_bound"}


def gemms(rows: Rows) -> Iterable[GemmTable]:
    """Tables of dense and grouped GEMMs. Scaled FP8 GEMMs are SM-aware; BF16 GEMMs are SM-unaware."""
    for cls, dtype in (("gemm", "bf16"), ("gemm", "fp8"), ("grouped_gemm", "fp8")):
        found = [
            r
            for r in rows.of("gemm", kind="product", dtype=dtype)
            if (int(r.parameters["groups"]) > 1) == (cls == "grouped_gemm")
        ]
        if not found:
            continue
        table = [
            (*(float(r.parameters[key]) for key in ("m", "n", "k", "groups")), r.values["flop"] / r.seconds)
            for r in found
        ]
        scales = "row-wise scales" if dtype == "fp8" else "cuBLAS"
        yield gemm_table(
            f"{rows.name}.{cls}_{dtype}",
            "gemm" if cls == "gemm" else "grouped_gemm",
            "bf16" if dtype == "bf16" else "fp8",
            [(row[0], row[1], row[2], row[3], row[4]) for row in table],
            sm_aware=dtype == "fp8",
            origin=rows.origin,
            what=f"PyTorch {dtype} products, {scales}, random inputs beyond L2, graph replay",
            error=residual(max(0.03, spread(found)), "spread of repeats, at least 3 %"),
            conditions=rows.origin.conditions(compute_sms=rows.accelerator.n_sms, duty="sustained"),
        )


def attention(rows: Rows) -> Iterable[MeasuredCurve]:
    """Rates of causal attention over the sequence length.

    A library's backward contains two memory-bound kernels around its core (row sums before, conversion of
    the query gradient after), which the simulator prices separately. Their time, 4 v + 10 q bytes per head
    and token (q, v: head sizes) at the bandwidth of a copy, is subtracted where that bandwidth was measured.
    """
    copies = rows.of("hbm", size_bytes=1 << 30)
    bandwidth = max((r.values["bytes"] / r.seconds for r in copies), default=0.0)
    for direction in ("forward", "backward"):
        found = rows.of("attention", direction=direction)
        if not found:
            continue
        core = direction == "backward" and bandwidth > 0.0
        points = []
        for r in found:
            heads, length, dqk, dv = (int(r.parameters[k]) for k in ("heads", "length", "dqk", "dv"))
            around_s = heads * length * (4 * dv + 10 * dqk) / bandwidth if core else 0.0
            points.append((float(length), r.values["flop"] / (r.seconds - around_s) / 1e12))
        what = "PyTorch scaled_dot_product_attention, 128 heads, 192/128, batch 1"
        yield curve(
            f"{rows.name}.attention_{direction}",
            points,
            x=("sequence", "tokens"),
            y=(f"causal {direction}{' core' if core else ''} rate", "TFLOP/s"),
            origin=replace(rows.origin, kind="derived") if core else rows.origin,
            what=f"{what}, less its two memory-bound kernels at the bandwidth of a copy" if core else what,
            error=residual(
                max(0.05 if core else 0.03, spread(found)), "spread of repeats, at least 3 to 5 %"
            ),
            used_for=(f"attention_{direction}",),
            conditions=rows.origin.conditions(compute_sms=rows.accelerator.n_sms, duty="sustained"),
        )


def memory(rows: Rows) -> Iterable[MeasuredCurve]:
    """Effective bandwidth of a copy and of the FP8 cast on all SMs, over the bytes that they move."""
    for measurement, select, id_, used_for, what in (
        ("hbm", {}, "copy", ("copy", "attention_pre_post"), "copy inside one GPU"),
        ("quantise", {"operation": "quantise"}, "cast", ("cast",), "cast of BF16 to E4M3 with 1x128 scales"),
    ):
        found = rows.of(measurement, **select)
        widest = max((int(r.parameters["ctas"]) for r in found), default=0)
        at = [r for r in found if r.parameters["ctas"] == widest]
        if at:
            yield curve(
                f"{rows.name}.{id_}",
                [(r.values["bytes"] / 1e6, r.values["bytes"] / r.seconds / 1e9) for r in at],
                x=("bytes read and written", "MB"),
                y=("effective bandwidth", "GB/s"),
                origin=rows.origin,
                what=what,
                error=residual(max(FLOOR, spread(at)), "spread of repeats, at least 2 %"),
                used_for=used_for,
                conditions=rows.origin.conditions(compute_sms=rows.accelerator.n_sms),
            )


def interference(rows: Rows) -> Iterable[Law]:
    """The five slow-down laws: medians over the operators of a group, made monotone in the SMs.

    For an SM-aware operator the best margin counts, as a tuned library would set it.
    """
    found = rows.of("interference")
    groups: dict[LawGroup, list[tuple[float, float]]] = defaultdict(list)
    aware: dict[tuple[object, float], list[float]] = defaultdict(list)
    for row in found:
        operator, n, values = str(row.parameters["operator"]), float(row.parameters["sms"]), row.values
        if row.parameters["left_free"]:
            aware[operator, n].append(values["ratio"])
        else:
            groups[_LAW_GROUP.get(operator, "gemm_sm_unaware")].append((n, values["ratio"]))
        slower = values["copy_alone_bytes_per_s"] / values["copy_bytes_per_s"]
        groups["communication"].append((n, max(1.0, slower)))
    groups["gemm_sm_aware"] = [(n, min(ratios)) for (_, n), ratios in aware.items()]
    noise = [(r.values["ratio_high"] - r.values["ratio_low"]) / 2 for r in found]
    for group, samples in groups.items():
        if not samples:
            continue
        fit = fit_slow_down(samples, falling=group == "communication", what=group)
        error = max(0.03, fit.quality.relative, statistics.median(noise))
        raw = ", ".join(f"{y:.3f} at {x:g}" for x, y in fit.raw)
        margin = "; 0, 2 or 4 SMs more left free than the push takes, whichever is best"
        yield law(
            f"{rows.name}.{entry_id_suffix(group)}",
            group,
            fit.points,
            origin=rows.origin,
            what=f"beside a PTX push to a peer on n SMs; medians over operators {raw}",
            error=residual(error, "left-out points, or spread over operators or windows"),
            note=f"a GPU that only sends{margin if group == 'gemm_sm_aware' else ''}",
        )


def small(rows: Rows) -> Iterable[MeasuredCurve]:
    """Barrier latency by ranks, and cast and memory rates by SMs, for information and for later models."""
    found = rows.of("barrier")
    if found:
        yield curve(
            "barrier.latency",
            [(float(r.parameters["ranks"]), r.seconds * 1e6) for r in found],
            x=("ranks", "ranks"),
            y=("latency", "us"),
            origin=rows.origin,
            what="barrier over system-scope flags, kernel launch included",
            error=residual(max(0.05, spread(found)), "spread of repeats, at least 5 %"),
        )
    for operation in ("quantise", "dequantise"):
        cast = rows.of("quantise", operation=operation, rows=32768)
        if cast:
            yield sm_curve(rows, cast, f"{operation}.sm_rate", "ctas", f"{operation}, bytes read and written")
    copied = [r for r in rows.of("hbm") if r.parameters["size_bytes"] == 1 << 30]
    if copied:
        yield sm_curve(
            rows, copied, "copy.local.sm_rate", "ctas", "copy inside one GPU, bytes read and written"
        )
