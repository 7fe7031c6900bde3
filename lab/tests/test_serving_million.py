"""A million requests on 96 replicas: at most three minutes of processors and 1 GB, and the bytes of SimPy.

The load is Azure's log repeated, its times jittered by the seed. Time is that of the processors, so that other work
on the machine does not count.
"""

from __future__ import annotations

import resource

import pytest
from lab.packed import RESULTS

from moesim.simulator.engine import registry
from moesim.simulator.scenario import load_scenario
from moesim.simulator.serving.simulate import prepare, result_of

SECONDS, BYTES = 180.0, 1e9
LOG = RESULTS / "2023-11-16-azure-conversation.csv.xz"
ROUTERS = ("round_robin", "least_loaded", "prefix_aware")


def served(requests: int, replicas: int, router: str) -> str:
    load = {"log": str(LOG), "requests": requests}
    serving = {"replicas": replicas, "router": router, "load": load}
    cluster = {"accelerator": "h100-sxm", "nodes": 12}
    service = prepare(load_scenario({"model": "qwen3-30b-a3b", "cluster": cluster, "serving": serving}))
    return result_of(service, service.run()).model_dump_json()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ["compiled", "simpy"])
def test_a_million_requests_take_minutes(engine: str, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, engine)
    served(4000, 96, router)  # compiles, where the code is not there yet
    before = resource.getrusage(resource.RUSAGE_SELF)
    served(1_000_000, 96, router)
    own = resource.getrusage(resource.RUSAGE_SELF)
    assert own.ru_utime - before.ru_utime < (SECONDS / 10 if engine == "compiled" else SECONDS)
    assert own.ru_maxrss * 1024 < BYTES


@pytest.mark.parametrize("router", ROUTERS)
def test_the_bytes_are_those_of_simpy(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for engine in ("compiled", "simpy", "compiled"):
        monkeypatch.setenv(registry.VARIABLE, engine)
        found.add(served(120_000, 12, router))
    assert len(found) == 1
