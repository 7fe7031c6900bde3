"""Predicts the stand-alone benchmarks that DeepEP, Hybrid-EP and UCCL-EP publish of their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import Node, load_node
from moesim.simulator.cost.transfers import dispatcher_transfer
from moesim.simulator.dispatchers.protocol import Call, EpOperation, LinkBytes, Links, notify_seconds
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.routing import Gate, expected_targets
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
    def call(self) -> Call:
        """The call that it repeats; every dispatch is prepared anew."""
        return Call(
            self.ranks,
            self.nodes,
            self.sms,
            tokens=self.tokens,
            row_bytes=row_bytes(self.hidden, self.wire),
            wire=self.wire,
            row=self.hidden,
            choices=self.gate.top_k,
            experts=self.gate.experts,
            targets=partial(expected_targets, self.gate, self.ranks, min(self.ranks, self.machine.n_gpus)),
            phase="dispatch F" if self.operation == "dispatch" else "combine F",
        )

    @property
    def traffic(self) -> LinkBytes:
        """Bytes that one rank sends in a dispatch, or receives in a combine."""
        return dispatcher(self.kernels).traffic(self.call)

    @property
    def logical_bytes(self) -> float:
        """Bytes that the benchmark counts: to all nodes across nodes, else to all ranks, its own included."""
        return self.traffic.logical_ib_bytes if self.nodes > 1 else self.traffic.logical_nvlink_bytes


def benchmark_seconds(run: KernelBenchmark) -> float:
    """Predicted seconds of a benchmark on idle GPUs, of the kernel alone or of the whole call."""
    kind, links, traffic = dispatcher(run.kernels), _links(run), run.traffic
    transfer = dispatcher_transfer(kind, run.call, traffic, links, load_profile(run.profile))
    memory = run.machine.accelerator.hbm_bandwidth.value
    copied_s = 2.0 * traffic.logical_nvlink_bytes / (COPY_SHARE * memory)
    return kind.benchmark_s(
        transfer.launch_s,
        transfer.payload_s,
        notify_seconds(links, run.nodes),
        None if run.timed == "kernel only" else copied_s,
    )


def _links(run: KernelBenchmark) -> Links:
    node, fabric = run.machine, load_network(run.network).fabric
    return Links(
        scale_up_bytes_per_s=node.scale_up_bytes_per_s,
        scale_up_latency_s=node.scale_up_latency_s,
        nic_bytes_per_s=node.scale_out_bytes_per_s,
        nic_latency_s=fabric.latency_cross_leaf.value if fabric else 0.0,
        gpus_per_node=node.n_gpus,
        ep_per_node=run.ranks // run.nodes,
        adapter=node.adapter or "",
    )
