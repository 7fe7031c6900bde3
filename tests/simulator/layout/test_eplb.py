from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.eplb import (
    ExpertPlacement,
    imbalance,
    placement_in_order,
    plan_placement,
    replicate,
)
from moesim.simulator.layout.popularity import zipf_shares
from moesim.simulator.scenario.sections import Policy

SHAPES = st.sampled_from([(16, 4, 2, 4, 0), (16, 4, 2, 4, 4), (32, 8, 4, 8, 16), (12, 6, 2, 2, 6)])
"""(experts, ranks, nodes, groups, redundant)."""


def random_loads(seed: int, layers: int, experts: int) -> FloatArray:
    return np.random.default_rng(seed).pareto(1.2, size=(layers, experts)) + 0.01


def check(p: ExpertPlacement, experts: int, redundant: int, ranks: int) -> None:
    """Every expert has a replica, every rank the same number of slots, and the replicas add up."""
    layers = len(p.replicas)
    assert p.expert_of_slot.shape == (layers, experts + redundant)
    assert p.slots_per_rank * ranks == experts + redundant
    counted = np.array([np.bincount(row, minlength=experts) for row in p.expert_of_slot])
    assert np.array_equal(counted, p.replicas)
    assert (p.replicas >= 1).all() and (p.replicas.sum(axis=1) == experts + redundant).all()


@settings(max_examples=60)
@given(SHAPES, st.integers(0, 2**32), st.sampled_from(["global", "hierarchical"]))
def test_a_plan_is_complete_and_never_worse(
    shape: tuple[int, int, int, int, int], seed: int, policy: Policy
) -> None:
    experts, ranks, nodes, groups, redundant = shape
    loads = random_loads(seed, 3, experts)
    kept = loads.copy()
    plan = plan_placement(
        loads, ranks=ranks, redundant_experts=redundant, policy=policy, groups=groups, nodes=nodes
    )
    check(plan, experts, redundant, ranks)
    assert np.array_equal(loads, kept)
    assert np.allclose(plan.rank_load(loads).sum(axis=1), loads.sum(axis=1))
    before = imbalance(placement_in_order(3, experts, ranks).rank_load(loads))
    assert (imbalance(plan.rank_load(loads)) <= before * (1 + 1e-12)).all()


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 2**32))
def test_hierarchical_keeps_a_group_on_one_node(shape: tuple[int, int, int, int, int], seed: int) -> None:
    experts, ranks, nodes, groups, redundant = shape
    plan = plan_placement(
        random_loads(seed, 4, experts),
        ranks=ranks, redundant_experts=redundant, policy="hierarchical", groups=groups, nodes=nodes,
    )  # fmt: skip
    node_of_slot = np.arange(experts + redundant) // ((experts + redundant) // nodes)
    group_of_slot = plan.expert_of_slot // (experts // groups)
    for row in group_of_slot:
        for group in range(groups):
            assert len(set(node_of_slot[row == group])) == 1


def optimum(items: FloatArray, bins: int) -> float:
    """Smallest possible heaviest bin, every assignment of equal counts tried."""
    size = len(items) // bins
    best = np.inf
    for order in set(permutations(range(len(items)))):
        if all(order[b * size] < order[(b + 1) * size] for b in range(bins - 1)):
            best = min(best, max(items[list(order[b * size : (b + 1) * size])].sum() for b in range(bins)))
    return float(best)


@settings(max_examples=25)
@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_packing_is_within_the_proven_bound_of_the_optimum(values: list[float], bins: int) -> None:
    items = np.array(values)
    heaviest = plan_placement(items[None], ranks=bins).rank_load(items[None]).max()
    rounds = np.sort(items)[::-1].reshape(-1, bins)
    best = optimum(items, bins)
    assert best - 1e-9 <= heaviest <= best + np.ptp(rounds, axis=1).max() + 1e-9


@settings(max_examples=25)
@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.sampled_from([2, 4]))
def test_replicas_minimise_the_hottest_replica(values: list[float], redundant: int) -> None:
    items = np.array(values)
    replicas = replicate(items[None], redundant, 2)[0]
    tried = [1 + np.array(extra) for extra in np.ndindex(2, 2, 2, 2) if sum(extra) == redundant]
    assert (items / replicas).max() == min((items / choice).max() for choice in tried)


@pytest.mark.parametrize("policy", ["global", "hierarchical"])
def test_no_rank_is_the_heaviest_layer_after_layer(policy: Policy) -> None:
    # One expert outweighs the rest: some rank must be heavy in every layer, but not always the same.
    loads = np.ones((16, 32))
    loads[:, 5] = 40.0
    plan = plan_placement(loads, ranks=8, policy=policy, groups=4, nodes=2)
    heavy = plan.rank_load(loads).argmax(axis=1)
    most = 2 if policy == "global" else 4  # a group stays on one of two nodes in a layer
    assert np.bincount(heavy, minlength=8).max() <= most


def test_zipf_at_home() -> None:
    loads = zipf_shares(0.5, 58, 256, 8, seed=0)
    common = {"ranks": 64, "groups": 8, "nodes": 8}
    before = imbalance(placement_in_order(58, 256, 64).rank_load(loads)).mean()
    packed = imbalance(plan_placement(loads, policy="global", **common).rank_load(loads)).mean()
    full = plan_placement(loads, policy="global", redundant_experts=64, **common)
    local = plan_placement(loads, policy="hierarchical", redundant_experts=64, **common)
    after, by_node = (imbalance(p.rank_load(loads)).mean() for p in (full, local))
    # One expert cannot be cut without a replica; nodes keep their groups' total load.
    assert before > packed > by_node > after and after < 1.01
    nodes = loads.reshape(58, 8, 32).sum(axis=2)
    assert by_node >= (nodes.max(axis=1) * 8).mean() * (1 - 1e-9)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"ranks": 3}, "experts=8 cannot be shared evenly by ranks=3 .nearest experts: 6, 9"),
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 4, "redundant_experts": 2}, "redundant_experts=2 .* ranks=4 .*nearest.*0, 4"),
        ({"ranks": 4, "redundant_experts": -4}, "redundant_experts=-4"),
        ({"ranks": 4, "redundant_experts": 28}, "at most 24"),
        ({"ranks": 4, "policy": "hierarchical", "groups": 3}, "groups=3"),
        ({"ranks": 4, "policy": "hierarchical", "groups": 2, "nodes": 4}, "groups=2 .*nodes=4.*global"),
        ({"ranks": 4, "policy": "hierarchical", "groups": 4, "nodes": 0}, "nodes=0"),
        ({"ranks": 4, "policy": "best"}, "policy='best'"),
    ],
)
def test_what_cannot_be_planned(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_placement(np.ones((2, 8)), **settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.ones(8), np.full((2, 8), -1.0), np.full((2, 8), np.nan), np.ones((0, 8))])
def test_loads_must_be_a_table_of_counts(bad: FloatArray) -> None:
    with pytest.raises(InputError, match="table"):
        plan_placement(bad, ranks=2)
