"""Sweeps: the same bytes however they are computed; killed at any moment, nothing lost or done twice."""

from __future__ import annotations

import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.studies.pool import DIED, outcomes_locally, outcomes_on_dask
from moesim.simulator.studies.space import LARGEST, evaluate, key_of
from moesim.simulator.studies.store import PointOutcome, Store
from moesim.simulator.studies.sweep import Progress, Sweep, survey, sweep

SPACE = {"communication.sms": "0,8,20", "parallel.ep": "16,24"}


def text(found: Sweep) -> str:
    return json.dumps(found.to_dict(), indent=2)


@pytest.fixture(scope="module")
def here(small: Scenario) -> Sweep:
    return sweep(small, SPACE, workers=1)


def test_every_point_is_told_with_its_reason(here: Sweep) -> None:
    status = {tuple(p.values.values()): p.status for p in here.points}
    assert status == {
        (0, 16): "illegal", (0, 24): "illegal", (8, 16): "ok",
        (8, 24): "illegal", (20, 16): "ok", (20, 24): "illegal",
    }  # fmt: skip
    by_values = {tuple(p.values.values()): p for p in here.points}
    assert "at least 1 communication SM" in by_values[0, 16].reason
    assert "does not divide" in by_values[20, 24].reason
    assert by_values[20, 24].figures == {}
    assert here.best().values["parallel.ep"] == 16
    assert here.best("mfu_causal", largest=True) == here.best()


def test_a_point_is_what_simulate_says(here: Sweep, small: Scenario) -> None:
    alone = moesim.simulate(small.replace(**{"communication.sms": 8}))
    figures = here.points[2].figures
    assert figures["step_time_s"] == alone.step.time_s
    assert figures["cost_usd"] == alone.run.cost_usd


def test_the_same_bytes_with_any_number_of_workers(here: Sweep, small: Scenario) -> None:
    assert text(sweep(small, SPACE, workers=2)) == text(here)


def test_a_store_is_used_and_adds_nothing_twice(here: Sweep, small: Scenario, tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    first = sweep(small, {"communication.sms": [8]}, workers=1, store=store)
    assert (first.computed, first.reused) == (1, 0)
    seen: list[Progress] = []
    more = sweep(small, SPACE, workers=1, store=store, progress=seen.append)
    assert (more.computed, more.reused) == (5, 1)
    again = sweep(small, SPACE, workers=1, store=store)
    assert text(again) == text(more) == text(here)
    assert (seen[-1].done, seen[-1].total, seen[-1].reused, seen[-1].failed) == (6, 6, 1, 0)
    assert seen[-1].rate_per_s > 0 and seen[-1].eta_s == 0
    with Store(store) as opened:
        key = key_of(small.replace(**{"communication.sms": 8}))
        assert opened.count() == 6
        kept = opened.get(key)
        assert kept is not None
        assert (kept.figures, opened.result(key)) == (first.points[0].figures, "")  # no whole prediction


def test_a_result_of_other_files_or_keys_is_not_reused(small: Scenario, tmp_path: Path) -> None:
    from moesim.simulator.model.catalogue import load_model

    path = tmp_path / "model.yaml"
    path.write_text(dump_mapping(load_model("deepseek-v3").model_dump(mode="json", exclude_none=True)))
    own = small.replace(model=str(path))
    before = key_of(own)
    assert key_of(own) == before
    data = load_mapping(path)
    data["hidden"] *= 2
    path.write_text(dump_mapping(data))
    assert key_of(own).scenario != before.scenario
    assert key_of(small, uncertainty=True) != key_of(small)
    assert key_of(small.replace(seed=1)) != key_of(small)
    other = key_of(small.replace(profile="h800-published"))
    assert other.calibration != key_of(small).calibration


def test_another_sweep_that_was_faster_is_not_repeated(small: Scenario, tmp_path: Path) -> None:
    """The second point is put into the store while the first is being computed."""
    store = tmp_path / "s.sqlite"
    other = small.replace(**{"communication.sms": 20})

    def put(now: Progress) -> None:
        if now.done == 1:
            with Store(store) as opened:
                opened.put(key_of(other), "other", PointOutcome("ok", "", {"step_time_s": 123.0}, ""))

    found = sweep(small, {"communication.sms": "8,20"}, workers=1, store=store, progress=put)
    assert (found.computed, found.reused) == (1, 1)
    assert found.points[1].figures == {"step_time_s": 123.0}


SCRIPT = """
import sys
from moesim.simulator.scenario import load_scenario
from moesim.simulator.studies.sweep import sweep

if __name__ == "__main__":
    sweep(load_scenario(sys.argv[1]), {"seed": "1..12"}, workers=2, store=sys.argv[2])
"""


def rows(store: Path) -> int:
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM results").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_killed_half_way_it_goes_on_where_it_was(small: Scenario, tmp_path: Path) -> None:
    store, script, saved = tmp_path / "s.sqlite", tmp_path / "run.py", tmp_path / "small.yaml"
    script.write_text(SCRIPT)
    saved.write_text(dump_mapping(small.to_dict()))
    base = load_scenario(str(saved))
    process = subprocess.Popen([sys.executable, str(script), str(saved), str(store)])
    deadline = time.monotonic() + 300
    while rows(store) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = rows(store)
    assert 3 <= kept < 12, "it was killed while it worked"
    space = {"seed": "1..12"}
    found = sweep(base, space, workers=1, store=store)
    assert (found.computed, found.reused) == (12 - kept, kept)
    assert rows(store) == 12
    few = sweep(base, {"seed": "1..4"}, workers=1)
    assert few.points == found.points[:4]


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.long
def test_a_worker_that_dies_takes_no_other_point_with_it(small: Scenario) -> None:
    bomb: Any = Bomb()
    tasks = [(n, bomb if n == 1 else small.replace(seed=n)) for n in range(4)]
    found = dict(outcomes_locally([tasks[:2], tasks[2:]], lambda number: True, evaluate, 2))
    assert {n: o.status for n, o in found.items()} == {0: "ok", 1: "failed", 2: "ok", 3: "ok"}
    assert found[1].reason == DIED


def _numbered(scenario: Scenario) -> PointOutcome:
    """Stands for a prediction."""
    return PointOutcome("ok", "", {"step_time_s": float(scenario.seed)}, "")


def test_few_scenarios_live_at_a_time_and_the_order_is_that_of_the_design(small: Scenario) -> None:
    def count() -> int:
        return sum(isinstance(item, Scenario) for item in gc.get_objects())

    def progress(now: Progress) -> None:
        if now.done % (2 * LARGEST) == 0:
            living.append(count())

    living = [count()]
    space = {"variation.jitter_cv": [0.01, 0.02], "seed": f"1..{2 * LARGEST}"}
    found = sweep(small, space, workers=1, measure=_numbered, progress=progress)
    assert len(found.points) == 4 * LARGEST and len(living) == 4
    assert max(living) - living[0] <= LARGEST + 4
    assert [p.figures["step_time_s"] for p in found.points] == [float(s + 1) for s in range(2 * LARGEST)] * 2


def test_a_failure_is_tried_again_by_the_next_sweep(
    small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scenario: Scenario) -> Any:
        raise ZeroDivisionError("planted")

    store = tmp_path / "s.sqlite"
    with monkeypatch.context() as patched:
        patched.setattr("moesim.simulator.studies.space.simulate", broken)
        found = sweep(small, {"seed": [5]}, workers=1, store=store)
    assert found.points[0].status == "failed"
    assert found.points[0].reason == "ZeroDivisionError: planted"
    again = sweep(small, {"seed": [5]}, workers=1, store=store)
    assert (again.points[0].status, again.computed) == ("ok", 1)


def test_uncertainty_in_a_sweep(small: Scenario) -> None:
    figures = sweep(small, {"seed": [0]}, workers=1, uncertainty=True).points[0].figures
    low, mid, high = (float(figures[f"step_time_s_p{n}"] or 0.0) for n in (10, 50, 90))
    assert low < mid < high


def test_a_dask_cluster_gives_the_same_bytes(here: Sweep, small: Scenario) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as cluster:
        found = sweep(small, SPACE, scheduler=cluster.scheduler_address)
    assert text(found) == text(here)


def test_a_scheduler_that_is_not_there_is_told(small: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("moesim.simulator.common.processes.CONNECT_S", 0.2)
    with pytest.raises(InputError, match="no answer"):
        list(outcomes_on_dask([[(0, small)]], lambda number: True, evaluate, "tcp://127.0.0.1:9"))


def test_bad_arguments_are_told(small: Scenario, here: Sweep) -> None:
    with pytest.raises(InputError, match="workers=0"):
        sweep(small, {"seed": [1]}, workers=0)
    with pytest.raises(InputError, match="no point of the sweep"):
        here.best("no such figure")
    with pytest.raises(InputError, match=r"the sweep cannot vary it.* no: unknown key"):
        sweep(small, {"no.such.key": [1], "seed": [2]}, workers=1)


# -- survey: known, illegal and missing points, before anything is computed -------------------------------


def test_without_a_store_every_legal_point_is_missing(small: Scenario) -> None:
    found = survey(small, {"communication.sms": [8, 20, 132]})
    assert found.total == 3
    assert found.missing == ({"communication.sms": 8}, {"communication.sms": 20}, {"communication.sms": 132})


def test_points_that_a_sweep_stored_are_known_and_equal(small: Scenario, tmp_path: Path) -> None:
    store = tmp_path / "sweep.sqlite"
    space = {"communication.sms": [8, 20]}
    done = moesim.sweep(small, {"communication.sms": [8]}, workers=1, store=store)
    found = survey(small, space, store)
    assert found.missing == ({"communication.sms": 20},)
    assert found.points == done.points


def test_an_illegal_point_has_its_reason_and_is_never_missing(small: Scenario) -> None:
    found = survey(small, {"batch.sequences": [512, -1]})
    (point,) = found.points
    assert (point.status, point.values) == ("illegal", {"batch.sequences": -1})
    assert "batch.sequences" in point.reason
    assert found.missing == ({"batch.sequences": 512},)


def test_a_point_that_is_not_admitted_ends_the_survey(small: Scenario) -> None:
    def admit(scenario: Scenario) -> None:
        if scenario.batch.sequences > 1000:
            raise InputError("too large")

    with pytest.raises(InputError, match="too large"):
        survey(small, {"batch.sequences": [512, 5120]}, admit=admit)
