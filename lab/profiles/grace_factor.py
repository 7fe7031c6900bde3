"""Factor of the host `grace-gb200` from the steps of Megatron-LM's own functional tests on GB200 and H100.

Their models (12 layers of 512, mostly) are so small that the host decides the step: GB200, the faster GPU,
takes longer. A pair counts where one commit renewed the step times of a test on both machines, so that
container and code are the same, and where the H100's step is below 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

from moesim.hwmodels.host import load_host

CASES = "tests/functional_tests/test_cases/*/*/golden_values_dev_dgx_{}*.json"
MACHINES = "gb200", "h100"
LONGEST_S = 0.5
WARM_UP = 2


def git(repository: Path, *arguments: str) -> str:
    """What a git command prints; empty where it fails, as for a file that a commit does not have."""
    done = subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def steps(repository: Path, revision: str, file: str) -> list[float]:
    """Step times of a test in seconds at a revision; empty without any."""
    text = git(repository, "show", f"{revision}:{file}")
    series = json.loads(text).get("iteration-time") if text else None
    values = series.get("values", {}) if isinstance(series, dict) else {}
    return [float(value) for value in values.values() if math.isfinite(float(value))]


def pairs(repository: Path) -> list[tuple[str, str, str, float, float]]:
    """(commit, date, test, step on GB200, on H100) wherever one commit renewed both."""
    log = git(repository, "log", "--format=@%h %cs", "--name-only", "--", *map(CASES.format, MACHINES))
    found = []
    for entry in log.split("@")[1:]:
        head, *files = entry.split("\n")
        commit, date = head.split()
        for file in (name for name in files if "dgx_gb200" in name):
            both = [file, file.replace(*MACHINES)]
            new = [steps(repository, commit, name) for name in both]
            old = [steps(repository, f"{commit}^", name) for name in both]
            if both[1] in files and all(new) and all(a != b for a, b in zip(new, old, strict=True)):
                times = [median(s[WARM_UP:] or s) for s in new]
                found.append((commit, date, file.split("test_cases/")[1], times[0], times[1]))
    return found


def factor(ratios: list[float]) -> tuple[float, float, float]:
    """(value, low, high): the median ratio times the Xeon's factor, ranges joined as independent."""
    xeon = load_host("xeon-8480c").factor
    assert xeon is not None and xeon.between is not None
    tenths = quantiles(ratios, n=10)
    middle = median(ratios)
    value = middle * xeon.value
    low, high = (
        math.hypot(math.log(end / middle), math.log(other / xeon.value))
        for end, other in zip((tenths[0], tenths[-1]), xeon.between, strict=True)
    )
    return value, value * math.exp(-low), value * math.exp(high)


def main() -> None:
    """Write the pairs and print the factor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path, help="a clone of NVIDIA/Megatron-LM, bare or not")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = [pair for pair in pairs(options.repository) if pair[-1] < LONGEST_S]
    ratios = [gb200 / h100 for *_, gb200, h100 in found]
    value, low, high = factor(ratios)
    tenths = quantiles(ratios, n=10)
    said = {"pairs": len(found), "ratio": median(ratios), "tenths": [tenths[0], tenths[-1]]}
    said |= {"factor": value, "between": [low, high]}
    options.out.write_text(json.dumps({**said, "steps_s": found}, indent=0) + "\n")
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main()
