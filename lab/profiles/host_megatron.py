"""Entries of a host's file from Megatron core's measured layers.

    python -m lab.profiles.host_megatron lab/results/2026-11-22-h200-host-megatron.json.xz

The file holds the results of `lab/studies/host_megatron.py` on one and on two GPUs. The own
Python of a layer of Megatron core is its measured time without the calls that the model counts for it, at the
times of PyTorch's calls inside a block. Permutations, the choice of experts, exchanges and the reading of
counts are counted apart and taken out of a routed layer.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from lab import packed
from moesim.hwmodels.host import CallKind, load_host

HOST = "emerald-rapids-vm"
SIDES = ("forward", "backward")
ENGINE_US = 80.0
"""Start of a backward by itself, which the backward of a single stage holds and a layer's does not."""
Counts = dict[CallKind, tuple[float, float]]
HALF: Counts = {"product": (2, 2), "attention": (1, 1), "norm": (2, 2), "pointwise": (3, 4)}
DENSE: Counts = {**HALF, "product": (4, 4), "pointwise": (4, 5)}
"""Calls of the measured dense layer by pass: four products, two norms, residuals, activation."""
EXPERTS: Counts = {"grouped product": (2, 2), "pointwise": (1, 1)}
EXCHANGE: Counts = {"counts": (1, 0), "collective": (2, 2)}
GATE: Counts = {"product": (1, 1)}


def calls_us(*parts: Counts) -> tuple[float, float]:
    """Microseconds of counted calls inside a block, forward and backward."""
    host = load_host(HOST)
    found = [
        [counts[side] * host.call_s(kind, side == 0) for part in parts for kind, counts in part.items()]
        for side in (0, 1)
    ]
    return sum(found[0]) * 1e6, sum(found[1]) * 1e6


def minus(a: tuple[float, ...], *others: tuple[float, ...]) -> tuple[float, float]:
    """Difference by side."""
    return a[0] - sum(o[0] for o in others), a[1] - sum(o[1] for o in others)


def stage(stages: dict[str, Any], name: str, times: int = 1) -> tuple[float, float]:
    """Microseconds of a stage, forward and backward; the backward without the start of the engine."""
    forward, backward = (stages[name][side]["us"] for side in SIDES)
    return times * forward, times * max(0.0, backward - ENGINE_US)


def block(runs: list[dict[str, Any]], case: str, plain: str) -> tuple[float, float]:
    """Mean microseconds of a layer; its forward was measured twice in every run."""
    forward = [run["blocks"][case]["forward_us"] for run in runs]
    forward += [run["parts"][plain]["base"] for run in runs]
    return statistics.fmean(forward), statistics.fmean(run["blocks"][case]["backward_us"] for run in runs)


def hook_us(runs: list[dict[str, Any]]) -> list[float]:
    """Microseconds that gradient buckets add to a backward before the last, for each parameter."""
    found = []
    for run in runs:
        rows = run["parts"]["gradient hooks"]
        bare = rows["bare"]["backward"]["us"]
        for name, row in rows.items():
            if name.endswith("earlier micro-batch"):
                found.append((row["backward"]["us"] - bare) / row["parameters"])
    return found


def main() -> None:
    """Print the entries."""
    results = json.loads(packed.text(sys.argv[1]))
    one, two = results["one"], results["two"]
    dense = block([one, two], "dense", "plain, dense")
    routed = block([two], "32 experts, aux none", "plain, routed")
    layer = minus(dense, calls_us(DENSE))
    apart = one["parts"]["stages 128 experts, aux none"]
    router = minus(stage(apart, "router"), stage(apart, "inside: top-k"), calls_us(GATE))
    stages = two["parts"]["stages 32 experts, aux aux_loss"]
    inside = [
        stage(stages, f"inside: {name}", n) for name, n in (("permute", 1), ("unpermute", 1), ("sort", 2))
    ]
    choice = stage(apart, "inside: top-k")
    dispatcher = minus(routed, layer, calls_us(HALF, EXPERTS, EXCHANGE, GATE), choice, router, *inside)
    hooks = hook_us([one, two])
    schedule = [
        run["parts"]["schedule"][f"{kind}, schedule, micro-batch_us"]
        - run["parts"]["schedule"][f"{kind}, direct, micro-batch_us"]
        for run in (one, two)
        for kind in ("dense", "routed")
    ]
    measured = {"dense": dense, "routed": routed, "layer": layer, "router": router, "dispatcher": dispatcher}
    for name, pair in measured.items():
        print(name, [round(us) for us in pair])
    print("parameter", round(statistics.median(hooks)), [round(us) for us in sorted(hooks)])
    print("micro-batch, both passes", round(statistics.median(schedule)), [round(us) for us in schedule])


if __name__ == "__main__":
    main()
