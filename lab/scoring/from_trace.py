"""Steps of traced runs, predicted with profiles from the traces of other runs and with micro-benchmarks.

    python -m lab.scoring.from_trace FOLDER

FOLDER holds the traces of `traced_parts.RUNS`. Every profile of one run predicts the others; a run's own is shown in brackets
and no score. `shapes` knows the trace alone, `scenario` also the scenario of the traced run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean

from lab import packed
from lab.scoring.traced_parts import HERE, RUNS

from moesim.kernels.calibrate.from_trace import TraceTable, profile_from_trace
from moesim.kernels.export import write_profile
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.operator_shapes import operators_of_run
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trace import read
from moesim.simulator.trace.rates import learn
from moesim.simulator.trace.read import fingerprints


def profiles(traces: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Profiles by kind and by the run that they come from."""
    found: dict[str, dict[str, str]] = {"default": dict.fromkeys(RUNS, "h100-from-h200")}
    for name, (file, *_) in RUNS.items():
        micro = folder / f"micro-{name}.yaml"
        micro.write_text(packed.text(f"lab/results/2026-11-26-h100-operators-{name}.yaml.xz"))
        found.setdefault("micro", {})[name] = str(micro)
        trace, scenario = read(traces / file), load_scenario(str(HERE / f"{name}.yaml"))
        files, date = fingerprints(traces / file)
        for kind, operators in (("shapes", ()), ("scenario", operators_of_run(scenario, 0))):
            lessons = learn(trace, operators)
            table = TraceTable(lessons.rows, lessons.facts, lessons.missing, files, date, name if operators else "")
            path = folder / f"{kind}-{name}.yaml"
            write_profile(profile_from_trace(table, path.stem, base=scenario.profile), path)
            found.setdefault(kind, {})[name] = str(path)
    return found


def main() -> None:
    """Print the table of step errors and the means over runs that a profile did not come from."""
    with tempfile.TemporaryDirectory() as folder:
        for kind, by_run in profiles(Path(sys.argv[1]), Path(folder)).items():
            scores, cells = [], []
            for target, (*_, measured_s) in RUNS.items():
                for source, profile in by_run.items():
                    scenario = load_scenario(str(HERE / f"{target}.yaml"), [f"profile={profile}"])
                    error = predict(scenario).result.step.time_s / measured_s - 1
                    cells.append(f"{source}->{target} " + (f"({error:+.1%})" if source == target else f"{error:+.1%}"))
                    scores += [abs(error)] if source != target else []
            print(f"{kind}: mean {fmean(scores):.2%}; " + ", ".join(cells))


if __name__ == "__main__":
    main()
