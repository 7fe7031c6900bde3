"""Dispatch and combine by NCCL's collectives: the all-to-all and the all-gather of Megatron core.

NCCL sends from and receives into the tensors of the block, so neither has buffers of its own; the channels of
NCCL count as the framework's memory (`layout.memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from moesim.simulator.dispatchers.protocol import (
    EXPANDS,
    REDUCES,
    Call,
    Collective,
    Dispatcher,
    LinkBytes,
    Meter,
    TransferTime,
    direct_bytes,
)
from moesim.simulator.model.operator import Operator, Phase

SMALL_CALLS: dict[Phase, int] = {"dispatch F": 2, "dispatch B": 1}
"""Further exchanges of a phase: the counts of the experts and the weights of the rows, and the gradients of
the weights (NVIDIA/Megatron-LM@d98e8a64 token_dispatcher.py)."""
SMALL_CALL = "nccl.all_to_all.call_time"

BF16_BYTES = 2.0
"""Bytes of an element on the wire, whatever the precision of the experts."""


@dataclass(frozen=True)
class AllToAll(Dispatcher):
    """NCCL's all-to-all, which sends each chosen expert its own copy of a row."""

    def traffic(self, call: Call) -> LinkBytes:
        """Every chosen expert gets its own copy in BF16 (eq. O6)."""
        return direct_bytes(call.tokens, call.choices, call.ranks, call.local, call.row * BF16_BYTES)

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """The collective, after the small ones that go with the tokens (eq. O6)."""
        time = meter.collective("all_to_all", moved.logical_nvlink_bytes, call)
        launch_s, calls = meter.notify_s(call.nodes), SMALL_CALLS.get(call.phase, 0)
        own = f"{SMALL_CALL}.{call.ranks}-ranks"
        small = own if meter.has(own) else SMALL_CALL
        if calls and meter.has(small):
            launch_s += calls * meter.read(small, float(call.ranks))[0]
        return TransferTime(launch_s, time.nic_s, time.scale_up_s, meter.fastest_s(moved), time.residual)

    def permuted(self, op: Operator, base: str, call: Call) -> tuple[Operator, ...]:
        """The permutations of Megatron core's `alltoall` (NVIDIA/Megatron-LM@d98e8a64 token_dispatcher.py).

        Before the exchange a kernel writes a copy of a token for each chosen expert. What arrives is in the
        order of the senders, so a second kernel sorts it by expert where a rank has several; the combine
        reverses both.
        """
        if base in EXPANDS:
            permuted = replace(op, bytes_read=op.bytes_written / call.choices)
            return (permuted, _sort(op, op.bytes_written)) if call.local_experts > 1 else (permuted,)
        if base in REDUCES:
            summed = replace(op, bytes_written=op.bytes_read / call.choices)
            return (_sort(op, op.bytes_read), summed) if call.local_experts > 1 else (summed,)
        return (op,)


def _sort(op: Operator, moved: float) -> Operator:
    """Copy of all received rows from the order of their senders into that of the experts, or back."""
    name = op.name.replace("expand", "sort").replace("reduce", "unsort")
    return replace(op, name=name, variant="expand", bytes_read=moved, bytes_written=moved)


@dataclass(frozen=True)
class AllGather(Dispatcher):
    """NCCL's all-gather of all ranks' tokens, and the reduce-scatter of their sums."""

    def traffic(self, call: Call) -> LinkBytes:
        """Every token goes to every rank in BF16; each rank carries its share of what other nodes have."""
        total = call.tokens * call.ranks * call.row * BF16_BYTES
        nic = total * (call.nodes - 1) / call.nodes / call.local
        return LinkBytes(nic, total * (call.ranks - 1) / call.ranks, total / call.ranks, nic, total)

    def seconds(self, call: Call, moved: LinkBytes, meter: Meter) -> TransferTime:
        """The collective of all ranks' tokens (eq. O16)."""
        name: Collective = "all_gather" if call.operation == "dispatch" else "reduce_scatter"
        time = meter.collective(name, moved.logical_nvlink_bytes, call)
        best_s = min(meter.fastest_s(moved), max(time.nic_s, time.scale_up_s))
        return TransferTime(meter.notify_s(call.nodes), time.nic_s, time.scale_up_s, best_s, time.residual)

    def permuted(self, op: Operator, base: str, call: Call) -> tuple[Operator, ...]:
        """The permutations of Megatron core's `allgather` dispatcher, which has the tokens of all ranks.

        A kernel takes the rows of the rank's own experts out of them; after the experts another adds them
        into a zeroed buffer for the tokens of all ranks, which the reduce-scatter reads.
        """
        if base in EXPANDS:
            return (replace(op, bytes_read=op.bytes_written),)
        if base in REDUCES:
            everyone = op.bytes_read / call.choices * call.ranks
            return (replace(op, bytes_written=op.bytes_read + everyone),)
        return (op,)


NCCL = AllToAll(
    name="nccl",
    by_library=True,
    words={"megatron": "alltoall", "torchtitan": "standard", "deepspeed": "all-to-all"},
)
NCCL_ALLGATHER = AllGather(name="nccl-allgather", by_library=True, words={"megatron": "allgather"})
