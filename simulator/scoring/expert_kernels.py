"""Predicts the stand-alone benchmarks that DeepEP, Hybrid-EP and UCCL-EP publish of their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import Node, load_node
from moesim.simulator.cost.communication import EpKernels, EpOperation, Links, ep_transfer, notify_seconds
from moesim.simulator.cost.dispatch_direct import direct_transfer
from moesim.simulator.cost.dispatch_domain import DomainGroup, domain_transfer
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.layout.routing import Gate, LinkBytes, direct_bytes, expected_targets, transfer_bytes
from moesim.simulator.model.dispatchers import dispatcher
from moesim.simulator.model.precision import Format, row_bytes

Timed = Literal["kernel only", "torch API"]
"""What a benchmark times: the kernel, or the call of its Python interface with all that it does."""
COPY_SHARE = 0.8
"""Share of the memory's nominal rate at which the interface copies the payload out of, or into, its buffer
(training reads and writes the buffer instead)."""


@dataclass(frozen=True, slots=True)
class KernelBenchmark:
    """One stand-alone benchmark of expert-parallel kernels; machine and profile are given by name."""

    operation: EpOperation
    kernels: str
    ranks: int
    tokens: float
    """Tokens of one rank."""
    hidden: int
    gate: Gate
    wire: Format
    sms: int
    node: str
    network: str
    profile: str
    timed: Timed

    @property
    def machine(self) -> Node:
        """The node itself."""
        return load_node(self.node)

    @property
    def nodes(self) -> int:
        """NVLink domains of the group."""
        return max(1, self.ranks // self.machine.n_gpus)

    @property
    def traffic(self) -> LinkBytes:
        """Bytes that one rank sends in a dispatch, or receives in a combine."""
        local, row = min(self.ranks, self.machine.n_gpus), row_bytes(self.hidden, self.wire)
        if dispatcher(self.kernels).transport == "direct":
            return direct_bytes(self.tokens, self.gate.top_k, self.ranks, local, row)
        return transfer_bytes(expected_targets(self.gate, self.ranks, local), self.tokens, row)

    @property
    def logical_bytes(self) -> float:
        """Bytes that the benchmark counts: to all nodes across nodes, else to all ranks, its own included."""
        return self.traffic.logical_ib_bytes if self.nodes > 1 else self.traffic.logical_nvlink_bytes


def benchmark_seconds(run: KernelBenchmark) -> float:
    """Predicted seconds of a benchmark on idle GPUs, of the kernel alone or of the whole call."""
    links = _links(run)
    transfer = _transfer(run, links)
    notify_s = notify_seconds(links, run.nodes)
    if dispatcher(run.kernels).transport == "direct":
        return transfer.launch_s + transfer.payload_s
    if dispatcher(run.kernels).transport != "domain":
        # The time of a call is inside DeepEP's kernel, and the exchange of counts is a kernel of its own.
        called = transfer.launch_s - (notify_s if run.timed == "kernel only" else 0.0)
        return called + transfer.payload_s
    if run.timed == "kernel only":
        return transfer.payload_s
    memory = run.machine.accelerator.hbm_bandwidth.value
    copied = 2.0 * run.traffic.logical_nvlink_bytes / (COPY_SHARE * memory)
    return transfer.launch_s - notify_s + transfer.payload_s + copied


def _transfer(run: KernelBenchmark, links: Links) -> TransferCost:
    profile, row = load_profile(run.profile), row_bytes(run.hidden, run.wire)
    kernels = EpKernels(run.sms, run.kernels, tokens=run.tokens, row_bytes=row)
    if dispatcher(run.kernels).transport == "direct":
        return direct_transfer(run.operation, run.traffic, links, profile, kernels, nodes=run.nodes)
    if dispatcher(run.kernels).transport == "domain":
        # The benchmark prepares every dispatch anew.
        map_bytes = run.tokens * run.gate.experts if run.operation == "dispatch" else 0.0
        group = DomainGroup(run.ranks, run.nodes, run.wire, 1.0, map_bytes)
        return domain_transfer(run.operation, run.traffic, links, profile, kernels, group)
    return ep_transfer(run.operation, run.traffic, links, profile, kernels, nodes=run.nodes)


def _links(run: KernelBenchmark) -> Links:
    node, fabric = run.machine, load_network(run.network).fabric
    return Links(
        scale_up_bytes_per_s=node.scale_up_bytes_per_s,
        scale_up_latency_s=node.scale_up_latency_s,
        nic_bytes_per_s=node.scale_out_bytes_per_s,
        nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
        gpus_per_node=node.n_gpus,
        ep_per_node=run.ranks // run.nodes,
    )
