"""The one way to a result: what a scenario names is loaded once, and a cluster is a fleet of one pool."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.predict.driver import finish, predict, simulate
from moesim.simulator.predict.result_parts import Later
from moesim.simulator.predict.step import prepare, run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario import scenario as module


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Names that were loaded: models, clusters, profiles."""
    seen: Counter[str] = Counter()

    def counting(loader: Any) -> Any:
        def load(name: Any, *more: Any) -> Any:
            seen[f"{loader.__name__} {name}"] += 1
            return loader(name, *more)

        return load

    for name in ("load_model", "load_cluster", "load_profile"):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return seen


FAULTS = (
    "resolution=full",
    "faults=[{kind: slow-gpu, gpu: 3, speed: 0.8}, {kind: jitter, gpu: 5, cv: 0.1}]",
)


def test_a_prediction_loads_each_file_once(loads: Counter[str], home_case: Any) -> None:
    scenario = home_case[0].scenario
    loads.clear()
    predict(scenario)
    assert sorted(key.split()[0] for key in loads) == ["load_cluster", "load_model", "load_profile"]
    assert set(loads.values()) == {1}


def test_faults_and_further_seeds_load_nothing_again(loads: Counter[str], small: Scenario) -> None:
    """Each fault is a simulation of its own, on what was loaded for the first."""
    faulty = small.overridden(*FAULTS)
    loads.clear()
    result = predict(faulty).result
    assert result.full is not None and len(result.full.causes) == 4
    assert loads and set(loads.values()) == {1}


def test_a_fleet_loads_each_file_once(loads: Counter[str], mixed: Scenario) -> None:
    loads.clear()
    predict(mixed)
    assert sum(key.startswith("load_model") for key in loads) == 1
    assert set(loads.values()) == {1}


def test_a_job_is_not_resolved_again(loads: Counter[str], small: Scenario) -> None:
    job, more = resolve(small), small.overridden("batch.sequences=256")
    loads.clear()
    assert predict(job).result == simulate(small)
    before = sum(loads.values())
    run_step(job.changed_to(more))
    assert sum(loads.values()) == before


def test_a_changed_job_loads_what_it_names_anew(small: Scenario) -> None:
    job = resolve(small)
    other = job.changed_to(small.overridden("model=mixtral-8x7b"))
    assert other.shape != job.shape and other.cluster is job.cluster and other.profile is job.profile
    with pytest.raises(InputError, match="profile"):
        job.changed_to(small.overridden("profile=a100-layers"))


def test_seconds_alone_are_those_of_the_result(small: Scenario, mixed: Scenario) -> None:
    for scenario in (small, mixed):
        step = run_step(scenario)
        result = finish(step.prepared).result
        assert step.time_s == result.step.time_s
        assert step.prepared.memory == result.memory


def test_a_fleet_has_no_one_cluster(mixed: Scenario) -> None:
    prepared = prepare(mixed)
    assert len(prepared.pools) == 2 and len(prepared.owners) == mixed.parallel.pp
    assert prepared.n_gpus == sum(pool.part.cluster.n_gpus for pool in prepared.pools)
    for name in ("cluster", "profile", "pricer", "job", "loads", "memory_by_rank"):
        with pytest.raises(InputError, match=r"fleet\.pools"):
            getattr(prepared, name)
    with pytest.raises(InputError, match=r"fleet\.pools"):
        prepare(mixed, stages=prepared.stages)


def test_a_cluster_is_one_pool(home_case: Any) -> None:
    prepared = home_case[0]
    (pool,) = prepared.pools
    assert pool.part.ranks == range(prepared.schedule.pp)
    assert prepared.programs is pool.programs and pool.memory == prepared.memory


def test_a_result_works_out_what_is_read_and_is_whole_for_everybody_else(small: Scenario) -> None:
    unread, whole = simulate(small), simulate(small).completed()
    assert unread.step.time_s == whole.step.time_s
    unread = simulate(small)
    assert {"provenance", "utilisation"} <= set(unread._later) and unread.step._later
    assert unread.utilisation == whole.utilisation and "utilisation" not in unread._later
    assert list(unread.model_dump()) == list(whole.model_dump()) and not unread._later
    assert simulate(small) == whole and pickle.loads(pickle.dumps(simulate(small))) == whole
    assert simulate(small).model_dump_json() == whole.model_dump_json()
    assert simulate(small).model_copy(update={"seed": 7}).moved_bytes == whole.moved_bytes
    with pytest.raises(AttributeError, match="no_field"):
        simulate(small).no_field  # type: ignore[attr-defined]  # noqa: B018


def test_only_the_last_result_keeps_the_arrays_of_its_step(small: Scenario) -> None:
    before = simulate(small)
    simulate(small.replace(seed=3))
    assert not before._later and not before.step._later


class OneFigure(Later):
    """A result with one figure."""

    nic: float


def test_a_figure_that_is_not_finite_is_no_result() -> None:
    with pytest.raises(ValueError, match="nic=nan"):
        OneFigure.of({"nic": float("nan")}, {})
    late = OneFigure.of({}, {"nic": lambda: float("inf")})
    with pytest.raises(ValueError, match="nic=inf"):
        assert late.nic
