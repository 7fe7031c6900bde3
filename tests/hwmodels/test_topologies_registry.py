"""The registry of topologies is what files, unions and small test topologies are made from."""

from __future__ import annotations

from typing import Literal

import pytest
from topology_cases import cases

from moesim.hwmodels import Network, ScaleUp, list_networks, list_scale_ups, load_network, load_scale_up
from moesim.hwmodels.topologies.description import ScaleUpFabric
from moesim.hwmodels.topologies.part import ScaleUpSpec, TopologySpec, any_fabric, kind_rows
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP
from moesim.hwmodels.topologies.scale_up_parts import NVSWITCH, NvswitchFabric, NvswitchNode
from moesim.hwmodels.validation import registry

SPECS: list[TopologySpec] = [*SCALE_UP.values(), *SCALE_OUT.values()]


def test_every_shipped_file_is_of_a_registered_kind_and_every_example_of_its_own() -> None:
    assert {load_network(name).kind for name in list_networks()} <= set(SCALE_OUT)
    assert {load_scale_up(name).kind for name in list_scale_ups()} <= set(SCALE_UP)
    assert all(load_scale_up(spec.example).kind == spec.kind for spec in SCALE_UP.values())
    assert all(load_network(spec.example).kind == spec.kind for spec in SCALE_OUT.values() if spec.example)


def test_the_property_tests_run_on_every_kind() -> None:
    inside = {topo.node.scale_up.kind for topo in cases().values() if topo.node.scale_up is not None}
    assert inside | {NVSWITCH.kind} >= set(SCALE_UP)
    assert {topo.kind for topo in cases().values()} >= set(SCALE_OUT)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_kind_says_what_it_is(spec: TopologySpec) -> None:
    assert spec.what.endswith(".") and "kind" not in spec.keys
    assert bool(spec.keys) == (spec.fabric is not None)


@pytest.mark.parametrize(("model", "specs"), [(Network, SCALE_OUT), (ScaleUp, SCALE_UP)])
def test_the_schema_of_a_file_holds_the_keys_of_every_kind(
    model: type[Network] | type[ScaleUp], specs: dict[str, TopologySpec]
) -> None:
    described = model.model_json_schema()["$defs"]
    for spec in specs.values():
        if spec.fabric is not None:
            assert set(spec.keys) <= set(described[spec.fabric.__name__]["properties"])


def test_a_fabric_of_another_kind_and_a_second_spec_of_a_kind_are_refused() -> None:
    class Other(ScaleUpFabric):
        kind: Literal["star"]

    with pytest.raises(ValueError, match=r"'nvswitch' has a fabric whose kind is \('star',\)"):
        ScaleUpSpec("nvswitch", Other, NvswitchNode, "")
    with pytest.raises(ValueError, match="'nvswitch' is registered twice"):
        registry(NVSWITCH, NVSWITCH, key="kind")


def test_a_union_of_one_kind_is_that_kind_and_rows_are_for_people() -> None:
    assert kind_rows({"nvswitch": NVSWITCH}) == [
        {
            "kind": "nvswitch",
            "keys": "switches, links_per_gpu",
            "example": "hgx-hopper",
            "what": "One server (HGX).",
        }
    ]
    assert any_fabric({"nvswitch": NVSWITCH}).__origin__ is NvswitchFabric
