from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from step_records import execute

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.cost.table import SyncCost
from moesim.simulator.engine.bounds import LinkContention, lower_bound_s, upper_bound_s
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.layout.parallel import hides_experts
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES, build

Toy = Callable[..., Program]

EXPERTS = {"deepseek-v3": 256, "qwen3-30b-a3b": 128, "mixtral-8x22b": 8, "llama-3-8b": 1}


@st.composite
def troubled(draw: st.DrawFn) -> Scenario:
    """A small job with uneven experts, drops, spreads, slow links and faults, on one cluster or a fleet."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.sampled_from([1, 2, 2, 4]))
    ep = draw(st.sampled_from([4, 8, 8, 16] if hides_experts(schedule) else [1, 4, 8, 8, 16]))
    replicas = max(ep, 8) * draw(st.sampled_from([1, 2]))
    nodes = pp * replicas // 8
    per_rank = draw(st.sampled_from(["moe*2", "dense moe", "moe"]))
    stages = pp * (2 if schedule in ("dualpipev", "zbv") or schedule.startswith("interleaved") else 1)
    zero_stages = [0, 1, 2] if SCHEDULES[schedule].overlapped_pairs else [0, 1, 2, 3]
    unit = st.floats(0.0, 1.0)
    load = draw(st.sampled_from([0.0, 0.16, 1.0]))
    routing: dict[str, Any] = {"expert_load_cv": load}
    if ep > 1 and draw(st.booleans()):
        routing["load"] = {
            "kind": "zipf",
            "exponent": draw(st.floats(0.0, 1.5)),
            "shuffle_per_layer": draw(st.booleans()),
        }
    if ep > 1 and draw(st.booleans()):
        routing["capacity"] = {
            "factor": draw(st.floats(0.05, 2.0)),
            "per": draw(st.sampled_from(["expert", "rank"])),
        }
    network = draw(st.sampled_from(["mpft-ib-400g", "mrft-ib-400g", "rail-roce-400g"]))
    nic = draw(st.sampled_from([400.0, 400.0, 100.0, 5.0]))
    home = load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"cluster={{node: hgx-h800, nodes: {nodes}, network: {network}, name: small}}",
            f"cluster.node.nic_bandwidth={nic} Gb/s",
            f"cluster.node.nic_bandwidth_effective={nic / 10} GB/s",
            f"parallel={{tp: 1, pp: {pp}, ep: {ep}, cp: 1, vpp: {2 if 'interleaved' in schedule else 1}}}",
            f"parallel.zero_stage={draw(st.sampled_from(zero_stages))}",
            f"schedule={schedule}",
            f"stages.blocks={json.dumps([per_rank] * stages)}",
            f"batch.sequences={2 * pp * draw(st.integers(1, 3)) * replicas}",
            f"batch.sequence_length={draw(st.sampled_from([128, 4096]))}",
            f"routing={json.dumps(routing)}",
            f"variation.clock_cv={draw(st.sampled_from([0.0, 0.02, 0.2]))}",
            f"variation.jitter_cv={draw(st.sampled_from([0.0, 0.02, 0.5]))}",
            f"communication.sms={draw(st.sampled_from([4, 20]))}",
            f"seed={draw(st.integers(0, 9))}",
        ],
    )
    if draw(st.booleans()):
        return home
    if draw(st.integers(0, 3)) == 0 and schedule != "dualpipe" and pp > 1:
        return _on_two_pools(draw, home, nodes, stages, pp)
    faults = draw(st.lists(_faults(nodes, unit), max_size=3))
    spreading = draw(st.sampled_from(["modulo", "ecmp", "ideal"]))
    return home.replace(resolution="full", faults=faults, spreading=spreading)


def _on_two_pools(draw: st.DrawFn, home: Scenario, nodes: int, stages: int, pp: int) -> Scenario:
    kinds = draw(st.permutations(["hgx-h800", "hgx-h100", "hgx-h200"]))[:2]
    pools = [
        {"cluster": {"name": kind, "node": kind, "nodes": nodes // 2, "network": "mpft-ib-400g"}}
        for kind in kinds
    ]
    whole = home.to_dict() | {"fleet": {"pools": pools}, "model": "mixtral-8x22b"}
    for key in ("cluster", "stages"):
        whole.pop(key)
    whole |= {"profile": "generic-roofline", "parallel": whole["parallel"] | {"ep": min(8, home.parallel.ep)}}
    return validate_model(Scenario, whole, "fleet")


def _faults(nodes: int, unit: st.SearchStrategy[float]) -> st.SearchStrategy[dict[str, Any]]:
    gpu = st.integers(0, 8 * nodes - 1)
    part = st.floats(0.02, 0.98)
    link = st.one_of(
        gpu.map(lambda n: f"nic:{n}"),
        gpu.map(lambda n: f"gpu:{n}"),
        st.integers(0, 7).map(lambda n: f"plane:{n}"),
        st.integers(0, 7).map(lambda n: f"leaf:{n}"),
    )
    return st.one_of(
        st.fixed_dictionaries({"kind": st.just("slow-gpu"), "gpu": gpu, "speed": part}),
        st.fixed_dictionaries({"kind": st.just("jitter"), "gpu": gpu, "cv": part}),
        st.fixed_dictionaries({"kind": st.just("slow-link"), "link": link, "bandwidth": part}),
        st.fixed_dictionaries({"kind": st.just("down"), "link": link}),
        st.fixed_dictionaries({"kind": st.just("node-loss"), "node": st.integers(0, nodes - 1)}),
    )


@settings(max_examples=40)
@given(troubled())
def test_whatever_goes_wrong_a_step_lies_between_its_bounds(job: Scenario) -> None:
    try:
        programs = prepare(job).programs
    except (InputError, InfeasibleError):
        reject()  # this network has no such link, or the fault leaves no way
    end_s = engine_of().execute(programs)[0].end_ns / 1e9
    assert 0.0 < lower_bound_s(programs) <= end_s <= upper_bound_s(programs)


def test_the_presets_lie_between_their_bounds(home_case: Any, trace_pair: Any) -> None:
    for _, _, result in (home_case, trace_pair):
        assert result.step.lower_bound_s < result.step.time_s < result.step.upper_bound_s


@given(st.data())
def test_the_end_of_the_step_may_be_long_on_different_ranks(toy: Toy, data: st.DataObject) -> None:
    """One rank's reduction and another's optimizer are in series, because the norm is a barrier."""
    seconds = st.floats(0.0, 1.0)

    def sync() -> SyncCost:
        reduce_s, optimizer_s, gather_s = (data.draw(seconds) for _ in range(3))
        total = reduce_s + optimizer_s + gather_s
        return SyncCost(reduce_s, 0.0, optimizer_s, gather_s, best_s=0.0, worst_s=total)

    schedule = build(data.draw(st.sampled_from(["1f1b", "dualpipe"])), 2, 4)
    program = toy(schedule, [["dense"], ["dense"]], lambda k, p, o: 1000, sync=[sync(), sync()])
    end_s = execute(program).end_ns / 1e9
    assert lower_bound_s([program]) <= end_s <= upper_bound_s([program])


def test_the_lower_bound_is_the_busiest_resource(home_case: Any) -> None:
    """Every GPU's compute at the best rates of its phases, summed here from the prices alone."""
    program = home_case[0].program
    bound = lower_bound_s([program])
    for rank, steps in enumerate(program.ranks):
        compute = np.zeros(program.members)
        for step in steps:
            for task in step.code.tasks:
                if task.transfer is None:
                    price = task.price
                    rows = task.rows_ns[step.microbatches[task.side]]
                    compute += rows * min(1.0, price.best_s / (price.fixed_s + price.row_s))
        assert compute.max() / 1e9 < bound
        assert program.costs.sync[rank].best_s < bound


@given(st.data())
def test_sends_that_crowd_the_links_stay_below_the_upper_bound(toy: Toy, data: st.DataObject) -> None:
    """Certain prices, so nothing but the bound's own allowance covers sends and what they delay."""
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    pp = data.draw(st.sampled_from([2, 4]))
    schedule = build(name, pp, 2 * pp * data.draw(st.integers(1, 2)))
    compute, payload, send = (data.draw(st.integers(1000, 9000)) for _ in range(3))
    program = toy(
        schedule, [["moe"]] * schedule.n_stages, lambda k, p, o: compute, lambda p, o: float(payload),
        send_ns=float(send), bytes_=1000.0, rate=1e9, clock=[[1.0, 1.3]] * pp,
    )  # fmt: skip
    end_s = execute(program).end_ns / 1e9
    assert lower_bound_s([program]) <= end_s <= upper_bound_s([program])


def test_many_sends_at_once_arrive_late_on_every_rank(toy: Toy) -> None:
    """Sends of a rank share its link, so all arrive together, and the next rank sends them together again."""
    pp, count = 16, 16
    program = toy(
        build("gpipe", pp, count), [["dense"]] * pp, lambda k, p, o: 1,
        send_ns=1000.0, bytes_=1000.0, rate=1e9,
    )  # fmt: skip
    end_s = execute(program).end_ns / 1e9
    four_an_action = 2 * (pp + count - 1) * 4 * 1000e-9
    assert end_s > four_an_action
    assert lower_bound_s([program]) <= end_s <= upper_bound_s([program])


def test_transfers_of_other_groups_on_shared_links_are_in_the_upper_bound() -> None:
    """Several leaves under few spines: groups and planes meet on the cables between switches."""
    job = load_scenario(
        "deepseek-v3-2048xh800",
        [
            "cluster={node: hgx-h800, nodes: 32, network: rail-roce-400g, name: 256xh800}",
            "cluster.network.fabric={switch_ports: 26, oversubscription: 1, link_bandwidth: 400 Gb/s, "
            "latency_same_leaf: 3 us, latency_cross_leaf: 5 us}",
            "parallel={tp: 1, pp: 2, ep: 64}",
            "stages.blocks=[moe, moe]",
            "batch.sequences=512",
            "resolution=full",
            "spreading=ideal",
        ],
    )
    programs = prepare(job).programs
    assert LinkContention.of(programs).streams.max() > 1
    alone = max(upper_bound_s([program]) for program in programs)
    end_s = engine_of().execute(programs)[0].end_ns / 1e9
    assert end_s <= upper_bound_s(programs)
    assert alone < upper_bound_s(programs)
