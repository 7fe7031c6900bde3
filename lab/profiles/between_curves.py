"""Writes the profiles h200-between, h100-between and h100-optimizer from a run of the study between_gemms.py.

    python -m lab.profiles.between_curves lab/results/2026-11-22-h200-between-gemms.json.xz h200 > ...
    python -m lab.profiles.between_curves ... h100 > h100-between.yaml
    python -m lab.profiles.between_curves ... h100 optimizer > h100-optimizer.yaml

h100-between includes h100-optimizer, which profiles with rates of their own between GEMMs include alone.

x of a curve are the bytes that moesim counts for an operator, y those over the GPU time of the kernels that
it stands for, with a cold L2. On H100 and H800, kernels that reach half of an H200's nominal memory bandwidth
keep their share of the bandwidth; slower ones are bound by instructions and keep their rate.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lab import packed

NOMINAL = {"h200": 4.8e12, "h100": 3.35e12}
MEMORY_BOUND = 0.5
Row = dict[str, Any]
Reading = tuple[float, float]
"""Bytes as moesim counts them, and microseconds."""


def rows_of(rows: list[Row], name: str, **sizes: Any) -> list[Row]:
    """Eager rows of a name whose sizes are as given."""
    chosen = [row for row in rows if row["name"] == name and not row["compiled"]]
    return [row for row in chosen if all(row.get(key) == value for key, value in sizes.items())]


def plain(name: str, **sizes: Any) -> Callable[[list[Row]], list[Reading]]:
    """Forwards of a piece with their own bytes."""
    return lambda rows: [(r["forward_bytes"], r["forward_us"]) for r in rows_of(rows, name, **sizes)]


def packing(rows: list[Row]) -> list[Reading]:
    """Packing of gradients to FP32, whose kernel takes as long for one member as the host allows."""
    found = rows_of(rows, "fsdp packing of gradients to fp32")
    return [(r["forward_bytes"], r["forward_us"]) for r in found if r["shards"] > 1]


def casts(name: str) -> Callable[[list[Row]], list[Reading]]:
    """Casts of hidden states, and of logits to FP32."""
    more = plain("logits to fp32") if name == "cast to fp32" else (lambda rows: [])
    return lambda rows: [*plain(name)(rows), *more(rows)]


def loss(name: str, backward: bool, bytes_a_logit: float) -> Callable[[list[Row]], list[Reading]]:
    """A loss without the casts of its logits, which are operators of their own."""

    def readings(rows: list[Row]) -> list[Reading]:
        cast = rows_of(rows, "cast to bf16")[-1] if backward else rows_of(rows, "logits to fp32")[0]
        cast_us = cast["forward_us"] / cast["forward_bytes"] * 6.0
        found = []
        for row in rows_of(rows, name):
            logits = row["forward_bytes"] / 2.0
            took = row["backward_us" if backward else "forward_us"]
            found.append((bytes_a_logit * logits, took - cast_us * logits))
        return found

    return readings


CURVES: dict[str, tuple[str, Callable[[list[Row]], list[Reading]]]] = {
    "widen": ("copy/widen", casts("cast to fp32")),
    "narrow": ("copy/narrow", casts("cast to bf16")),
    "pack": ("copy/pack", packing),
    "add_widened": ("copy/add_widened", plain("fp32 gradient += bf16")),
    "loss.eager_forward": ("loss/eager_forward", loss("loss eager", False, 12.0)),
    "loss.eager_backward": ("loss/eager_backward", loss("loss eager", True, 16.0)),
    "loss.chain_forward": ("loss/chain_forward", loss("loss of a part of the vocabulary", False, 32.0)),
    "loss.chain_backward": ("loss/chain_backward", loss("loss of a part of the vocabulary", True, 8.0)),
    "residual": ("elementwise/add", plain("residual add")),
    "optimizer.norm": ("optimizer/norm", plain("global norm")),
    "optimizer.adamw": ("optimizer/adamw", plain("adamw fused fp32")),
}
RESULT = "benchmarks/gpu/results/2026-11-22-h200-between-gemms.json"
HEAD = """\
# Written by lab/profiles/between_curves.py from lab/results/2026-11-22-h200-between-gemms.json.xz.
name: {gpu}-between
accelerator: any
software: "torch 2.11.0, CUDA 13.0, driver 580.159.04"
description: PyTorch's kernels between GEMMs and at the end of a step, {where} (part of others).
evidence: >-
  GPU time of single pieces with a cold L2 (kernels/calibrate/studies/between_gemms.py): casts, FSDP2's
  packing, additions into FP32 gradients, the loss as PyTorch and as Megatron-LM's vocabulary-parallel one,
  residuals, norm of the gradients and fused AdamW in FP32. Shapes are neighbours of those of the scoreboard.
  No step was looked at.
{include}curves:
"""
OPTIMIZER_HEAD = """\
# Written by lab/profiles/between_curves.py from lab/results/2026-11-22-h200-between-gemms.json.xz.
name: {gpu}-optimizer
accelerator: any
software: "torch 2.11.0, CUDA 13.0, driver 580.159.04"
description: PyTorch's kernels of the optimizer, {where} (part of others).
evidence: >-
  GPU time of single pieces with a cold L2 (kernels/calibrate/studies/between_gemms.py): norm of the gradients
  and fused AdamW in FP32. No step was looked at.
curves:
"""
PART = "optimizer"


def pooled(found: dict[float, list[float]]) -> list[Reading]:
    """(bytes, microseconds) by size; neighbours whose times would fall become one point, their means."""
    groups: list[list[Reading]] = []
    for x, times in sorted(found.items()):
        groups.append([(x, sum(times) / len(times))])
        while len(groups) > 1 and _mean(groups[-1], 1) <= _mean(groups[-2], 1):
            last = groups.pop()
            groups[-1] += last
    return [(_mean(group, 0), _mean(group, 1)) for group in groups]


def _mean(points: list[Reading], part: int) -> float:
    return sum(point[part] for point in points) / len(points)


def carried(points: list[Reading], gpu: str) -> float:
    """Rate of a curve's kernels on another GPU over that on an H200."""
    best = max(x / micros * 1e6 for x, micros in points)
    return NOMINAL[gpu] / NOMINAL["h200"] if best > MEMORY_BOUND * NOMINAL["h200"] else 1.0


def main() -> None:
    """Print a profile."""
    data, gpu, part = json.loads(packed.text(sys.argv[1])), sys.argv[2], sys.argv[3:] == [PART]
    own = gpu == "h200"
    where = "on one H200" if own else "carried to H100 and H800"
    include = "" if own else f"include: [{gpu}-{PART}]\n"
    print((OPTIMIZER_HEAD if part else HEAD).format(gpu=gpu, where=where, include=include), end="")
    for name, (use, readings) in CURVES.items():
        if not own and name.startswith(PART) != part:
            continue
        found: dict[float, list[float]] = defaultdict(list)
        for size, micros in readings(data["rows"]):
            found[size].append(micros)
        print(f"  - id: {gpu}-between.{name}")
        print("    x_name: bytes read and written\n    x_unit: MB")
        print("    y_name: effective bandwidth\n    y_unit: GB/s")
        print(f"    used_for: [{use}]")
        print(f'    source: "moesim measurement on one H200: {RESULT}"')
        print(f'    kind: {"measured" if own else "derived"}\n    date: "2026-11-22"')
        error = 0.05 if own else 0.1
        meaning = "spread between shapes at like bytes" + ("" if own else ", and 5 to 10 % for the transfer")
        print(f'    residual: {{relative: {error}, meaning: "{meaning}"}}')
        print(
            '    conditions: {compute_sms: 132, device: H200 SXM, driver: "580.159.04", clocks: not pinned}'
        )
        print("    points:")
        points = pooled(found)
        for x, micros in points:
            print(f"      - [{x / 1e6:.6g}, {x / micros * carried(points, gpu) / 1e3:.5g}]")


if __name__ == "__main__":
    main()
