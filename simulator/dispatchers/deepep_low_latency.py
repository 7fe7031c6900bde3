"""DeepEP's low-latency kernels: a copy of a row straight to the rank of every chosen expert (eq. X29).

Forward calls of inference; no autograd function is published with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.dispatchers.deepep import ARCHITECTURES
from moesim.simulator.dispatchers.protocol import (
    EXPANDS,
    INDICES,
    LAYOUT,
    REDUCES,
    Call,
    Dispatcher,
    ExpertBuffers,
    Group,
    LinkBytes,
    Meter,
    Permuted,
    TransferTime,
    direct_bytes,
    published,
    round_up,
)
from moesim.simulator.model.operator import Operator


@dataclass(frozen=True)
class Direct(Dispatcher):
    """Kernels that send over NVLink inside a node and by RDMA straight to the rank across."""

    def traffic(self, call: Call) -> LinkBytes:
        """Every chosen expert gets its own copy (eq. X28)."""
        return direct_bytes(call.tokens, call.choices, call.ranks, call.local, call.row_bytes)

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """Payload = max(NIC bytes / NIC rate, NVLink bytes / NVLink rate), after a call and one latency.

        No exchange of counts comes before it, and the kernel takes the SMs that it needs. Raises InputError
        where a curve is missing.
        """
        fraction, residual = meter.read(f"ep.{call.operation}.scale_up_fraction", call.local)
        nic_s, nic_residual = meter.nic(f"ep.{call.operation}.nic_fraction", moved, call.nodes)
        call_s, call_residual = meter.read(f"ep.{call.operation}.call_time", call.tokens)
        return TransferTime(
            launch_s=call_s + (meter.nic_latency_s if call.nodes > 1 else 0.0),
            nic_s=nic_s,
            scale_up_s=meter.scale_up_s(moved, fraction),
            best_s=meter.fastest_s(moved),
            residual=max(residual, nic_residual),
            call_error_s=call_s * call_residual,
        )

    def permuted(self, op: Operator, base: str, around: Permuted) -> tuple[Operator, ...]:
        """Rows arrive in the order of the experts, and the combine sums the copies of a token itself."""
        return () if base in (LAYOUT, *INDICES, *EXPANDS, *REDUCES) else (op,)

    def own_buffers(self, group: Group) -> ExpertBuffers:
        """Two send and two receive buffers with a slot for every token and expert (eq. M13).

        Any rank may send all of its tokens to one expert, so a receive buffer has as many slots as the
        experts of all ranks times the tokens of one (deepseek-ai/DeepEP@de3a15d511cc csrc/config.hpp,
        LowLatencyLayout).
        """
        row, scales = group.row, group.row // 128
        dispatched, combined = 16 + max(2 * row, row + 4 * scales), 4 * scales + 2 * row
        slots = group.experts * group.tokens
        send = max(group.tokens * dispatched, slots * combined)
        received = slots * max(dispatched, combined)
        return ExpertBuffers(0, round_up(int(2 * (send + received)) + 2 * round_up(4 * group.experts)))


DEEPEP_LOW_LATENCY = Direct(
    name="deepep-low-latency",
    curves="deepep-low-latency",
    architectures=ARCHITECTURES,
    # deepseek-ai/DeepEP@de3a15d511cc csrc/kernels/launch.cuh: SWITCH_HIDDEN
    row_widths=(2048, 2560, 4096, 5120, 6144, 7168, 8192),
    most_choices=published(
        11, "deepseek-ai/DeepEP@de3a15d511cc csrc/kernels/internode_ll.cu: kNumMaxTopK 11", "2025-10"
    ),
    # deepseek-ai/DeepEP@de3a15d511cc csrc/kernels/internode_ll.cu: experts / ceil(experts / SMs) blocks of
    # up to 1,024 threads
    fills_the_gpu=True,
)
