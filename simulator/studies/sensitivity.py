"""Sensitivity of the step time to every uncertain input alone, for a tornado chart."""

from __future__ import annotations

from pydantic import Field

from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.predict.band import Band, Effect, EngineBands
from moesim.simulator.predict.driver import predict
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.studies.effects import Ranges
from moesim.simulator.studies.engine_draws import Say, check_draws
from moesim.simulator.studies.sources import LEFT_OUT, MODEL_ERROR
from moesim.simulator.studies.uncertainty import uncertainty


class Sensitivity(TableResult):
    """Effects of single sources on the step time, largest first."""

    scenario: str
    inputs: Inputs
    step: Band
    effects: tuple[Effect, ...]
    by_engine: EngineBands | None = Field(None, exclude_if=lambda value: value is None)
    """Bands by the engine itself, where they were asked for."""

    def rows(self) -> list[Row]:
        """One row for each source, with its low and high value and the step times there."""
        time = self.step.predicted
        return [
            {
                "source": e.source,
                "low": e.low,
                "high": e.high,
                "step_low_s": e.low_s,
                "step_high_s": e.high_s,
                "change_low": e.low_s / time - 1.0,
                "change_high": e.high_s / time - 1.0,
                "from": "stated" if e.source == LEFT_OUT else "engine" if e.exact else "critical path",
                "meaning": e.meaning,
            }
            for e in self.effects
        ]


def sensitivity(
    scenario: Scenario,
    ranges: Ranges | None = None,
    *,
    seeds: int = 0,
    exact: int = 0,
    engine_draws: int = 0,
    left_out: float = MODEL_ERROR,
    say: Say | None = None,
) -> Sensitivity:
    """The step time with each source at its 10 % and 90 % points, and the other sources as predicted.

    The sources are every calibration entry that the prediction used, the scenario keys in `ranges` (lowest
    and highest value), `seeds` further seeds, and `left_out`, the relative error that no entry carries
    (docs/model.md, section 16). Entries are evaluated along the critical path; the `exact` largest are
    simulated instead. `engine_draws`: number of engine runs with all sources off together; `say` hears how
    many are done. Raises InputError for illegal values of a key and a number of draws out of range.
    """
    if engine_draws:
        check_draws(engine_draws)
    prepared, executions, result = predict(scenario)
    bands = uncertainty(
        prepared,
        executions,
        result,
        ranges=ranges,
        seeds=seeds,
        exact=exact,
        engine_draws=engine_draws,
        left_out=left_out,
        say=say,
    )
    return Sensitivity(
        scenario=scenario.name,
        inputs=result.inputs,
        step=bands.bands["step_time_s"],
        effects=bands.sources,
        by_engine=bands.by_engine,
    )
