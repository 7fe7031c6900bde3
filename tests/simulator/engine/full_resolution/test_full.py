"""Full resolution against the folded run, and what faults do."""

from __future__ import annotations

import json
from functools import cache
from math import fsum
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.topologies.torus import TorusShares
from moesim.simulator.engine.full_resolution.link_map import ClusterLinkMap
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.layout.parallel import Layout, grouped_gpus
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan

HOME = "deepseek-v3-2048xh800"

SMALL = [
    "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
    "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "batch.sequences=256",
]
"""The home case on 128 GPUs: DualPipe over 4 ranks, 2 groups of 16 GPUs a rank, 8 micro-batches."""

EVEN = ["routing.expert_load_cv=0", "variation.clock_cv=0", "variation.jitter_cv=0"]
FULL = "resolution=full"


def scenario(*overrides: str) -> Scenario:
    return load_scenario(HOME, [*SMALL, *overrides])


@cache
def run(*overrides: str) -> Result:
    return simulate(scenario(*overrides))


def faulty(*faults: dict[str, Any], even: bool = True) -> Result:
    return run(FULL, *(EVEN if even else []), f"faults={json.dumps(faults)}")


def effect(result: Result) -> float:
    assert result.full is not None
    seconds = result.full.causes[-1].effect_s
    assert seconds is not None
    return seconds


# -- folded and full ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        [],
        ["cluster.network=mrft-ib-400g"],
        ["schedule=1f1b", "parallel.ep=8"],
        ["schedule=zb-h1", "spreading=ideal"],
    ],
)
def test_equal_ranks_take_exactly_as_long_as_the_folded_run(plan: list[str]) -> None:
    folded, full = run(*EVEN, *plan), run(FULL, *EVEN, *plan)
    assert full.step.time_s == folded.step.time_s
    assert full.breakdown_s.model_dump() == pytest.approx(folded.breakdown_s.model_dump(), abs=1e-9)
    assert full.utilisation.model_dump() == pytest.approx(folded.utilisation.model_dump(), rel=1e-9)


def test_a_link_between_buildings_costs_the_same_in_both_resolutions() -> None:
    """Two pipeline ranks a building: folded, a border is one link; in full resolution all GPUs share it."""
    sites = {"count": 2, "bandwidth": "200 Gb/s", "distance": "30 km"}
    plan = ["cluster.network=ft3-ib-400g", f"cluster.network.buildings={json.dumps(sites)}"]
    folded, full = run(*EVEN, *plan), run(FULL, *EVEN, *plan)
    assert full.step.time_s == pytest.approx(folded.step.time_s, rel=0.01)
    (tier,), (same,) = folded.network, full.network
    assert tier.crossed_by == ("pipeline sends", "rings of gradients and parameters") == same.crossed_by
    assert tier.step_without_s < folded.step.time_s
    assert tier.step_without_s == pytest.approx(run(*EVEN, plan[0]).step.time_s, rel=1e-6)
    size = 4096 * 7168 * 2 * 32  # BF16 activations of a micro-batch from the 32 GPUs of a pipeline rank
    assert tier.busy == pytest.approx(8 * size / 25e9 / folded.step.time_s, rel=1e-6)
    assert tier.cost_s >= 0.9 * (8 * size / 25e9 - tier.step_without_s)


def test_oversubscribed_leaves_slow_the_exchange_that_crosses_them() -> None:
    """Twelve nodes a unit of leaves: of three groups of eight nodes one lies on both sides."""
    fabric = {"switch_ports": 16, "oversubscription": 3, "link_bandwidth": "50 GB/s",
              "latency_same_leaf": "2 us", "latency_cross_leaf": "3 us"}  # fmt: skip
    network = {"name": "n", "title": "t", "kind": "rail-optimised", "fabric": fabric}
    plan = [*EVEN, "cluster.nodes=24", "cluster.network=" + json.dumps(network), "parallel.pp=1",
            "parallel.ep=64", "schedule=1f1b", "batch.sequences=192"]  # fmt: skip
    (tier,) = run(*plan).network
    assert tier.tier == "oversubscribed leaves" and tier.cost_s > 0.0
    assert "expert-parallel exchanges" in tier.crossed_by


def test_sends_between_oversubscribed_pods_share_the_core() -> None:
    """Pods of 48 GPUs whose middle switches have three ports down for one up; 32 GPUs a pipeline rank."""
    fabric = {"switch_ports": 32, "layers": 3, "core_oversubscription": 3, "link_bandwidth": "50 GB/s",
              "latency_same_leaf": "2 us", "latency_cross_leaf": "3 us"}  # fmt: skip
    network = {"name": "n", "title": "t", "kind": "rail-optimised", "fabric": fabric}
    plan = [*EVEN, "cluster.network=" + json.dumps(network), "cluster.nodes=96", "batch.sequences=1536"]
    (tier,) = run(*plan).network
    assert (tier.tier, tier.gpus, tier.bytes_per_s) == ("oversubscribed core", 384, 16 * 8 * 50e9)
    assert tier.crossed_by[0] == "pipeline sends" and tier.cost_s >= 0.0


def test_a_dense_model_has_groups_too() -> None:
    plan = [
        "model=llama-3-8b", "precision=bf16", "schedule=1f1b", "stages={}", "communication.sms=0",
        "parallel={tp: 1, pp: 4, ep: 1, microbatch: 1}", "recompute=selective", "routing.gate=model",
    ]  # fmt: skip
    assert run(FULL, *EVEN, *plan).step.time_s == run(*EVEN, *plan).step.time_s


@pytest.mark.parametrize(
    ("cluster", "plan", "schedule"),
    [
        ("tpu-v5e-256-pod", "pp: 4, ep: 4, tp: 2, sequence_parallel: true", "1f1b"),
        ("tpu-v6e-256-pod", "pp: 4, ep: 8, expert_tp: 2, tp: 2, sequence_parallel: true", "dualpipe"),
        ("tpu-v6e-256-pod", "pp: 4, ep: 1", "zbv"),
    ],
)
def test_on_a_torus_groups_are_blocks_and_full_resolution_is_the_folded_run(
    cluster: str, plan: str, schedule: str
) -> None:
    """Groups sit where their exchange was priced, and sends take the hops that lie between two ranks."""
    job = load_scenario(
        HOME,
        [
            f"cluster={cluster}", "model=mixtral-8x22b", "precision=bf16", "profile=generic-roofline",
            "communication.sms=0", f"parallel={{{plan}}}", f"schedule={schedule}", "batch.sequences=512",
            *EVEN,
        ],
    )  # fmt: skip
    folded, full = simulate(job).step, simulate(job.replace(resolution="full")).step
    # Sends that ranks await share links of the torus with other transfers: not in the folded run.
    awaited = schedule == "dualpipe"
    assert full.time_s == pytest.approx(folded.time_s, rel=2e-3 if awaited else 1e-3)
    assert not awaited or full.time_s >= folded.time_s
    assert full.lower_bound_s <= full.time_s <= full.upper_bound_s


@pytest.mark.parametrize("distance", [(1, 1), (3, 3), (8, 8), (11, 5)])
def test_a_shift_along_a_ring_puts_its_distance_on_every_link(distance: tuple[int, int]) -> None:
    shift, hops = distance
    ring = TorusShares(0.25, (4, 16))
    chips = np.arange(64)
    assert ring.busiest_link(chips, (chips + 4 * shift) % 64) == hops
    assert ring.busiest_link(chips, chips) == 1


def test_the_busiest_link_is_that_of_the_routes_of_the_topology() -> None:
    cluster = load_cluster("tpu-v5e-256-pod")
    rng = np.random.default_rng(3)
    for _ in range(5):
        source, target = np.arange(256), rng.permutation(256)
        routes = cluster.topology().routes(source, target)
        assert cluster.node.scale_up_shares.busiest_link(source, target) == np.bincount(routes.links).max()


def test_the_first_group_has_the_draws_of_the_folded_run() -> None:
    full, folded = prepare(scenario(FULL)), prepare(scenario())
    first, only = full.programs[0].variation, folded.program.variation
    assert (first.clock == only.clock).all() and (first.loads == only.loads).all()
    second = full.programs[1].variation
    assert (second.clock != only.clock).any() and (second.loads != only.loads).any()


def test_every_gpu_is_in_one_place() -> None:
    plan = ParallelPlan(pp=4, ep=8, tp=2, expert_tp=2, sequence_parallel=True)
    layout = Layout(plan, 128, 8)
    gpus = grouped_gpus(layout)
    assert sorted(gpus.ravel().tolist()) == list(range(128))
    for rank in range(4):
        for group in gpus[rank]:
            assert tuple(group.tolist()) == layout.ep_group(int(group[0]))


# -- what goes over the links ------------------------------------------------------------------------


def link_map_of(program: Program) -> ClusterLinkMap:
    assert isinstance(program.link_map, ClusterLinkMap)
    return program.link_map


def test_an_even_exchange_puts_its_bytes_on_every_port() -> None:
    prepared = prepare(scenario(FULL, *EVEN))
    assert prepared.whole is not None
    link_map, even = link_map_of(prepared.programs[1]), np.ones(16)
    for outward in (True, False):
        demand = link_map.pattern(2, outward).demand(3e6, 5e6, even, even)
        amount = dict(zip(demand.links.tolist(), demand.bytes.tolist(), strict=True))
        nic, up = link_map.ports(2)
        assert len(nic) == len(up) == 16
        assert [amount[link] for link in nic.tolist()] == pytest.approx([3e6] * 16)
        assert [amount[link] for link in up.tolist()] == pytest.approx([5e6] * 16)


def test_a_hot_rank_receives_more_and_the_sum_stays() -> None:
    link_map = link_map_of(prepare(scenario(FULL, *EVEN)).programs[0])
    load = np.ones(16)
    load[3] = 2.0
    load[4:] = 15.0 / 13.0 - 2.0 / 13.0  # mean 1 over the others
    even = link_map.pattern(0, True).demand(0.0, 1e6, np.ones(16), np.ones(16))
    hot = link_map.pattern(0, True).demand(0.0, 1e6, load, np.ones(16))
    table = link_map.topology.wiring.names
    into = [
        2 * cable + 1 for cable, tail in enumerate(link_map.topology.wiring.tails) if table[tail] == "gpu:3"
    ]
    bytes_in = dict(zip(hot.links.tolist(), hot.bytes.tolist(), strict=True))
    assert any(bytes_in.get(link) == pytest.approx(2e6) for link in into)
    assert fsum(even.bytes) == pytest.approx(2 * 16 * 1e6)


def test_links_carry_what_the_transfers_sent() -> None:
    prepared = prepare(scenario(FULL, *EVEN))
    executions = engine_of().execute(prepared.programs)
    sent = 0.0
    for program, execution in zip(prepared.programs, executions, strict=True):
        for steps in program.ranks:
            for step in steps:
                for number in step.code.transfers:
                    transfer = step.code.tasks[number].transfer
                    assert transfer is not None
                    sent += transfer.cost.nic_bytes * 16
        sent += len(execution.sends) * program.costs.send_bytes * 16
    nic = fsum(
        float(executions[0].carried_bytes[program.link_map.ports(rank)[0]].sum())
        for program in prepared.programs
        for rank in range(4)
    )
    assert nic == pytest.approx(sent)


def test_hash_collisions_never_help() -> None:
    modulo, ecmp = (run(FULL, *EVEN, f"spreading={how}").step.time_s for how in ("modulo", "ecmp"))
    assert ecmp >= modulo


# -- what it shows -----------------------------------------------------------------------------------


def test_waiting_and_work_belong_to_every_gpu() -> None:
    full = run(FULL).full
    assert full is not None
    assert full.gpu_times.gpu == tuple(range(128))
    assert all(seconds > 0.0 for seconds in full.gpu_times.compute_s)
    assert all(seconds >= 0.0 for seconds in (*full.gpu_times.wait_s, *full.gpu_times.held_up_s))
    assert max(full.group_end_s) <= run(FULL).step.time_s
    assert {row.phase for row in full.skew} == {"dispatch F", "combine F", "dispatch B", "combine B"}


def test_heat_maps_are_tables_of_the_cluster() -> None:
    full = run(FULL).full
    assert full is not None
    maps = {heat_map.title: heat_map for heat_map in full.heat_maps}
    # 16 GPUs a plane sit on one leaf: no links between switches.
    names = {"NIC load", "scale-up port load", "wait at barriers", "time the group waited for it"}
    assert set(maps) == {*names, "expert load"}
    for heat_map in full.heat_maps:
        assert len(heat_map.values) == len(heat_map.rows)
        assert {len(row) for row in heat_map.values} == {len(heat_map.columns)}
    assert (len(maps["NIC load"].rows), len(maps["NIC load"].columns)) == (16, 8)
    assert (len(maps["wait at barriers"].rows), len(maps["wait at barriers"].columns)) == (4, 32)
    assert (len(maps["expert load"].rows), len(maps["expert load"].columns)) == (59, 16)
    load = [v for row in maps["NIC load"].values for v in row if v is not None]
    assert all(0.0 < v < 1.0 for v in load)


# -- faults ------------------------------------------------------------------------------------------


def test_a_slow_gpu_is_found_and_slows_the_step() -> None:
    result = faulty({"kind": "slow-gpu", "gpu": 37, "speed": 0.7}, even=False)
    assert result.full is not None
    first = result.full.stragglers[0]
    assert (first.gpu, first.pipeline_rank, first.group, first.member) == (37, 1, 0, 5)
    assert first.compute_over_group == pytest.approx(1 / 0.7, rel=0.1)
    assert effect(result) > 0.0


def nic_bytes(*overrides: str) -> list[float]:
    """For each place in a node: bytes on the NIC links of its GPUs, both directions."""
    prepared = prepare(scenario(FULL, *EVEN, *overrides))
    carried = engine_of().execute(prepared.programs)[0].carried_bytes
    assert prepared.whole is not None
    topology = prepared.whole.topology
    place = np.repeat(topology.wiring.tails % 8, 2)
    nics = np.array(topology.links().kinds) == "nic"
    return [fsum(carried[nics & (place == local)].tolist()) for local in range(8)]


def test_the_other_planes_carry_what_a_dead_plane_cannot() -> None:
    before, now = nic_bytes(), nic_bytes('faults=[{kind: down, link: "plane:2"}]')
    assert now[2] == 0.0 < before[2]
    assert fsum(now) == pytest.approx(fsum(before))
    assert max(now) > 1.1 * max(before)
    assert effect(faulty({"kind": "down", "link": "plane:2"})) > 0.0


def test_half_a_nic_makes_transfers_of_its_node_twice_as_long() -> None:
    prepared = prepare(scenario(FULL, *EVEN, 'faults=[{kind: slow-link, link: "nic:3", bandwidth: 0.5}]'))
    link_map = link_map_of(prepared.programs[0])
    nic, scale_up = link_map.slowness(0, "dispatch F")
    assert isinstance(nic, np.ndarray) and scale_up == 1.0
    assert nic.max() == pytest.approx(2.0) and (nic >= 1.0).all()
    assert link_map.slowness(1, "dispatch F") == (1.0, 1.0)  # another pipeline rank


def test_jitter_costs_time() -> None:
    assert effect(faulty({"kind": "jitter", "gpu": "all", "cv": 0.2}, even=False)) > 0.0


def test_a_lost_node_takes_its_groups_along() -> None:
    result = faulty({"kind": "node-loss", "node": 0})
    assert result.full is not None
    assert result.full.lost_groups == (0,) and result.full.groups == 1
    assert result.step.tokens == 256 * 4096 // 2
    assert 0 not in result.full.gpu_times.gpu and 16 in result.full.gpu_times.gpu


def test_losing_every_copy_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match=r"node 0, 2 lost: .* pipeline rank 0.*spares"):
        faulty({"kind": "node-loss", "node": 0}, {"kind": "node-loss", "node": 2})


def test_a_gpu_without_any_link_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="gpu:3"):
        faulty({"kind": "down", "link": "gpu:3"})


def test_each_fault_is_priced_alone_and_together() -> None:
    slow_nic = {"kind": "slow-link", "link": "nic:9", "bandwidth": 0.5}
    result = faulty({"kind": "slow-gpu", "gpu": 1, "speed": 0.8}, slow_nic)
    assert result.full is not None
    causes = result.full.causes
    faults = ["slow-gpu GPU 1 at 0.8 of its speed", "slow-link nic:9 at 0.5 of its bandwidth"]
    assert [c.cause for c in causes] == ["no fault", *faults, "all of them"]
    assert causes[0].step_s == run(FULL, *EVEN).step.time_s
    assert causes[3].step_s == result.step.time_s


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "slow-gpu", "gpu": 128, "speed": 0.5}, r"faults\[0\].gpu=128: .*GPUs 0 to 127"),
        ({"kind": "slow-gpu", "gpu": [], "speed": 0.5}, r"gpu=none"),
        ({"kind": "slow-gpu", "gpu": 1, "speed": 0}, "speed"),
        ({"kind": "slow-gpu", "gpu": 1, "speed": 1.5}, "speed"),
        ({"kind": "jitter", "gpu": "some", "cv": 0.1}, "gpu"),
        ({"kind": "node-loss", "node": 16}, "nodes 0 to 15"),
        ({"kind": "down", "link": "nic:128"}, "nic:128"),
        ({"kind": "down", "link": "plane:8"}, "plane:8"),
        ({"kind": "down", "link": "nonsense"}, "nonsense"),
        ({"kind": "slow-link", "link": "nic:1", "bandwidth": 0}, "bandwidth"),
        ({"kind": "explodes"}, "explodes"),
    ],
)
def test_faults_of_what_is_not_there(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        faulty(fault)


def test_faults_need_every_gpu() -> None:
    with pytest.raises(InputError, match="resolution: full"):
        run('faults=[{kind: down, link: "nic:1"}]')
