"""Sweeps of served loads: the points, workers and stores of `studies.sweep`, with `serve` at every point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import count, table_lines
from moesim.simulator.common.tables import cell
from moesim.simulator.scenario import AnyScenario, Scenario
from moesim.simulator.serving.simulate import serve
from moesim.simulator.studies.space import Space
from moesim.simulator.studies.store import PointOutcome
from moesim.simulator.studies.sweep import MOST_PRINTED, Progress, Sweep, SweepPoint, sweep

HEADS = {
    "gpus": "GPUs",
    "requests_per_s": "requests/s",
    "ttft_s_p50": "TTFT P50 (s)",
    "ttft_s_p90": "TTFT P90 (s)",
    "tpot_request_s_p50": "TPOT P50 (s)",
    "tpot_request_s_p90": "TPOT P90 (s)",
    "output_tokens_per_s_per_gpu": "out tok/s/GPU",
    "goodput_per_s": "goodput/s",
    "usd_per_million_output_tokens": "$/M output",
}
"""Figures that a printed sweep shows, with their heads."""


class ServingSweep(Sweep):
    """A finished sweep of served loads, in the order of its design."""

    def __str__(self) -> str:
        """The number of points by status, their main figures, and reasons of refusals."""
        by_status = Counter(point.status for point in self.points)
        counted = ", ".join(f"{number:,} {status}" for status, number in by_status.items())
        lines = [f"sweep of {self.scenario}: {count(len(self.points), 'point')} ({counted})"]
        lines += self.inputs.lines(plan=False)
        keys = list(dict.fromkeys(key for point in self.points for key in point.values))
        rows = [[*keys, "status", *HEADS.values()], *(self.cells(point, keys) for point in self.points)]
        lines += table_lines(rows, MOST_PRINTED)
        lines += [f"  {number:,} {status}: {why}" for (status, why), number in self.reasons()[:MOST_PRINTED]]
        return "\n".join(lines)

    @staticmethod
    def cells(point: SweepPoint, keys: list[str]) -> list[str]:
        """A point as a row of the table."""
        figures = [cell(point.figures.get(name)) for name in HEADS]
        return [*(str(point.values.get(key, "")) for key in keys), point.status, *figures]


def served(scenario: Scenario) -> PointOutcome:
    """Serve the load of one point; what cannot be served becomes an outcome with the reason."""
    try:
        result = serve(scenario)
    except InfeasibleError as error:
        return PointOutcome("infeasible", str(error), {}, "")
    except InputError as error:
        return PointOutcome("illegal", str(error), {}, "")
    except Exception as error:
        return PointOutcome("failed", f"{type(error).__name__}: {error}", {}, "")
    row = result.rows()[0]
    figures = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
    if not result.drains:
        return PointOutcome("infeasible", "the load never drains", figures, result.model_dump_json())
    return PointOutcome("ok", "", figures, result.model_dump_json())


def serve_sweep(
    scenario: AnyScenario,
    space: Space,
    *overrides: str,
    design: str = "grid",
    count: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    store: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ServingSweep:
    """Serve the load of `scenario` at every point of a space; arguments as those of `moesim.sweep`.

    Raises InputError for a malformed space or store, and for a key that no scenario has.
    """
    options: dict[str, Any] = {"design": design, "count": count, "seed": seed, "workers": workers}
    found = sweep(scenario, space, *overrides, **options, store=store, measure=served, progress=progress)
    return ServingSweep.model_construct(**dict(found))
