"""Writes hwmodels/data/calibration/h200-eager.yaml from a run of host_launch.py.

    python -m lab.profiles.eager_curves lab/results/2026-11-20-h200-host-launch.json.xz > ...

x of a curve are the bytes that `moesim.simulator.frameworks.eager` counts for an operator, y those over the
GPU time of the PyTorch operators it stands for.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lab import packed

from moesim.simulator.frameworks.eager import GATE_BACKWARD_CALLS, GATE_FORWARD_CALLS, ROW_BYTES

GAP_US = 1.93
"""Launch gap of the profile, which the prediction adds for every kernel of a chain."""
Row = dict[str, Any]


def forward(row: Row, *names: str) -> float:
    """Microseconds of the forwards of some pieces."""
    return sum(float(row[name]["forward_us"]) for name in names)


def backward(row: Row, *names: str) -> float:
    """Microseconds of the backwards of some pieces."""
    return sum(float(row[name]["backward_us"]) for name in names)


def routed(row: Row) -> float:
    """Elements of all routed rows."""
    return float(row["tokens"] * row["top_k"] * row["hidden"])


def tokens(row: Row) -> float:
    """Elements of all tokens."""
    return float(row["tokens"] * row["hidden"])


def scores(row: Row) -> float:
    """Elements of the router's scores."""
    return float(row["tokens"] * row["experts"])


def wide(row: Row) -> float:
    """Elements of the experts' width."""
    return float(row["tokens"] * row["top_k"] * row["silu_mul"]["width"])


BACK = ("scatter from groups", "scatter to tokens", "weighted sum")
OUT = ("gather rows of tokens", "append a row", "gather into groups")
CURVES: dict[str, tuple[str, Callable[[Row], float], Callable[[Row], float]]] = {
    "permute.expand": (
        "permute/eager_expand",
        lambda r: ROW_BYTES["experts.expand"] * routed(r),
        lambda r: forward(r, *OUT),
    ),
    "permute.reduce": (
        "permute/eager_reduce",
        lambda r: ROW_BYTES["experts.reduce"] * routed(r),
        lambda r: forward(r, *BACK),
    ),
    "permute.expand_gradient": (
        "permute/eager_expand_gradient",
        lambda r: ROW_BYTES["experts.expand_gradient"] * routed(r),
        lambda r: backward(r, *BACK),
    ),
    "permute.reduce_gradient": (
        "permute/eager_reduce_gradient",
        lambda r: ROW_BYTES["experts.reduce_gradient"] * routed(r),
        lambda r: backward(r, *OUT),
    ),
    "swiglu.forward": ("swiglu/eager_forward", lambda r: 10.0 * wide(r), lambda r: forward(r, "silu_mul")),
    "swiglu.backward": ("swiglu/eager_backward", lambda r: 18.0 * wide(r), lambda r: backward(r, "silu_mul")),
    "norm.forward": ("norm/eager_forward", lambda r: 4.0 * tokens(r), lambda r: forward(r, "rms_norm")),
    "norm.forward_add": (
        "norm/eager_forward_add",
        lambda r: 8.0 * tokens(r),
        lambda r: forward(r, "rms_norm", "add"),
    ),
    "norm.backward": ("norm/eager_backward", lambda r: 6.0 * tokens(r), lambda r: backward(r, "rms_norm")),
    "rope": (
        "rope/eager",
        lambda r: 20.0 * r["tokens"] * r["rope_complex"]["width"],
        lambda r: forward(r, "rope_complex"),
    ),
    "topk.forward": (
        "topk/eager_forward",
        lambda r: 48.0 * scores(r),
        lambda r: forward(r, "gate", "argsort") - GATE_FORWARD_CALLS * GAP_US,
    ),
    "topk.backward": (
        "topk/eager_backward",
        lambda r: 64.0 * scores(r),
        lambda r: backward(r, "gate") - GATE_BACKWARD_CALLS * GAP_US,
    ),
}
HEAD = """\
# Written by lab/profiles/eager_curves.py from lab/results/2026-11-20-h200-host-launch.json.xz.
name: h200-eager
accelerator: h200-sxm
also_for: [h100-sxm]
software: "torch 2.11.0, CUDA 13.0"
description: PyTorch's separate operators in a layer with experts, on one H200; for software.kernels eager.
evidence: >-
  GPU time of routing, permutes of routed rows, SwiGLU, norms and rotary embedding as torchtitan 0.2.2 writes
  them, each piece alone with cold L2. The bytes are those that moesim counts for the operator. Measured for
  this purpose before any step was simulated with them.
include: [h200-clamped-experts, h200-heads]
curves:
"""


def pooled(found: dict[float, list[float]]) -> list[tuple[float, float]]:
    """(bytes, microseconds) by size; neighbours whose times would fall become one point, their means."""
    groups: list[list[tuple[float, float]]] = []
    for x, times in sorted(found.items()):
        groups.append([(x, sum(times) / len(times))])
        while len(groups) > 1 and mean(groups[-1], 1) <= mean(groups[-2], 1):
            last = groups.pop()
            groups[-1] += last
    return [(mean(group, 0), mean(group, 1)) for group in groups]


def mean(points: list[tuple[float, float]], part: int) -> float:
    """Mean of one coordinate."""
    return sum(point[part] for point in points) / len(points)


def main() -> None:
    """Print the profile."""
    data = json.loads(packed.text(sys.argv[1]))
    print(HEAD, end="")
    for name, (use, size, micros_of) in CURVES.items():
        found: dict[float, list[float]] = defaultdict(list)
        for row in data["kernels"]:
            found[size(row)].append(micros_of(row))
        print(f"  - id: h200-eager.{name}")
        print("    x_name: bytes read and written\n    x_unit: MB")
        print("    y_name: effective bandwidth\n    y_unit: GB/s")
        print(f"    used_for: [{use}]")
        print(
            '    source: "moesim benchmarks/gpu/host_launch.py on one H200, driver 580.159.04, torch 2.11.0"'
        )
        print('    kind: measured\n    date: "2026-11-20"')
        spread = 0.17 if name.startswith("permute") else 0.08
        print(f'    residual: {{relative: {spread}, meaning: "spread between hidden sizes at like bytes"}}')
        print(
            '    conditions: {compute_sms: 132, device: H200 SXM, driver: "580.159.04", clocks: not pinned}'
        )
        print("    points:")
        for x, micros in pooled(found):
            print(f"      - [{x / 1e6:.6g}, {x / 1e9 / (micros * 1e-6):.5g}]")


if __name__ == "__main__":
    main()
