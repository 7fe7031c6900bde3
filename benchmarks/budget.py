"""The budget of a prediction's time: fails where one takes over 1.15 times the CPU of the baseline.

    python benchmarks/budget.py [--baseline COMMIT]

`benchmarks/baseline` names the commit, of which a wheel is built; who moves it writes a line in CHANGELOG.md.
Three scenarios like the home case are predicted by the compiled engine and by SimPy, every time with other
SMs, in two warm processes that take turns, one of this tree and one of the wheel. User CPU time counts, the
least of several turns, so that a busy machine delays but does not fail; what is past the limit is repeated
before it fails. Ends with exit code 1, and names what is past the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 1.15
"""Largest CPU time relative to the baseline."""

HOME = "deepseek-v3-2048xh800"
SHORT = "batch.sequences=3840"
SCENARIOS: dict[str, tuple[str, ...]] = {
    "home": (),
    "1F1B, full recompute": (SHORT, "schedule=1f1b", "recompute=full"),
    "DualPipeV, EP32": ("batch.sequences=7680", "schedule=dualpipev", "parallel.pp=8", "parallel.ep=32"),
}
"""Overrides of the home case, by name."""

ENGINES = "compiled", "simpy"
TURNS = {"compiled": (4, 20), "simpy": (1, 6)}
"""Turns of each tree at first, and at most while the ratio is past the limit."""

Key = tuple[str, str]
"""A scenario and an engine."""

Measure = Callable[[str, Key], float]
"""User CPU seconds of one prediction by a tree, `now` or `baseline`."""


def ratios(measure: Measure) -> dict[Key, tuple[float, float]]:
    """Least CPU seconds (now, baseline) of every scenario and engine.

    The trees take turns. While a ratio is past the limit, further turns follow up to the most.
    """
    least: dict[Key, tuple[float, float]] = {}
    for key in product(SCENARIOS, ENGINES):
        first, most = TURNS[key[1]]
        now = before = float("inf")
        for turn in range(most):
            if turn >= first and now <= MOST * before:
                break
            now, before = min(now, measure("now", key)), min(before, measure("baseline", key))
        least[key] = now, before
    return least


def report(least: dict[Key, tuple[float, float]]) -> tuple[str, list[str]]:
    """The table as Markdown, and a sentence on each ratio past the limit."""
    lines = ["| scenario | engine | CPU now | CPU of the baseline | ratio |", "|---|---|---|---|---|"]
    past = []
    for (name, engine), (now, before) in least.items():
        lines.append(
            f"| {name} | {engine} | {1e3 * now:.0f} ms | {1e3 * before:.0f} ms | {now / before:.2f} |"
        )
        if now > MOST * before:
            past.append(
                f"{name} by {engine} takes {now / before:.2f} times the CPU of the baseline, past {MOST}: "
                "make it faster, or move benchmarks/baseline with a line in CHANGELOG.md that says why"
            )
    for name in SCENARIOS:
        compiled, simpy = (least[name, engine][0] for engine in ENGINES)
        lines.append(f"{name}: SimPy takes {simpy / compiled:.1f} times the CPU of the compiled engine")
        if simpy * MOST < compiled:
            past.append(f"{name}: the compiled engine takes {compiled / simpy:.2f} times the CPU of SimPy")
    return "\n".join(lines), past


# -- processes ---------------------------------------------------------------------------------------


def predict_on_demand() -> None:
    """Be the process of a tree: predict what each line of the input names, and print its user CPU seconds."""
    from moesim.simulator.predict.driver import predict
    from moesim.simulator.scenario import load_scenario

    bases = {name: load_scenario(HOME, list(changes)) for name, changes in SCENARIOS.items()}
    sms = dict.fromkeys(product(SCENARIOS, ENGINES), 8)
    for line in sys.stdin:
        name, engine = json.loads(line)
        first = sms[name, engine] == 8  # SimPy comes second, and finds the prices of the scenario
        for _ in range(3 if first and engine == "compiled" else 1):
            sms[name, engine] += 1
            changed = bases[name].replace(communication={"sms": sms[name, engine]})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            predict(changed, engine=engine)
            took = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
        print(json.dumps(took), flush=True)


def wheel_of(commit: str, folder: Path) -> Path:
    """Build the wheel of a commit, unpack it and return where.

    Raises SystemExit if git lacks the commit, without an error in a shallow clone.
    """
    tree, built, unpacked = folder / "tree", folder / "wheel", folder / "moesim"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        shallow = subprocess.run(
            ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        if shallow.stdout.strip() == b"true":
            print(f"budget: not measured, because this clone is shallow and lacks the baseline {commit}")
            raise SystemExit(0)
        raise SystemExit(f"benchmarks/baseline: git has no commit {commit}; git fetch origin {commit}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    pip = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(built), str(tree)], check=True)
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(unpacked)
    return unpacked


def main() -> None:
    """Measure both trees and print the table, or be one of their processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", help="Another commit than that of benchmarks/baseline.")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        predict_on_demand()
        return
    commit = options.baseline or (ROOT / "benchmarks" / "baseline").read_text().split()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for tree, path in (("now", ROOT / "src"), ("baseline", wheel_of(commit, folder))):
            env = {**os.environ, "PYTHONPATH": str(path), "MOESIM_CACHE": "off"}
            command = [sys.executable, "-P", __file__, "--child"]
            processes[tree] = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=folder
                )
            )

        def measure(tree: str, key: Key) -> float:
            process = processes[tree]
            assert process.stdin is not None, "a pipe"
            assert process.stdout is not None, "a pipe"
            process.stdin.write(json.dumps(key) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"budget: the process of {tree} ended; its message is above")
            return float(answer)

        text, past = report(ratios(measure))
    print(f"baseline {commit[:8]}\n\n{text}")
    if past:
        raise SystemExit("\n".join(past))


if __name__ == "__main__":
    main()
