"""The nearest plans that fit, against trying every single change by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.search import REPAIRED, nearest_plans, own_plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.scenario import Scenario

PRESET = "mixtral-8x7b-64xh100"
ALONE = (
    "parallel.pp=1",
    "parallel.vpp=1",
    "schedule=1f1b",
    "parallel.zero_stage=0",
    "recompute=none",
    "stages={}",
)
"""Every GPU holds everything but its experts: far too much."""


def changed(scenario: Scenario, values: Mapping[str, object]) -> Scenario:
    """The scenario with other keys of its plan; layers are balanced anew."""
    texts = [
        f"{key if key in ('schedule', 'recompute') else f'parallel.{key}'}={v}" for key, v in values.items()
    ]
    return scenario.overridden("stages={}", *texts)


def fits(scenario: Scenario) -> bool:
    try:
        return moesim.check(scenario).memory.verdict == "fits"
    except MoesimError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("nodes", [8, 2])
def test_a_plan_that_does_not_fit_gets_the_fewest_changes_that_do(nodes: int) -> None:
    home = moesim.load(PRESET, *ALONE, f"cluster.nodes={nodes}")
    assert not moesim.check(home).memory.fits
    repairs = nearest_plans(home)
    counts = {len(repair.changes) for repair in repairs}
    assert len(counts) == 1
    for repair in repairs:
        assert repair.row.verdict == "fits"
        assert fits(repair.row.scenario)
        result = moesim.simulate(repair.row.scenario)
        assert result.step.time_s == pytest.approx(repair.row.time_s, rel=1e-9)
        assert all(own_plan(home)[key] == before for key, before, _ in repair.changes)
    times = [repair.row.time_s for repair in repairs]
    assert times == sorted(times)
    # By hand: no plan with fewer changes fits, whatever the value of the changed key.
    if counts != {1}:
        job = resolve(home)
        space = with_defaults(PlanSpace(), home, job.shape, job.cluster)
        for key in REPAIRED:
            for value in getattr(space, key):
                if value != own_plan(home)[key] and isinstance(value, (int, str)):
                    assert not fits(changed(home, {key: value})), f"{key}={value} fits"


def test_an_illegal_degree_is_repaired_where_it_is_illegal() -> None:
    scenario = moesim.load(PRESET, "parallel.ep=5", "stages={}")
    with pytest.raises(InputError, match="nearest: 4, 8"):
        moesim.simulate(scenario)
    repairs = nearest_plans(scenario, most=2)
    assert [[key for key, _, _ in repair.changes] for repair in repairs] == [["ep"], ["ep"]]
    assert all(moesim.simulate(repair.row.scenario).memory.fits for repair in repairs)


def test_too_few_gpus_for_any_plan_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.simulator.planner.search.MOST_CHANGES", 1)  # with 3, a search of ten seconds
    scenario = moesim.load(PRESET, *ALONE, "cluster.nodes=1", "parallel.ep=1", "batch.sequences=64")
    with pytest.raises(InfeasibleError, match="no change of up to 1 keys"):
        nearest_plans(scenario)


def test_progress_grows_and_a_fleet_is_refused(mixed: Scenario) -> None:
    shares: list[float] = []
    nearest_plans(moesim.load(PRESET, *ALONE), most=1, progress=lambda share, _: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == 1.0
    with pytest.raises(InputError, match="fleet"):
        nearest_plans(mixed)
