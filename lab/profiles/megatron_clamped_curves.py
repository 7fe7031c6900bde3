"""Writes profiles h100-clamps, h200-clamps and clamps-priors from two runs of lab/studies/megatron_clamped.py.

    python -m lab.profiles.megatron_clamped_curves FOLDER

Cards that were not measured take a share of their memory bandwidth. The H200 has the SMs of the H100 with 1.43
times the bandwidth, so a piece's times on both cards say how much of it waits for memory (a + b / bandwidth).
A Blackwell card with 8 TB/s and 148 SMs at the same clock takes a * 132 / 148 + b / 8 TB/s.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import packed

from moesim.simulator.frameworks.eager import SCALED
from moesim.simulator.frameworks.operators import CLAMPED, SPLIT_BIASES

SPLIT, WIDE = (SPLIT_BIASES[how]["down"] for how in ("split", "split-wide"))
H100, H200, BLACKWELL, SMS = 3.35e12, 4.8e12, 8.0e12, 132 / 148
WIDTH, HEAD = 2880, 64
RESULT = "2026-11-26-{}-megatron-clamped.json"
HEAD_TEXT = """\
# Written by lab/profiles/megatron_clamped_curves.py.
name: {}
accelerator: {}
software: "torch 2.11.0, CUDA 13.0"
description: Megatron core's single operators around gpt-oss's attention and experts, {}.
evidence: Sums of kernel times of retyped pieces of Megatron core, alone, with a cold L2. No step was looked at.
"""


def uses(row: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Class with variant, and bytes, of a row's forward and backward."""
    wide, rows = row.get("weights") == "torch.float32", row.get("rows", 0)
    if row["piece"] == "rope":
        elements, names = row["batch"] * 4096 * row["heads"] * HEAD, ("scaled_halves", "scaled_halves_backward")
        sizes, cls = (sum(SCALED.forward), sum(SCALED.backward)), "rope"
    elif row["piece"] == "clamped" and not wide:
        own = CLAMPED["split"]
        elements, names, cls = rows * WIDTH, own.variants, "swiglu"
        sizes = sum(own.forward), sum(own.backward)
    elif row["piece"] == "biases":
        own = WIDE if wide else SPLIT
        elements, names, cls = rows * WIDTH, (own.variant, f"{own.variant}_backward"), "elementwise"
        sizes = own.forward_bytes, own.backward_bytes
    else:
        return {}
    return {d: (f"{cls}/{n}", elements * b) for d, n, b in zip(("forward", "backward"), names, sizes, strict=True)}


def seconds(data: dict[str, Any]) -> dict[str, dict[float, float]]:
    """Mean seconds by use and bytes; pieces that differ by their number of experts are one point."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in data["pieces"]:
        for direction, (use, size) in uses(row).items():
            found[use][size].append(row[direction]["us"] / 1e6)
    return {use: {x: fmean(ys) for x, ys in sorted(points.items())} for use, points in found.items()}


def curve(card: str, use: str, points: dict[float, float], driver: str) -> Iterator[str]:
    """Lines of the measured curve of one use."""
    yield f"  - id: {card}-clamps.{use.replace('/', '.')}"
    yield "    x_name: bytes read and written\n    x_unit: MB\n    y_name: effective bandwidth\n    y_unit: GB/s"
    yield f"    used_for: [{use}]\n    kind: measured\n    date: \"2026-11-26\""
    yield (
        f'    source: "moesim measurement (lab/studies/megatron_clamped.py) on one {card.upper()}: '
        f'lab/results/{RESULT.format(card)}.xz"'
    )
    yield '    residual: {relative: 0.15, meaning: "16 and 2 experts differ by 14 % at most"}'
    yield f'    conditions: {{compute_sms: 132, device: {card.upper()} SXM, driver: "{driver}", clocks: "at most 1980 MHz"}}'
    yield "    points:"
    yield from (f"      - [{x / 1e6:.6g}, {x / s / 1e9:.5g}]" for x, s in points.items())


def prior(use: str, ours: dict[float, float], more: dict[float, float]) -> Iterator[str]:
    """Lines of the share of another card's bandwidth, from the largest size."""
    size = max(ours)
    here, there = ours[size], more[size]
    memory = max(0.0, (here - there) / (1 / H100 - 1 / H200))  # bytes that wait for memory
    share = size / ((here - memory / H100) * SMS + memory / BLACKWELL) / BLACKWELL
    least, most = size / here / BLACKWELL, size / here / H100
    yield f"  - id: clamps-priors.{use.replace('/', '.')}\n    used_for: [{use}]\n    of: memory_bandwidth"
    yield f"    fraction: {share:.2f}\n    low: {least:.2f}\n    high: {most:.2f}"
    yield (
        f'    source: "h100-clamps and h200-clamps: {size / 1e6:.0f} MB take {1e6 * here:.0f} us on H100 and {1e6 * there:.0f} on '
        f"H200, so {memory / H100 / here:.0%} of H100's waits for memory; carried to 148 SMs and 8 TB/s. Low: no faster than on "
        f"H100; high: H100's share\""
    )
    yield f'    kind: derived\n    date: "2026-11-26"\n    residual: {{relative: {most / share - 1:.2f}, meaning: "low to high"}}'


def main() -> None:
    """Write the three profiles into a folder."""
    data = {card: packed.read(RESULT.format(card)) for card in ("h100", "h200")}
    times = {card: seconds(run) for card, run in data.items()}
    for card, found in times.items():
        driver = data[card]["about"]["gpu after pieces"].split(", ")[1]
        lines = [HEAD_TEXT.format(f"{card}-clamps", "any", f"measured on one {card.upper()}") + "curves:"]
        for use, points in found.items():
            lines += curve(card, use, points, driver)
        (Path(sys.argv[1]) / f"{card}-clamps.yaml").write_text("\n".join(lines) + "\n")
    lines = [HEAD_TEXT.format("clamps-priors", "any", "as shares of the memory bandwidth") + "priors:"]
    for use, points in times["h100"].items():
        lines += prior(use, points, times["h200"][use])
    (Path(sys.argv[1]) / "clamps-priors.yaml").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
