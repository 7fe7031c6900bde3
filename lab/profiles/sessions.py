"""What calibrations of one kind of machine have in common: variance between sessions and within.

    python -m lab.profiles.sessions h200-1gpu h200-2gpu h200-4gpu h200-8gpu old/h200-1gpu.yaml ...

Profiles by name or path, the reference last. For tensor-core-bound and for memory-bound entries: deviation of
a session's mean (over entries, logarithms, at the shapes that the reference has), and the variance
components of a two-way layout of sessions and entries. docs/decisions/0024 used the four shipped profiles
of H200 and those of 1, 2 and 4 GPUs at commit 8e5f55d (`git show 8e5f55d:hwmodels/data/calibration/...`).
"""

from __future__ import annotations

import math
import sys
from statistics import fmean, stdev

from moesim.hwmodels.calibration import Entry, load_profile
from moesim.hwmodels.drift import changes

GROUPS = {
    "bound by tensor cores": (
        "gemm_bf16", "gemm_fp8", "grouped_gemm_fp8", "attention_forward", "attention_backward"
    ),
    "bound by memory": ("copy", "cast", "copy.local.sm_rate", "quantise.sm_rate"),
}  # fmt: skip


def entries(name: str) -> dict[str, Entry]:
    """Entries of a profile by id, without the profile's own name in it."""
    profile = load_profile(name)
    return {e.id.removeprefix(f"{profile.name}."): e for e in profile.entries()}


def main(names: list[str]) -> None:
    """Print one line a session and the components a group."""
    found = {name: entries(name) for name in names}
    reference = found[names[-1]]
    for group, ids in GROUPS.items():
        logs = {
            name: [
                fmean(math.log1p(c) for c in changes(reference[i], have[i]).values())
                if name != names[-1]
                else 0.0
                for i in ids
            ]
            for name, have in found.items()
        }
        middle = [fmean(row[i] for row in logs.values()) for i in range(len(ids))]
        off = {name: [v - m for v, m in zip(row, middle, strict=True)] for name, row in logs.items()}
        means = {name: fmean(row) for name, row in off.items()}
        n, k = len(names), len(ids)
        within = sum((v - means[name]) ** 2 for name, row in off.items() for v in row) / ((n - 1) * (k - 1))
        between = k * sum(m * m for m in means.values()) / (n - 1)
        print(group)
        for name, mean in means.items():
            print(f"  {name:40s} {mean:+.2%}")
        print(
            f"  deviation of a session's mean {stdev(means.values()):.2%}; between sessions "
            f"{math.sqrt(max(0.0, (between - within) / k)):.2%}, within {math.sqrt(within):.2%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
