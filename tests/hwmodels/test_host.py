"""Hosts as shipped, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest

from moesim.hwmodels import InputError, list_hosts, load_host
from moesim.hwmodels.host import BlockFamily, CallKind, Host
from moesim.hwmodels.node import Node, list_nodes, load_node
from moesim.hwmodels.validation import validate_model


def test_every_shipped_host_knows_every_call() -> None:
    for name in list_hosts():
        host = load_host(name)
        for kind in get_args(CallKind):
            forward, backward = (host.call_s(kind, side) for side in (True, False))
            in_forward = kind not in ("megatron parameter", "split weights")  # of the backward alone
            assert 0.0 <= backward < 2e-2 and in_forward <= (forward > 0.0) and forward < 2e-2, (name, kind)


def test_a_host_like_another_is_slower_by_its_factor() -> None:
    grace, base = load_host("grace-gb200"), load_host("emerald-rapids-vm")
    assert grace.factor is not None
    for kind in ("product", "norm"):
        assert grace.call_s(kind, False) == pytest.approx(grace.factor.value * base.call_s(kind, False))


def test_calls_inside_a_block_take_longer_than_in_a_row() -> None:
    base = load_host("emerald-rapids-vm")
    norm = base.calls["norm"]
    for family in ("dense", "routed", "latent routed", "other"):
        ratio = base.in_block[family]
        assert ratio.forward > 1.0 and base.call_s("norm", True, family) == norm.forward * ratio.forward
        assert base.call_s("norm", False, family) == norm.backward * ratio.backward
    fewer = base.model_copy(update={"in_block": {"other": base.in_block["other"]}})
    assert fewer.call_s("norm", True, "routed") == base.call_s("norm", True)
    for kind in ("fsdp", "dtensor", "graph"):  # measured inside blocks, and so not made longer
        assert base.calls[kind].whole and base.call_s(kind, True) == base.calls[kind].forward


def test_hosts_that_nobody_measured_say_so_and_have_a_range() -> None:
    for name in list_hosts():
        host = load_host(name)
        number = host.factor or host.spread
        assert number is not None and number.between is not None
        low, high = number.between
        assert low < number.value < high
        assert host.like is None or number.kind in ("derived", "assumed")


def test_a_host_that_leaves_out_a_call_is_refused() -> None:
    data = load_host("emerald-rapids-vm").model_dump(mode="json", exclude_none=True)
    del data["calls"]["gate"]
    with pytest.raises(ValueError, match="calls has no time for gate; give one"):
        Host.model_validate(data)


def test_a_host_is_like_one_that_was_measured() -> None:
    grace = load_host("grace-gb200")
    second = grace.model_copy(update={"name": "mine", "like": "grace-gb200"})
    with pytest.raises(InputError, match="name the host that has calls"):
        second.call_s("norm", True)


def test_a_host_like_another_keeps_the_calls_that_were_measured_on_it() -> None:
    base, grace = load_host("emerald-rapids-vm"), load_host("grace-gb200")
    own = grace.model_copy(update={"calls": {"norm": base.calls["norm"]}})
    cases: tuple[tuple[BlockFamily, bool], ...] = (("routed", False), ("dense", True))
    for family, compiled in cases:
        assert own.call_s("norm", True, family, compiled) == base.call_s("norm", True, family, compiled)
        assert own.call_s("rope", True, family, compiled) == grace.call_s("rope", True, family, compiled)
    data = own.model_dump(mode="json", exclude_none=True)
    assert Host.model_validate(data).calls.keys() == {"norm"}
    with pytest.raises(ValueError, match="with those calls that were measured"):
        Host.model_validate({**data, "factor": None})


def test_a_compiled_block_has_a_further_ratio_and_its_own_time_of_dtensor() -> None:
    base = load_host("emerald-rapids-vm")
    for family in ("dense", "routed", "latent routed"):
        eager, compiled = (base.call_s("norm", True, family, how) for how in (False, True))
        assert compiled == pytest.approx(eager * base.compiled[family].forward)
    around = base.calls["dtensor"].compiled
    assert around is not None and base.call_s("dtensor", False, "dense", True) == around.backward
    # Around a compiled block FSDP2 was not measured to take another time.
    assert base.call_s("fsdp", True, "dense", True) == base.calls["fsdp"].forward


def test_a_node_names_a_shipped_host_with_its_source() -> None:
    hosts = {name: load_node(name).host for name in list_nodes()}
    assert (hosts["hgx-h100"], hosts["gb200-nvl72"], hosts["tpu-v4-2048"]) == (
        "xeon-8480c",
        "grace-gb200",
        None,
    )
    assert load_node("hgx-b200").host_kind == "assumed"
    data = load_node("hgx-h100").model_dump(mode="json", exclude_none=True)
    with pytest.raises(InputError, match=r"host='xeon' is no shipped host; shipped: .*xeon-8480c"):
        validate_model(Node, data | {"host": "xeon"}, "a file")
    with pytest.raises(InputError, match="host and host_source belong together"):
        validate_model(Node, {k: v for k, v in data.items() if k != "host_source"}, "a file")
