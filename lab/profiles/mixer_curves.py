"""Writes hwmodels/data/calibration/h200-mixers.yaml from a run of mixers.py.

    python -m lab.profiles.mixer_curves lab/results/2026-11-22-h200-mixers.json.xz > ...

Rates count the FLOPs that moesim counts for a scan (docs/model.md, eqs. C21 to C23), so that the measurement
gives the kernels' time only. x are the heads that run side by side, of all sequences. Convolutions
have curves of bandwidth over the bytes that moesim counts. A third of the shapes stays out of the
curves; their 90th percentile of errors is the residual, and their errors go to stderr.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from typing import Any

from lab import packed

from moesim.hwmodels.calibration_entry import Curve
from moesim.simulator.model.attention import KDA, GatedDelta, Lightning, Mamba2
from moesim.simulator.model.attention.recurrent import Scan

Row = dict[str, Any]
HELD_OUT_OF = 3
"""Shapes of which one stays out of the curves: with heads and sequences numbered as they were first measured,
those whose sum leaves 2 when divided by it, so that every number of heads and every length is in both
parts."""
LEAST_ERROR = 0.05
"""Least error that a curve states: other sizes of state and chunk were measured in part only."""
CONVOLUTION = (("conv/forward", 4.0), ("conv/backward", 6.0))
"""Bytes per token and channel that moesim counts. The gated norm runs at the memory bandwidth, which the H100
and H800 do not share, so that it has no curve here and reads that of other norms."""
HEAD = """\
# Written by lab/profiles/mixer_curves.py from lab/results/2026-11-22-h200-mixers.json.xz.
name: h200-mixers
accelerator: h200-sxm
also_for: [h100-sxm, h800-sxm]
software: "fla-core 0.6.0, mamba-ssm 2.3.2.post1, Triton 3.6.0, torch 2.11.0, CUDA 13.0"
description: Scans of recurrent mixers on one H200, by the heads side by side.
evidence: >-
  Measured for their own sake, with cold L2, 1 to 8 sequences of 4,096 to 32,768 tokens and 8 to 512 heads
  side by side; a third of the shapes is left out of the curves. The H100 and H800 have the same SMs with
  slower memory.
curves:
"""


def scan_of(row: Row) -> Scan:
    """The scan as the simulator counts it, for a row's heads."""
    sizes = row["sizes"]
    if row["kind"] == "gated_delta":
        return GatedDelta(key_heads=sizes[0], value_heads=sizes[1], key_dim=sizes[2], value_dim=sizes[3]).scan
    if row["kind"] == "kda":
        return KDA(heads=sizes[0], head_dim=sizes[1]).scan
    if row["kind"] == "lightning":
        return Lightning(heads=sizes[0], kv_heads=sizes[0], head_dim=sizes[1]).scan
    heads, head_dim, groups, state, chunk = sizes
    return Mamba2(heads=heads, head_dim=head_dim, groups=groups, state=state, chunk=chunk).scan


def times(row: Row) -> dict[str, tuple[float, float]]:
    """For each use, (x, y) of a row: heads side by side and TFLOP/s, or MB and GB/s."""
    tokens, micros = row["sequences"] * row["sequence"], (row["forward_us"], row["backward_us"])
    if row["kind"] == "gated_norm":
        return {}
    if row["kind"] == "conv":
        elements, both = tokens * row["sizes"][0], zip(CONVOLUTION, micros, strict=True)
        return {use: (size * elements / 1e6, size * elements / us / 1e3) for (use, size), us in both}
    scan = scan_of(row)
    side_by_side = float(row["sequences"] * scan.heads)
    flops = {"scan_forward": scan.flop, "scan_backward": 2.0 * scan.flop + scan.repeated_flop}
    return {
        f"{cls}/{row['kind']}": (side_by_side, tokens * flop / us / 1e6)
        for (cls, flop), us in zip(flops.items(), micros, strict=True)
    }


def print_curve(
    use: str, points: dict[float, list[float]], kept_out: list[tuple[float, float]]
) -> list[float]:
    """Print one curve; returns the relative errors in time of the shapes that it was not made from."""
    table = tuple((x, statistics.fmean(ys)) for x, ys in sorted(points.items()))
    curve = Curve(id=use, x_name="x", x_unit="1", y_name="y", y_unit="1", points=table, interpolation="log")
    errors = [rate / curve.at(x).value - 1.0 for x, rate in kept_out]
    sizes = sorted(abs(error) for error in errors)
    high = max(LEAST_ERROR, sizes[math.ceil(0.9 * len(sizes)) - 1])
    scan = use.startswith("scan_")
    print(f"  - id: h200-mixers.{use.removeprefix('scan_').replace('/', '.')}")
    if scan:
        print("    x_name: heads side by side\n    x_unit: '1'")
        print("    y_name: rate of the counted FLOPs\n    y_unit: TFLOP/s")
    else:
        print("    x_name: bytes read and written\n    x_unit: MB")
        print("    y_name: effective bandwidth\n    y_unit: GB/s")
    print("    interpolation: log")
    print(f"    points: [{', '.join(f'[{x:.6g}, {y:.4g}]' for x, y in table)}]")
    print(f"    used_for: [{use}]")
    print('    source: "moesim measurement (studies/mixers.py) on one H200: Triton kernels"')
    print('    kind: measured\n    date: "2026-11-22"')
    meaning = "90th percentile of the errors of the shapes left out, at least 5 %"
    print(f'    residual: {{relative: {math.ceil(100 * high) / 100:.2f}, meaning: "{meaning}"}}')
    print(
        '    conditions: {compute_sms: 132, device: H200 SXM, driver: "580.159.04", '
        'clocks: "not pinned, 1980 MHz"}'
    )
    return errors


def _number(known: list[Any], item: Any) -> int:
    """Number of an item in the order of first appearance."""
    if item not in known:
        known.append(item)
    return known.index(item)


def main() -> None:
    """Print the profile, and the errors of the shapes left out."""
    data = json.loads(packed.text(sys.argv[1]))
    points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    out: dict[str, list[tuple[float, float]]] = defaultdict(list)
    heads: dict[str, list[list[int]]] = defaultdict(list)
    lengths: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in (row for run in data["runs"] for row in run["rows"]):
        number = _number(heads[row["kind"]], row["sizes"])
        number += _number(lengths[row["kind"]], (row["sequences"], row["sequence"]))
        held_out = number % HELD_OUT_OF == 2
        for use, (x, y) in times(row).items():
            if held_out:
                out[use].append((x, y))
            else:
                points[use][x].append(y)
    print(HEAD, end="")
    every: list[float] = []
    for use in sorted(points):
        errors = print_curve(use, points[use], out[use])
        every += [abs(error) for error in errors]
        shown = ", ".join(f"{100 * error:+.1f}" for error in errors)
        print(f"{use}: {shown} %", file=sys.stderr)
    median = 100 * statistics.median(every)
    print(f"{len(every)} left out, median {median:.1f} %, largest {100 * max(every):.1f} %", file=sys.stderr)


if __name__ == "__main__":
    main()
