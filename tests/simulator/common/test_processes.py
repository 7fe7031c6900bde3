"""A Dask cluster gives the bytes of this process: plan searches, engine draws and sizing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.planner import engine_stage
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import prepare
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.serving.sizing import serve_plan
from moesim.simulator.studies.compare import relative_draws
from moesim.simulator.studies.effects import EntryEffect
from moesim.simulator.studies.sources import number_sources
from moesim.simulator.studies.uncertainty import engine_steps_s, start_workers

distributed = pytest.importorskip("distributed")

SMALL = "tests/golden/scenario-small.yaml"


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Address of a cluster with two workers that are threads of this process."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as cluster:
        yield cluster.scheduler_address


def test_a_plan_search(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stage, "MOST_COMPARED", 1)
    space = PlanSpace(
        tp=(1,), pp=(4,), ep=(8, 16), cp=(1,), vpp=(1,), microbatch=(1,), schedule=("1f1b",),
        recompute=("full",), precision=("bf16",), sms=(20,), zero_stage=(1,), headroom=0.0,
    )  # fmt: skip
    here, there = (plan(load_scenario(SMALL), space, top=2, scheduler=s) for s in (None, scheduler))
    assert json.dumps(here.to_dict()) == json.dumps(there.to_dict())
    assert here.best.spread == Band.of(1.0, relative_draws(here.best.scenario))


def test_engine_draws(scheduler: str) -> None:
    prepared = prepare(load_scenario(SMALL))
    effects = [
        EntryEffect(source, source.points(), (0.0, 0.0)) for source in number_sources(prepared.profile)
    ]
    assert effects
    pools = None, start_workers(20, scheduler=scheduler)
    here, there = (engine_steps_s(prepared, effects, 3, pool=pool).tolist() for pool in pools)
    assert here == there


def test_sizing(scheduler: str) -> None:
    load = {"rate_per_s": 2.0, "input_tokens": 64, "output_tokens": 8, "requests": 20}
    data: dict[str, Any] = {"tp": 4, "load": load, "limits": {"ttft_s": 1.0, "tpot_s": 0.03}}
    cluster = {"accelerator": "h100-sxm", "nodes": 1}
    served: Scenario = load_scenario(
        {"name": "small", "model": "mixtral-8x7b", "cluster": cluster, "serving": data}, []
    )
    space = {"tp": [4], "dp": [1], "ep": [1, 4], "max_num_seqs": [8], "max_num_batched_tokens": [512]}
    here, there = (
        serve_plan(served, vary=space, modes=["aggregated"], top=2, scheduler=s) for s in (None, scheduler)
    )
    assert json.dumps(here.to_dict()) == json.dumps(there.to_dict())


def test_a_cluster_that_nothing_would_use_is_refused() -> None:
    for call in (moesim.simulate, moesim.sensitivity, moesim.interval):
        with pytest.raises(InputError, match="scheduler=tcp://h:1 is not used"):
            call(SMALL, scheduler="tcp://h:1")
    with pytest.raises(InputError, match="workers=2 beside the Dask scheduler"):
        start_workers(20, 2, "tcp://h:1")
