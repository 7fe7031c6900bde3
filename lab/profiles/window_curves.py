"""Writes hwmodels/data/calibration/h200-windowed-attention.yaml from a run of windowed_attention.py.

    python -m lab.profiles.window_curves lab/results/2026-11-22-h200-windowed-attention.json.xz > ...

Rates count what moesim counts: the keys that a query attends to on average, five products backward. The
backward is the core kernel alone: the whole time less the two kernels around it, at the bandwidth of a copy.
A third of the shapes stays out of the curves (`held_out`); their errors are the residuals and go to stderr.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from typing import Any, NamedTuple

from lab import packed

from moesim.hwmodels.calibration_entry import Curve
from moesim.simulator.model.attention.softmax import Reach

COPY_BYTES_PER_S = 0.81 * 4.8e12
"""Bandwidth of the kernels before and after the backward core, as profile h200-measured prices them."""
KERNELS = {
    "cudnn": "cuDNN 9.19 through cudnn-frontend 1.17, as Transformer Engine calls it",
    "flex": "torch 2.11.0 flex_attention, compiled",
}
HEAD = """\
# Written by lab/profiles/window_curves.py from lab/results/2026-11-22-h200-windowed-attention.json.xz.
name: h200-windowed-attention
accelerator: h200-sxm
also_for: [h100-sxm, h800-sxm]
software: "cuDNN 9.19, torch 2.11.0, CUDA 13.0"
description: Core attention with sliding windows, narrow or wide heads, or as flex_attention, on one H200.
evidence: >-
  Measured for their own sake, with cold L2, before any step was simulated with them; a third of the shapes is
  left out of the curves and gives their residuals. The H100 and H800 have the same SMs with slower memory;
  these kernels are bound by SMs at every window from 128 tokens.
curves:
"""
Row = dict[str, Any]


class Use(NamedTuple):
    """A curve: `attention_forward` or `_backward`, and its variant."""

    cls: str
    variant: str


def held_out(row: Row) -> bool:
    """Whether a shape stays out of the curves: one window of four, one length of four, and plain MHA."""
    plain = row["heads"] == row["kv_heads"] or row["sinks"] or row["reach"] == "chunk"
    return bool(plain or row["size"] == 512 or (row["reach"] == "full" and row["sequence"] == 16384))


def variant(row: Row) -> str:
    """Variant of the core kernels, as `moesim.simulator.model.attention.softmax` names it."""
    parts = ("flex" if row["part"] == "flex" else "", "window" if row["reach"] == "window" else "")
    width = {64: "64", 256: "256"}.get(row["dim"], "")
    return "_".join(part for part in (*parts, width) if part)


def rates(row: Row) -> dict[str, float]:
    """TFLOP/s of the forward and of the backward core."""
    reach = Reach(row["reach"], row["size"])
    queries = row["batch"] * row["sequence"] * row["heads"]
    forward = 4.0 * queries * reach.mean_keys(row["sequence"]) * row["dim"]
    # The simulator has operators of their own for the kernels around the backward and for flex's sinks.
    around, sinks = (queries * row["dim"] * n / COPY_BYTES_PER_S * 1e6 for n in (14.0, 2.0 * row["sinks"]))
    around += sinks
    return {
        "attention_forward": forward / (row["forward"]["us"] - 2.0 * sinks) / 1e6,
        "attention_backward": 2.5 * forward / (row["backward"]["us"] - around) / 1e6,
    }


def x_of(row: Row) -> float:
    """Where the simulator reads the curve: the window or chunk, or the sequence."""
    return float(Reach(row["reach"], row["size"]).widest(row["sequence"]))


def print_curve(use: Use, points: dict[float, list[float]], kept_out: list[tuple[Row, float]]) -> list[float]:
    """Print one curve; returns the relative errors of the shapes that it was not made from."""
    window = "window" in use.variant
    table = [(x, statistics.fmean(ys)) for x, ys in sorted(points.items())]
    name = use.cls.removeprefix("attention_") + (f".{use.variant}" if use.variant else "")
    curve = Curve(
        id=name,
        x_name="x",
        x_unit="1",
        y_name="y",
        y_unit="1",
        points=tuple(table),
        interpolation="log",
    )
    errors = [curve.at(x_of(row)).value / rate - 1.0 for row, rate in kept_out]
    worst = max((abs(error) for error in errors), default=0.05)
    part = "flex" if use.variant.startswith("flex") else "cudnn"
    share = "causal forward rate" if "forward" in use.cls else "causal backward core rate (five products)"
    print(f"  - id: h200-windowed-attention.{name}")
    print(f"    x_name: {'window' if window else 'sequence'}\n    x_unit: tokens")
    print(f"    y_name: {share}\n    y_unit: TFLOP/s\n    interpolation: log")
    print(f"    points: [{', '.join(f'[{x:g}, {y:.4g}]' for x, y in table)}]")
    print(f"    used_for: [{use.cls}/{use.variant}]")
    print(f'    source: "moesim measurement (studies/windowed_attention.py) on one H200: {KERNELS[part]}"')
    print('    kind: measured\n    date: "2026-11-22"')
    meaning = "largest error of the shapes left out of the curve"
    print(f'    residual: {{relative: {max(0.03, math.ceil(100 * worst) / 100):.2f}, meaning: "{meaning}"}}')
    print(
        '    conditions: {compute_sms: 132, device: H200 SXM, driver: "580.159.04", clocks: "not pinned, '
        '1620 to 1980 MHz"}'
    )
    return errors


def main() -> None:
    """Print the profile, and the errors of the shapes left out."""
    data = json.loads(packed.text(sys.argv[1]))
    rows = [r for r in data["rows"] if r["part"] in KERNELS and "error" not in r and r["sequence"] > 1024]
    points: dict[Use, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    out: dict[Use, list[tuple[Row, float]]] = defaultdict(list)
    for row in rows:
        for cls, rate in rates(row).items():
            use = Use(cls, variant(row))
            if not use.variant:  # full-length flash attention has curves in every profile
                continue
            if held_out(row):
                out[use].append((row, rate))
            else:
                points[use][x_of(row)].append(rate)
    print(HEAD, end="")
    every = {"cudnn": list[float](), "flex": list[float]()}
    for use in sorted(points):
        errors = print_curve(use, points[use], out[use])
        every["flex" if use.variant.startswith("flex") else "cudnn"] += errors
        shown = ", ".join(f"{100 * error:+.1f}" for error in errors)
        print(f"{use.cls}/{use.variant}: {shown or 'none left out'} %", file=sys.stderr)
    for part, errors in every.items():
        sizes = sorted(abs(e) for e in errors)
        print(
            f"{part}: {len(sizes)} readings left out, median {100 * statistics.median(sizes):.1f} %, "
            f"largest {100 * sizes[-1]:.1f} %",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
