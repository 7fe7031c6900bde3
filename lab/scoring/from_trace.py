"""Steps of traced runs, predicted with profiles from the traces of other runs and with micro-benchmarks.

    python -m lab.scoring.from_trace FOLDER [h200]

FOLDER holds the traces of `traced-runs.yaml` on H100 or, with `h200`, both ranks of our own runs (`NAME.rank0.json.gz`) and the
`train_runs.json` of their session. Every profile of one run predicts the others; a run's own is shown in brackets and no score. `shapes` knows the
trace alone, `scenario` also the scenario of the traced run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from lab import packed
from lab.scoring import own_runs

from moesim.kernels.calibrate.from_trace import TraceTable, profile_from_trace
from moesim.kernels.export import write_profile
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.operator_shapes import operators_of_run
from moesim.simulator.scenario import Scenario
from moesim.simulator.trace.parts import TracedRun, scenario_of, traced_runs
from moesim.simulator.trace import read
from moesim.simulator.trace.rates import learn
from moesim.simulator.trace.read import fingerprints


MICRO = ("q30", "l8b", "ds16")
"""Runs on H100 for whose models one H100 was calibrated."""


class Traced(NamedTuple):
    """Trace, scenario under a profile (None: its own) and measured median step (s) of a run."""

    trace: Path
    scenario: Callable[[str | None], Scenario]
    measured_s: float


def on_h100(folder: Path) -> dict[str, Traced]:
    """The three runs on two H100."""

    def scenario(run: TracedRun, profile: str | None) -> Scenario:
        return scenario_of(run, *([f"profile={profile}"] if profile else []))

    return {
        run.name: Traced(folder / run.trace, lambda profile, run=run: scenario(run, profile), run.step_s)  # type: ignore[misc]
        for run in traced_runs().runs
        if run.name in MICRO
    }


def on_h200(folder: Path, links: Path) -> dict[str, Traced]:
    """Our own runs on two H200; their medians are those of the session that recorded the traces, without the profiler."""
    found = {}
    for run in json.loads((folder / "train_runs.json").read_text())["runs"]:
        name, place = run["name"], links / run["name"]
        place.mkdir()
        for rank in (0, 1):
            (place / f"rank{rank}.json.gz").symlink_to((folder / f"{name}.rank{rank}.json.gz").resolve())

        def scenario(profile: str | None, name: str = name) -> Scenario:
            return own_runs.scenario_of(name, *([f"profile={profile}"] if profile else []))

        found[name] = Traced(place, scenario, run["median_step_s"])
    return found


def profiles(runs: dict[str, Traced], folder: Path) -> dict[str, dict[str, str | None]]:
    """Profiles by kind and by the run that they come from."""
    found: dict[str, dict[str, str | None]] = {"default": dict.fromkeys(runs)}
    for name, run in runs.items():
        if name in MICRO:
            micro = folder / f"micro-{name}.yaml"
            micro.write_text(packed.text(f"lab/results/2026-11-26-h100-operators-{name}.yaml.xz"))
            found.setdefault("micro", {})[name] = str(micro)
        trace, scenario = read(run.trace), run.scenario(None)
        files, date = fingerprints(run.trace)
        for kind, operators in (("shapes", ()), ("scenario", operators_of_run(scenario, 0))):
            lessons = learn(trace, operators)
            table = TraceTable(
                lessons.rows, lessons.facts, lessons.missing, files, date, name if operators else ""
            )
            path = folder / f"{kind}-{name}.yaml"
            write_profile(profile_from_trace(table, path.stem, base=str(scenario.profile)), path)
            found.setdefault(kind, {})[name] = str(path)
    return found


def main() -> None:
    """Print the table of step errors and the means over runs that a profile did not come from."""
    with tempfile.TemporaryDirectory() as folder:
        traces, place = Path(sys.argv[1]), Path(folder)
        runs = on_h200(traces, place) if "h200" in sys.argv[2:] else on_h100(traces)
        for kind, by_run in profiles(runs, place).items():
            scores, cells = [], []
            for target, run in runs.items():
                for source, profile in by_run.items():
                    error = predict(run.scenario(profile)).result.step.time_s / run.measured_s - 1
                    cells.append(
                        f"{source}->{target} " + (f"({error:+.1%})" if source == target else f"{error:+.1%}")
                    )
                    scores += [abs(error)] if source != target else []
            print(f"{kind}: mean {fmean(scores):.2%}; " + ", ".join(cells))


if __name__ == "__main__":
    main()
