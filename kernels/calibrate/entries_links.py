"""Pure makers of link entries: expert parallelism, point-to-point copies, collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from moesim.hwmodels.calibration import MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate.entries_common import FLOOR, Rows, sm_curve, spread, stated_quality
from moesim.kernels.calibrate.protocol import TimedRow
from moesim.kernels.export import curve, residual
from moesim.kernels.fit import fit_latency_bandwidth, fit_saturating, fit_transfer, medians

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
        tokens = _reference_tokens(found)
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


def _reference_tokens(found: Sequence[TimedRow]) -> int:
    """The number of tokens measured with the most SM counts; of equals, the larger number."""
    counts: dict[int, int] = defaultdict(int)
    for row in found:
        counts[int(row.parameters["tokens"])] += 1
    return max(counts, key=lambda tokens: (counts[tokens], tokens))


def _bus_bytes_per_s(row: TimedRow) -> float:
    """Bus bandwidth of a collective in bytes/s; the row's `bytes` are those that one rank contributes."""
    n, size = int(row.parameters["ranks"]), row.values["bytes"]
    total = size * n if row.parameters["operation"] == "all_gather" else size
    factor = 2.0 if row.parameters["operation"] == "all_reduce" else 1.0
    return factor * total * (n - 1) / n / row.seconds
