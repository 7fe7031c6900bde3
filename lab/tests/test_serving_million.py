"""A million requests on 96 replicas: at most three minutes of two cores and 1 GB, and the same bytes again.

The load is Azure's log repeated, its times jittered by the seed. Time is that of the processors, so that other work
on the machine does not count.
"""

from __future__ import annotations

import os
import resource

from lab.packed import RESULTS

from moesim.simulator.scenario import load_scenario
from moesim.simulator.serving.simulate import prepare, result_of

CORES, SECONDS, BYTES = 2, 180.0, 1e9
LOG = RESULTS / "2023-11-16-azure-conversation.csv.xz"


def served(requests: int, replicas: int) -> str:
    load = {"log": str(LOG), "requests": requests}
    serving = {"replicas": replicas, "router": "round_robin", "load": load}
    cluster = {"accelerator": "h100-sxm", "nodes": 12}
    service = prepare(load_scenario({"model": "qwen3-30b-a3b", "cluster": cluster, "serving": serving}))
    return result_of(service, service.run()).model_dump_json()


def test_a_million_requests_take_minutes() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # so many workers
    before = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    served(1_000_000, 96)
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    alone = own.ru_utime - before[0].ru_utime
    shared = others.ru_utime - before[1].ru_utime
    assert alone + shared / CORES < SECONDS
    assert (own.ru_maxrss + CORES * others.ru_maxrss) * 1024 < BYTES


def test_the_bytes_are_the_same_again() -> None:
    assert served(120_000, 12) == served(120_000, 12)
