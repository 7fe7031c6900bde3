"""Writes hwmodels/data/calibration/h200-mixers.yaml from a run of mixers.py.

    python benchmarks/mixer_curves.py benchmarks/gpu/results/2026-11-22-h200-mixers.json > ...

Rates count the FLOPs that moesim counts for a scan (docs/model.md, eqs. C21 to C23), so that the measurement
gives the kernels' time only. x are the heads that run side by side. A third of the shapes stays out of the
curves (`HELD_OUT`); their largest error is the residual and goes to stderr.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from moesim.hwmodels.efficiency import Curve
from moesim.simulator.model.attention.gated_delta import GatedDelta
from moesim.simulator.model.attention.kda import KDA
from moesim.simulator.model.attention.lightning import Lightning
from moesim.simulator.model.attention.mamba2 import Mamba2
from moesim.simulator.model.attention.scan import Scan

Row = dict[str, Any]
HELD_OUT = {"kda": {16}, "lightning": {16, 32}, "mamba2": {32}, "gated_delta": set()}
"""Numbers of heads that stay out of the curves, by kind."""
HOST_WAIT = 0.01
"""Spread over time from which a backward waited for the host: Mamba-2 with 16 and 32 heads, whose times do
not fall with the heads."""
LEAST_ERROR = 0.1
"""Least error that a curve states: sequences side by side and other chunks were not measured."""
HEAD = """\
# Written by benchmarks/mixer_curves.py from benchmarks/gpu/results/2026-11-22-h200-mixers.json.
name: h200-mixers
accelerator: h200-sxm
also_for: [h100-sxm, h800-sxm]
software: "fla-core 0.6.0, mamba-ssm 2.3.2.post1, Triton 3.6.0, torch 2.11.0, CUDA 13.0"
description: Scans of recurrent mixers on one H200, by the heads side by side.
evidence: >-
  Measured for their own sake, with cold L2 and one sequence of 8,192 tokens, before any step was simulated
  with them; a third of the shapes is left out of the curves. Heads of several sequences are counted like
  heads of one, which was not measured. The H100 and H800 have the same SMs with slower memory.
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


def rates(row: Row) -> dict[str, float]:
    """TFLOP/s of forward and backward, without a backward that waited for the host."""
    scan, tokens = scan_of(row), row["sequences"] * row["sequence"]
    out = {"scan_forward": tokens * scan.flop / row["forward_us"] / 1e6}
    if row["backward_spread_us"] < HOST_WAIT * row["backward_us"]:
        out["scan_backward"] = tokens * (2.0 * scan.flop + scan.repeated_flop) / row["backward_us"] / 1e6
    return out


def print_curve(use: str, points: dict[int, float], kept_out: list[tuple[int, float]]) -> list[float]:
    """Print one curve; returns the relative errors in time of the shapes that it was not made from."""
    table = tuple((float(x), y) for x, y in sorted(points.items()))
    curve = Curve(id=use, x_name="x", x_unit="1", y_name="y", y_unit="1", points=table, interpolation="log")
    errors = [rate / curve.at(heads).value - 1.0 for heads, rate in kept_out]
    worst = max([LEAST_ERROR, *(abs(error) for error in errors)])
    meaning = "largest error of the shapes left out, at least 10 % for what was not measured"
    name = use.removeprefix("scan_").replace("/", ".")
    print(f"  - id: h200-mixers.{name}")
    print("    x_name: heads side by side\n    x_unit: '1'")
    print("    y_name: rate of the counted FLOPs\n    y_unit: TFLOP/s\n    interpolation: log")
    print(f"    points: [{', '.join(f'[{x:g}, {y:.4g}]' for x, y in table)}]")
    print(f"    used_for: [{use}]")
    print('    source: "moesim measurement (studies/mixers.py) on one H200: Triton kernels"')
    print('    kind: measured\n    date: "2026-11-22"')
    print(f'    residual: {{relative: {math.ceil(100 * worst) / 100:.2f}, meaning: "{meaning}"}}')
    print(
        '    conditions: {compute_sms: 132, device: H200 SXM, driver: "580.159.04", '
        'clocks: "not pinned, 1980 MHz"}'
    )
    return errors


def main() -> None:
    """Print the profile, and the errors of the shapes left out."""
    data = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    points: dict[str, dict[int, float]] = defaultdict(dict)
    out: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in (row for run in data["runs"] for row in run["rows"]):
        heads = scan_of(row).heads
        for cls, rate in rates(row).items():
            use = f"{cls}/{row['kind']}"
            if heads in HELD_OUT[row["kind"]]:
                out[use].append((heads, rate))
            else:
                points[use][heads] = rate
    print(HEAD, end="")
    every: list[float] = []
    for use in sorted(points):
        errors = print_curve(use, points[use], out[use])
        every += [abs(error) for error in errors]
        shown = ", ".join(f"{100 * error:+.1f}" for error in errors)
        print(f"{use}: {shown or 'none left out'} %", file=sys.stderr)
    median = 100 * statistics.median(every)
    print(f"{len(every)} left out, median {median:.1f} %, largest {100 * max(every):.1f} %", file=sys.stderr)


if __name__ == "__main__":
    main()
