"""A step on a fleet: equal pools are one cluster, unequal ones lie between their kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.cluster import Cluster
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.space import key_of


def pools(mixed: Scenario, *kinds: int, nodes: int = 2) -> dict[str, Any]:
    """The fixture's pools by number (0: H100, 1: A100)."""
    given = mixed.to_dict()["fleet"]["pools"]
    return {"pools": [given[kind] | {"nodes": nodes} for kind in kinds]}


def alone(mixed: Scenario, kind: int) -> Scenario:
    """The job on four nodes of one kind."""
    given = mixed.to_dict()["fleet"]["pools"][kind]["cluster"]
    return mixed.replace(cluster=Cluster.model_validate(given | {"nodes": 4}))


@pytest.fixture(scope="module")
def found(mixed: Scenario) -> Result:
    return moesim.simulate(mixed)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "zbv"])
def test_two_equal_pools_are_one_cluster_to_the_nanosecond(mixed: Scenario, schedule: str) -> None:
    job = mixed.replace(schedule=schedule)
    whole = moesim.simulate(alone(job, 0))
    fleet = moesim.simulate(job.replace(fleet=pools(mixed, 0, 0)))
    # Energy is said of one cluster only.
    same = set(Result.model_fields) - {"pools", "provenance", "confidence_reason", "inputs", "energy"}
    assert {k: getattr(fleet, k) for k in same} == {k: getattr(whole, k) for k in same}
    assert fleet.inputs.plan == whole.inputs.plan and fleet.inputs.engine == whole.inputs.engine
    assert [(p.first_rank, p.last_rank, p.n_gpus) for p in fleet.pools] == [(0, 1, 16), (2, 3, 16)]
    assert {e.path.removeprefix("pools.0.") for e in fleet.provenance if "pools.1" not in e.path} == {
        e.path for e in whole.provenance
    }


def test_a_mixed_fleet_lies_between_its_kinds_and_balance_helps(mixed: Scenario, found: Result) -> None:
    fast, slow = (moesim.simulate(alone(mixed, kind)).step.time_s for kind in (0, 1))
    even = moesim.simulate(mixed.replace(**{"stages.layers": [12, 12, 12, 12]}))
    assert fast < found.step.time_s < even.step.time_s < slow * 1.02
    h100, a100 = found.pools
    assert h100.layers > 2 * a100.layers and h100.layers + a100.layers == 48
    assert a100.layer_s > 2 * h100.layer_s
    assert even.pools[0].bubble_s > 1.5 * h100.bubble_s
    for result in (even, found):
        assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s


def test_memory_cost_and_confidence_are_told_by_pool(mixed: Scenario, found: Result) -> None:
    used = [p.memory.total_bytes / p.memory.capacity_bytes for p in found.pools]
    assert found.memory == found.pools[used.index(max(used))].memory
    assert found.run.cost_usd == pytest.approx(found.run.gpu_hours / 2 * (3.0 + 1.5))
    assert found.profile == "generic-roofline"
    own = mixed.to_dict()["fleet"]["pools"]
    own[0]["profile"] = "h100-layers"
    other = moesim.simulate(mixed.replace(fleet={"pools": own}))
    assert other.profile == "h100-layers + generic-roofline"
    assert [p.profile for p in other.pools] == ["h100-layers", "generic-roofline"]
    assert other.profile_hash not in ("", found.profile_hash)
    assert other.step.time_s != found.step.time_s
    assert key_of(mixed) != key_of(mixed.replace(fleet={"pools": own}))


def test_check_explain_compare_and_sweep_take_fleets(mixed: Scenario, found: Result, tmp_path: Path) -> None:
    checked = moesim.check(mixed)
    assert (checked.n_gpus, checked.memory, checked.stages) == (32, found.memory, found.stages)
    assert "A100" in checked.accelerator and "H100" in checked.accelerator
    assert "A step takes" in moesim.explain(found).sentences[0]
    other = mixed.replace(fleet=pools(mixed, 0, 0))
    compared = moesim.compare([mixed, other], names=["mixed", "H100"])
    assert compared.sides[0].figures["step_time_s"] == found.step.time_s
    assert "fleet.pools" in compared.sides[1].differs
    space: dict[str, list[Any]] = {"fleet": [pools(mixed, 0, 1), pools(mixed, 1, 1)], "parallel.pp": [4, 3]}
    store = tmp_path / "fleets.sqlite"
    swept = moesim.sweep(mixed, space, workers=1, store=store)
    assert [p.status for p in swept.points] == ["ok", "illegal", "ok", "illegal"]
    assert "does not spread over the fleet" in swept.points[1].reason
    assert swept.points[0].figures["step_time_s"] == found.step.time_s
    again = moesim.sweep(mixed, space, workers=1, store=store)
    assert (again.computed, again.points) == (0, swept.points)


def test_result_of_one_cluster_has_no_pools(mixed: Scenario, found: Result) -> None:
    assert "pools" in found.to_dict()
    assert "pools" not in moesim.simulate(alone(mixed, 0)).to_dict()
