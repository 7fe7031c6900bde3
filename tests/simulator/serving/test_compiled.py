"""Compiled requests: equal to the SimPy reference to the nanosecond, with any policy that they serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.engine import registry
from moesim.simulator.engine.compiled import loader
from moesim.simulator.serving import simulate
from moesim.simulator.serving.compiled import serve_compiled, why_not
from moesim.simulator.serving.replicas import (
    ReplicaPool,
    Served,
    StepPace,
    check_all_served,
    serve_requests,
)
from moesim.simulator.serving.requests import Requests, requests_of
from moesim.simulator.serving.scheduler import Policy, StepBatch

if loader.numba_version() is None:
    pytest.skip("Numba is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("compiled_code")


class Steps:
    """Steps that take longer with contexts and prompts, by a law that holds for some steps only."""

    def __init__(self, growth: float, room: int) -> None:
        self.growth, self.room = growth, room

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        work = max(batch.decodes + 3 * batch.prefill_tokens + 0.37 * batch.context for batch in ranks)
        return StepPace(1000.5 + work, self.growth, self.room)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    most = draw(st.integers(1, 12))
    reserve = draw(st.sampled_from([(0.0, 0.0), (1.0, 1.0), (1.0, 0.1)]))
    return Policy(
        max_num_seqs=most,
        max_num_batched_tokens=draw(st.integers(most, 200)),
        block_tokens=draw(st.sampled_from([1, 4, 16])),
        kv_blocks=draw(st.none() | st.integers(3, 120)),
        mixed=draw(st.booleans()),
        chunked=draw(st.booleans()),
        gain=draw(st.sampled_from([1.0, 1.0, 1.7, 2.03])),
        reserve_new=reserve[0],
        reserve_running=reserve[1],
        ahead=draw(st.booleans()),
    )


@st.composite
def loads(draw: st.DrawFn) -> Requests:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 60), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=40
        )
    )
    times, inputs, outputs = zip(*rows, strict=True)
    scale = draw(st.sampled_from([0, 1, 997, 40_000]))
    load = requests_of(np.array(times) * scale, inputs, outputs)
    return replace(load, cached_share=draw(st.sampled_from([0.0, 0.0, 0.3])))


def outcome(run: object) -> tuple[object, ...]:
    try:
        served = run()  # type: ignore[operator]
    except InfeasibleError as error:
        return (str(error),)
    assert isinstance(served, Served)
    names = ("arrival_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "transfer_ns", "rank",
             "prefill_rank")  # fmt: skip
    return *(getattr(served, name).tolist() for name in names), served.pools, served.counts


@settings(max_examples=150)
@given(
    policies(), loads(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.none() | st.integers(1, 9),
    st.sampled_from([0.0, 3.25]), st.sampled_from([1, 7, 1 << 30]), st.sampled_from([0, 5_000]),
)  # fmt: skip
def test_every_load_ends_as_with_simpy(
    policy: Policy, load: Requests, replicas: int, ranks: int, turns: bool, closed: int | None,
    growth: float, room: int, sample: int,
) -> None:  # fmt: skip
    pool = ReplicaPool(replicas, policy, Steps(growth, room), ranks)
    route = "round_robin" if turns else "prefix_aware"
    assert not why_not(load, pool, route)

    def compiled() -> Served:
        served, left = serve_compiled(loader.native().serve, load, pool, route, sample, 32, closed)
        check_all_served(left, len(load))
        return served

    assert outcome(compiled) == outcome(
        lambda: serve_requests(load, pool, route=route, sample_ns=sample, most_samples=32, concurrency=closed)
    )


SERVED = [
    {},
    {"engine": "sglang-0.5", "tp": 2, "replicas": 2, "load": {"rate_per_s": 3, "requests": 120,
     "length_spread": 1.5}},
    {"engine": "trtllm-1.2", "tp": 8, "replicas": 1, "cuda_graphs": False},
    {"dp": 4, "ep": 4, "replicas": 2, "max_num_seqs": 24},
    {"load": {"arrivals": "concurrency", "concurrency": 40, "requests": 200, "length_spread": 0.5}},
]  # fmt: skip


@pytest.mark.parametrize("serving", SERVED)
def test_step_times_come_from_the_same_tables(
    serving: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"rate_per_s": 60, "requests": 300, "input_tokens": 900, "output_tokens": 120, "length_spread": 1}
    scenario = {
        "model": "qwen3-30b-a3b", "cluster": {"accelerator": "h100-sxm", "nodes": 1},
        "serving": {"engine": "vllm-0.19", "tp": 1, "replicas": 4, "load": load, **serving},
    }  # fmt: skip
    found = {}
    for engine in ("simpy", "compiled"):
        monkeypatch.setenv(registry.VARIABLE, engine)
        found[engine] = simulate.serve(scenario, with_intervals=True).model_dump_json()
    assert found["simpy"] == found["compiled"]


def test_what_compiled_code_does_not_serve_is_named() -> None:
    shared = requests_of([0, 1], [8, 8], [2, 2], [[1, 2], [1, 3]], 4)
    pool = ReplicaPool(1, Policy(4, 64), Steps(0.0, 1))
    assert "share prefixes" in why_not(shared, pool, "least_loaded")
    waits = replace(pool, policy=Policy(4, 64, wait_steps=5))
    assert "waits before it looks" in why_not(requests_of([0], [8], [2]), waits, "least_loaded")
