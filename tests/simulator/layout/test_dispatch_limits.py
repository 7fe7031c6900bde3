"""A dispatcher runs on its accelerators, in NVLink domains of its size, and with the SMs that it takes."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.dispatch_limits import check_dispatcher, check_domains
from moesim.simulator.layout.job import resolve
from moesim.simulator.scenario import load_scenario

GB200 = "cluster={node: gb200-nvl72-64, nodes: 4, network: ft3-ib-400g}"
RACK = "cluster={node: gb200-nvl72, nodes: 2, network: ft3-ib-400g}"
A100 = "cluster={node: hgx-a100, nodes: 8, network: ft3-ib-400g}"
MI300X = "cluster={node: mi300x-8, nodes: 8, network: ft3-ib-400g}"


def checked(*overrides: str) -> None:
    scenario = load_scenario(
        "deepseek-v3-2048xh800",
        ["stages.blocks=[embedding moe*2, moe*2, moe*2, moe*2 head]", "batch.sequences=512", *overrides],
    )
    job = resolve(scenario)
    check_dispatcher(scenario, job.cluster, job.layout)


def plan(ep: int, microbatch: int = 1) -> str:
    return f"parallel={{tp: 1, pp: 4, ep: {ep}, cp: 1, microbatch: {microbatch}, zero_stage: 1}}"


@pytest.mark.parametrize(
    ("overrides", "words", "nearest"),
    [
        ((A100, plan(8), "profile=a100-layers", "precision=bf16"), "a100-sxm is Ampere", "nccl"),
        ((MI300X, plan(8), "profile=generic-roofline"), "mi300x is CDNA3", "nccl"),
        ((GB200, plan(64), "profile=gb200-layers"), "at most 8 ranks in one NVLink domain", "hybridep"),
        ((plan(256), "cluster.nodes=128"), "at most 20 NVLink domains", "hybridep"),
        ((RACK, plan(36), "profile=gb200-layers"), "and the group has 36", "hybridep"),
    ],
)  # fmt: skip
def test_a_dispatcher_off_its_fabric_is_refused_with_one_that_runs(
    overrides: tuple[str, ...], words: str, nearest: str
) -> None:
    with pytest.raises(InputError, match=words) as raised:
        checked(*overrides, "communication.kernels=deepep-2025-04")
    assert raised.value.key == "communication.kernels" and raised.value.nearest[0] == nearest
    assert f"use communication.kernels={nearest}" in str(raised.value)
    checked(*overrides, f"communication.kernels={nearest}")


def test_hybrid_ep_serves_a_rack_and_several_and_keeps_its_queues() -> None:
    for ep in (32, 64):
        checked(GB200, plan(ep), "profile=gb200-layers", "communication.kernels=hybridep")
    checked(plan(16), "cluster.nodes=32", "communication.kernels=hybridep")
    with pytest.raises(InputError, match=r"a rank sends 24,576 tokens.*use parallel\.microbatch=5"):
        checked(plan(16, 6), "cluster.nodes=32", "batch.sequences=1536", "communication.kernels=hybridep")
    # Inside one domain there are no queues of a NIC.
    checked(plan(8, 6), "cluster.nodes=32", "batch.sequences=1536", "communication.kernels=hybridep")


def test_only_hybrid_ep_permutes_inside_its_kernels() -> None:
    with pytest.raises(InputError, match="does not permute rows inside its kernels"):
        checked(plan(16), "cluster.nodes=32", "communication.fused_permutation=true")


@pytest.mark.parametrize(
    ("ep", "expert_tp", "n_gpus", "domain", "nearest"),
    [
        (12, 1, 24, 8, (8, 24)),
        (64, 1, 576, 72, (36, 72)),
        (6, 2, 48, 8, (4, 8)),
    ],
)
def test_groups_that_cross_some_domains_and_not_others_are_refused(
    ep: int, expert_tp: int, n_gpus: int, domain: int, nearest: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match=f"NVLink domain of {domain} GPUs") as raised:
        check_domains(ep, expert_tp, n_gpus, domain)
    assert tuple(raised.value.nearest) == nearest
    for legal in nearest:
        check_domains(legal, expert_tp, n_gpus, domain)
