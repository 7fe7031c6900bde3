"""Which pools a fleet may have, and what is refused by name instead of forgetting a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.layout.job import split_over_pools
from moesim.simulator.scenario import Scenario


def test_ranks_follow_the_gpus(mixed: Scenario) -> None:
    parts = split_over_pools(mixed.replace(**{"parallel.pp": 8}))
    assert [(p.ranks, p.cluster.n_gpus) for p in parts] == [(range(4), 16), (range(4, 8), 16)]
    assert all(p.scenario.machine.n_gpus == 32 and p.scenario.fleet is None for p in parts)
    three = mixed.to_dict()["fleet"]["pools"]
    three[0] |= {"nodes": 4, "communication_sms": 12}
    parts = split_over_pools(mixed.replace(fleet={"pools": three}, **{"parallel.pp": 6}))
    assert [p.ranks for p in parts] == [range(4), range(4, 6)]
    assert [p.scenario.communication.sms for p in parts] == [12, 20]


def test_a_fleet_takes_the_place_of_the_cluster_and_back(mixed: Scenario) -> None:
    one = mixed.replace(cluster="h100-1024")
    assert one.fleet is None and one.machine.n_gpus == 1024
    back = mixed.to_dict()["fleet"]
    # A name and a profile of H100 alone are left to the rules where A100 comes in, unless they are stated.
    assert (one.replace(fleet=back).name, one.replace(fleet=back).profile) != (mixed.name, mixed.profile)
    again = one.replace(fleet=back, name=mixed.name, profile=mixed.profile)
    assert again.cluster is None and again == mixed
    assert Scenario.model_validate(mixed.to_dict()) == mixed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.pp": 3}, r"parallel\.pp=3 does not spread .*multiple of 2; take 2 or 4"),
        ({"schedule": "dualpipe"}, r"dualpipe keeps stage 0 on pipeline ranks 0 and 3.*dualpipev"),
        ({"resolution": "full"}, r"resolution=full needs one cluster"),
        ({"faults": [{"kind": "slow-gpu", "gpu": 0, "speed": 0.5}]}, "faults need every GPU"),
        ({"stages.blocks": ["embedding moe", "moe", "moe", "moe head"]}, r"stages\.blocks fixes a part"),
        ({"run.ramp": {"sequences": 64, "tokens": 1e9}}, r"run: ramps, phases"),
        (
            {"profile": "h100-layers"},
            r"fleet\.pools\.1 \(a100-sxm\): profile=h100-layers .*profile of the pool",
        ),
        ({"communication.sms": 120}, r"fleet\.pools\.1 \(a100-sxm\): communication\.sms=120 .*of the pool"),
        ({"precision": "fp8"}, r"fleet\.pools\.1 \(a100-sxm\): .*fp8"),
        ({"fleet": {"pools": [{"cluster": "h100-1024"}]}}, "at least 2"),
        (
            {"fleet": {"pools": [{"cluster": "h100-1024"}, {"cluster": "h101"}]}},
            r"pools\.1: unknown cluster 'h101'",
        ),
        (
            {"fleet": {"pools": [{"cluster": "h100-1024", "ranks": 2}, {"cluster": "h20-2048"}]}},
            "ranks: unknown key",
        ),
        ({"cluster.nodes": 2}, "cluster"),
        ({"cluster": None, "fleet": None}, "cluster is missing: give a cluster, or a fleet"),
    ],
)
def test_what_does_not_fit_is_named(mixed: Scenario, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        moesim.simulate(mixed.replace(**changes))


def test_both_a_cluster_and_a_fleet_are_one_too_many(mixed: Scenario) -> None:
    from moesim.hwmodels.validation import validate_model

    with pytest.raises(InputError, match="cluster and fleet exclude each other"):
        validate_model(Scenario, mixed.to_dict() | {"cluster": "h100-1024"}, "both")


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: moesim.simulate(s, uncertainty=True),
        lambda s: moesim.sensitivity(s),
        lambda s: moesim.timeline(s),
        lambda s: moesim.run(s),
    ],
)
def test_what_needs_one_cluster_says_so(mixed: Scenario, ask: Callable[[Scenario], object]) -> None:
    with pytest.raises(InputError, match=r"fleet of several clusters \(fleet\.pools\), and this needs one"):
        ask(mixed)


def test_nodes_that_do_not_fit_the_network(mixed: Scenario) -> None:
    pools = mixed.to_dict()["fleet"]["pools"]
    pools[1]["nodes"] = 1_000_000
    with pytest.raises(InputError, match=r"fleet\.pools\.1: "):
        split_over_pools(mixed.replace(fleet={"pools": pools}))
