"""Turns measured rows into the entries of a calibration profile."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, Entry, GemmTable, Law, MeasuredCurve
from moesim.hwmodels.calibration_entry import LawGroup, entry_id_suffix
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedFraction
from moesim.kernels.calibrate.protocol import TIMED_GEMM, TimedRow
from moesim.kernels.export import Origin, curve, gemm_table, law, residual
from moesim.kernels.fit import (
    Quality,
    fit_latency_bandwidth,
    fit_saturating,
    fit_slow_down,
    fit_transfer,
    medians,
)

FLOOR = 0.02
"""Smallest relative error that an entry states, because two runs on one machine differ by this much."""


class Rows(Struct, frozen=True):
    """Rows of one calibration with the accelerator they were measured on."""

    rows: Sequence[TimedRow]
    accelerator: Accelerator
    origin: Origin
    name: str
    how: str = ""
    """What every entry of a model's operators says of its measurement, where it is not the usual one."""

    def of(self, measurement: str, **parameters: Any) -> list[TimedRow]:
        """Rows of a measurement whose parameters have these values."""
        return [
            row
            for row in self.rows
            if row.ok
            and row.measurement == measurement
            and all(row.parameters.get(key) == value for key, value in parameters.items())
        ]


def sm_curve(rows: Rows, found: Sequence[TimedRow], id_: str, parameter: str, what: str) -> MeasuredCurve:
    """Rate over SMs; its note holds the parameters of the saturating fit where there are enough points."""
    pairs = [(float(r.parameters[parameter]), r.values["bytes"] / r.seconds) for r in found]
    points, _ = medians(pairs)
    note, error = None, spread(found)
    if len(points) >= 4:
        fit = fit_saturating(pairs, id_)
        error = max(error, fit.quality.relative)
        note = (
            f"fit: {fit.slope / 1e9:.4g} GB/s an SM up to {fit.limit / 1e9:.5g} GB/s "
            f"(sharpness {fit.sharpness:.2g}), {stated_quality(fit.quality)}; "
            f"97 % of the limit with {fit.sms_for(0.97):.1f} SMs"
        )
    return curve(
        id_,
        [(n, rate / 1e9) for n, rate in points],
        x=("SMs (CTAs)", "SMs"),
        y=("rate", "GB/s"),
        origin=rows.origin,
        what=what,
        error=residual(max(FLOOR, error), "left out of the saturating fit, or spread of repeats"),
        note=note,
    )


def stated_quality(quality: Quality) -> str:
    """The leave-one-out errors in words."""
    left = f"left-out median {quality.left_out_median:.1%}, worst {quality.left_out_worst:.1%}"
    return left if quality.left_out_median == quality.left_out_median else "too few points to leave one out"


def spread(found: Sequence[TimedRow]) -> float:
    """Median over rows of half the inter-quartile range, relative to the median time."""
    return statistics.median((r.high_s - r.low_s) / 2 / r.seconds for r in found)


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
        shape = [[float(r.parameters[key]) for key in ("m", "n", "k", "groups")] for r in found]
        scales = "row-wise scales" if dtype == "fp8" else "cuBLAS"
        yield gemm_table(
            f"{rows.name}.{cls}_{dtype}",
            "gemm" if cls == "gemm" else "grouped_gemm",
            "bf16" if dtype == "bf16" else "fp8",
            [
                (m, n, k, g, r.values["flop"] / r.seconds)
                for (m, n, k, g), r in zip(shape, found, strict=True)
            ],
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
            used_for=(f"attention_{direction}", f"attention_{direction}/192"),
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


LINK_SMS = 20
"""Fewest SMs at which the link share is read; with fewer, the SMs limit the rate and not the link."""


def expert_parallel(rows: Rows) -> Iterable[MeasuredCurve]:
    """ep.<operation>.sm_rate and .scale_up_fraction; their notes hold the latency fitted over all sizes."""
    for operation, measured in (("dispatch", ("dispatch_fp8", "dispatch_bf16")), ("combine", ("combine",))):
        found = next((r for name in measured if (r := rows.of("all_to_all", operation=name))), [])
        if not found:
            continue
        form = str(found[0].parameters["operation"])
        most = max(int(r.parameters["ranks"]) for r in found)
        found = [r for r in found if r.parameters["ranks"] == most]
        # The number of tokens measured with the most SM counts; of equals, the larger number.
        counts = Counter(int(r.parameters["tokens"]) for r in found)
        tokens = max(counts, key=lambda tokens: (counts[tokens], tokens))
        at = [r for r in found if r.parameters["tokens"] == tokens]
        points = [(float(r.parameters["sms"]), r.values["bytes"] / r.seconds) for r in at]
        error, fitted = _transfer_quality(found, points)
        what = f"{form} of {tokens:,} tokens a rank, hidden 7168, top-8 of 256, {most} ranks, layout excluded"
        stated = residual(max(FLOOR, error), "left out of the fit over tokens and SMs, or spread of repeats")
        common: dict[str, Any] = {
            "origin": rows.origin,
            "what": what,
            "error": stated,
            "note": fitted or None,
        }
        x = ("communication SMs", "SMs")
        yield curve(
            f"ep.{operation}.sm_rate",
            [(n, rate / 1e9) for n, rate in points],
            x=x,
            y=("received payload, own-rank rows included", "GB/s"),
            **common,
        )
        link = [(n, rate) for n, rate in points if n >= LINK_SMS] or [max(points)]
        share = found[0].values["crossing"] / rows.accelerator.scale_up_bytes_per_s
        yield curve(
            f"ep.{operation}.scale_up_fraction",
            [(n, rate * share) for n, rate in link],
            x=x,
            y=("payload crossing the scale-up link over its nominal rate", "1"),
            **common,
        )
    pushed = rows.of("all_to_all", operation="push")
    if pushed:
        yield sm_curve(rows, pushed, "copy.all_to_all.sm_rate", "sms", "push of every rank to all peers")


def forwarding(rows: Rows) -> Iterable[MeasuredCurve]:
    """ep.forward.<operation>.sm_rate: the rate at which a relay forwards or reduces while both hops run."""
    for operation, verb in (("dispatch", "forwarded to"), ("combine", "reduced from")):
        found = rows.of("two_hop", operation=f"{operation}_2hop")
        if found:
            p = found[0].parameters
            nodes = int(p["ranks"]) // int(p["node_size"])
            what = (
                f"rows {verb} the GPUs of the own node in a two-hop {operation} over {nodes} virtual nodes "
                f"of {p['node_size']}, {p['tokens']:,} tokens a rank, hidden 7168, top-8 of 256"
            )
            yield sm_curve(rows, found, f"ep.forward.{operation}.sm_rate", "sms", what)


def point_to_point(rows: Rows) -> Iterable[MeasuredCurve]:
    """copy.<variant>.sm_rate and, from the push by size, p2p.scale_up_fraction with the latency removed."""
    for variant in ("push", "pull", "bulk"):
        threads = 0 if variant == "bulk" else 1024
        found = rows.of("copy", variant=variant, peer=1, threads=threads)
        size = max((int(r.parameters["size_bytes"]) for r in found), default=0)
        size = 256 << 20 if any(r.parameters["size_bytes"] == 256 << 20 for r in found) else size
        at = [r for r in found if r.parameters["size_bytes"] == size]
        if at:
            what = f"{variant} of {size >> 20} MiB to one peer"
            yield sm_curve(rows, at, f"copy.{variant}.sm_rate", "ctas", what)
    sized = rows.of("copy", variant="push", peer=1, threads=1024, ctas=16)
    pairs = [(float(r.parameters["size_bytes"]), r.seconds) for r in sized]
    if len({x for x, _ in pairs}) < 3:
        return
    fit = fit_latency_bandwidth(pairs, "copy by size")
    nominal = rows.accelerator.scale_up_bytes_per_s
    shares = [
        (x, x / (t - fit.latency_s) / nominal)
        for x, t in medians(pairs)[0]
        if x >= 1e6 and t > 1.5 * fit.latency_s
    ]
    if shares:
        yield curve(
            "p2p.scale_up_fraction",
            [(x, min(1.0, y)) for x, y in shares],
            x=("message bytes", "B"),
            y=("payload over the nominal scale-up rate, launch latency apart", "1"),
            origin=rows.origin,
            what="push of 16 CTAs to one peer",
            error=residual(max(FLOOR, fit.quality.relative), "left out of the fit over sizes"),
            interpolation="log",
            note=f"latency of a launch and its copy: {fit.latency_s * 1e6:.1f} us",
        )


def collectives(rows: Rows) -> Iterable[MeasuredCurve]:
    """collective.scale_up_fraction from NCCL's all-gather, and every collective's bus bandwidth."""
    found = rows.of("nccl", beside="none")
    most = max((int(r.parameters["ranks"]) for r in found), default=0)
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        at = [r for r in found if r.parameters["operation"] == operation and r.parameters["ranks"] == most]
        if not at:
            continue
        points = [(r.values["bytes"] / 2**20, _bus_bytes_per_s(r)) for r in at]
        common: dict[str, Any] = {
            "x": ("bytes that a rank contributes", "MiB"),
            "origin": rows.origin,
            "what": f"NCCL {operation} over {most} ranks of one node",
            "error": residual(max(0.05, spread(at)), "spread of repeats, at least 5 %"),
            "interpolation": "log",
        }
        if operation == "all_gather":
            nominal = rows.accelerator.scale_up_bytes_per_s
            yield curve(
                "collective.scale_up_fraction",
                [(x, y / nominal) for x, y in points],
                y=("bus bandwidth over the nominal scale-up rate", "1"),
                **common,
            )
        yield curve(
            f"nccl.{operation}.busbw",
            [(x, y / 1e9) for x, y in points],
            y=("bus bandwidth", "GB/s"),
            **common,
        )
        alone = {r.parameters["size_bytes"]: r.seconds for r in at}
        beside = rows.of("nccl", operation=operation, beside="gemm", ranks=most)
        ratios = [
            (r.values["bytes"] / 2**20, r.seconds / alone[r.parameters["size_bytes"]])
            for r in beside
            if r.parameters["size_bytes"] in alone
        ]
        if ratios:
            yield curve(
                f"nccl.{operation}.beside_compute",
                ratios,
                y=("time beside products over time alone", "1"),
                **common,
            )


def _transfer_quality(found: Sequence[TimedRow], points: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """(stated error, note) of the fit over tokens and SMs; failing that over SMs, or of the spread alone."""
    repeats = spread(found)
    try:
        fit = fit_transfer([(r.values["bytes"], float(r.parameters["sms"]), r.seconds) for r in found])
    except InputError:
        if len(points) < 4:
            return repeats, ""
        quality = fit_saturating(points).quality
        return max(repeats, quality.relative), stated_quality(quality)
    rate = fit.rate
    note = (
        f"fit over tokens: {fit.latency_s * 1e6:.1f} us + bytes / R, R = {rate.slope / 1e9:.4g} GB/s an SM "
        f"up to {rate.limit / 1e9:.5g} GB/s (sharpness {rate.sharpness:.2g}), {stated_quality(fit.quality)}"
    )
    return max(repeats, fit.quality.relative), note


def _bus_bytes_per_s(row: TimedRow) -> float:
    """Bus bandwidth of a collective in bytes/s; the row's `bytes` are those that one rank contributes."""
    n, size = int(row.parameters["ranks"]), row.values["bytes"]
    total = size * n if row.parameters["operation"] == "all_gather" else size
    factor = 2.0 if row.parameters["operation"] == "all_reduce" else 1.0
    return factor * total * (n - 1) / n / row.seconds


def entries(rows: Rows) -> list[Entry]:
    """Every entry that the rows support, in the order of the makers."""
    makers: tuple[Callable[[Rows], Iterable[Entry]], ...] = (
        expert_parallel,
        forwarding,
        point_to_point,
        collectives,
        gemms,
        attention,
        memory,
        interference,
        small,
    )
    return [entry for make in makers for entry in make(rows)]


def lost_beside_nccl(rows: Rows) -> SourcedFraction | None:
    """Compute that a second of an NCCL collective costs GEMMs beside it; None where it was not measured."""
    found = [row.values[key] for row in rows.of("nccl", beside=TIMED_GEMM) for key in ("lost", "low", "high")]
    if not found or min(found) < 0.0:
        return None
    return SourcedFraction(
        value=statistics.median(found[::3]),
        between=(min(found), max(found)),
        kind="measured",
        source=rows.origin.source(
            "BF16 GEMMs beside all-gathers and reduce-scatters of NCCL, windows covered"
        ),
        date=rows.origin.date,
    )


def as_profile(profile: CalibrationProfile, found: Sequence[Entry]) -> CalibrationProfile:
    """The profile with these entries; raises InputError where two have one id."""
    ids = [entry.id for entry in found]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise InputError(f"the entries {', '.join(twice)} appear twice in {profile.name}")
    return CalibrationProfile.model_validate(
        {
            **{name: getattr(profile, name) for name in type(profile).model_fields},
            "gemm_tables": tuple(e for e in found if isinstance(e, GemmTable)),
            "curves": tuple(e for e in found if isinstance(e, MeasuredCurve)),
            "laws": tuple(e for e in found if isinstance(e, Law)),
        }
    )
