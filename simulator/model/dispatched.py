"""Adapts the operators around dispatch and combine to what the dispatcher permutes itself (pure).

The operators of a block are those of DeepEP: tokens arrive once, and a kernel copies them into the order of
the experts. Eq. O15 has the bytes of the other dispatchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesim.simulator.model.dispatchers import Dispatcher
from moesim.simulator.model.operator import Operator, Phase

EXPANDS = ("experts.expand", "experts.expand_gradient")
REDUCES = ("experts.reduce", "experts.reduce_gradient")
INDICES = ("experts.count", "experts.mapping")
LAYOUT = "dispatch.layout"

STREAM_PHASES: tuple[tuple[Phase, tuple[str, ...], Phase], ...] = (
    ("mlp F", EXPANDS, "dispatch F"),
    ("mlp F", REDUCES, "combine F"),
    ("mlp I", EXPANDS, "combine B"),
    ("mlp I", REDUCES, "dispatch B"),
)
"""Where the permutations of a phase of the experts go that run on the stream of the transfers."""

Operators = Mapping[Phase, tuple[Operator, ...]]


def dispatched_by(
    operators: Operators,
    kind: Dispatcher,
    *,
    fused: bool,
    top_k: float,
    local_experts: float,
    ranks: int,
    routing_map_bytes: float = 0.0,
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block with the permutations that a dispatcher leaves to other kernels.

    `fused`: the dispatcher permutes inside its own kernels, so that none is left. `local_experts`: experts of
    one rank, `ranks`: ranks of the expert-parallel group, `routing_map_bytes`: which experts the tokens of
    all ranks chose, a byte each, which Hybrid-EP scans before a forward dispatch.
    """

    def adapted(op: Operator) -> tuple[Operator, ...]:
        base = op.name.removesuffix(".recompute")
        if kind.transport == "domain":
            if base == LAYOUT:
                return (replace(op, bytes_read=routing_map_bytes),)
            # The scan that makes the layout writes the order of the rows too.
            return () if base in INDICES or (fused and base in (*EXPANDS, *REDUCES)) else (op,)
        if kind.transport == "direct":
            # Rows arrive in the order of the experts, and the combine sums the copies of a token itself.
            return () if base in (LAYOUT, *INDICES, *EXPANDS, *REDUCES) else (op,)
        if kind.transport == "all-to-all":
            return _around_all_to_all(op, base, top_k, local_experts)
        if kind.transport == "all-gather":
            return _around_all_gather(op, base, top_k, ranks)
        return (op,)

    return {phase: tuple(new for op in ops for new in adapted(op)) for phase, ops in operators.items()}


def on_stream(operators: Operators) -> dict[Phase, tuple[Operator, ...]]:
    """Move the permutations of rows to the transfers whose stream they run on.

    Hybrid-EP permutes behind a dispatch and before a combine. A phase of a transfer holds its kernels before
    the transfer, so those of a dispatch are priced there too: the stream is as long. Repeated ones stay.
    """
    out = dict(operators)
    for source, names, target in STREAM_PHASES:
        if target in out:
            moved = tuple(op for op in out[source] if op.name in names)
            out[source] = tuple(op for op in out[source] if op.name not in names)
            out[target] = (*out[target], *moved)
    return out


def _around_all_to_all(op: Operator, base: str, top_k: float, local_experts: float) -> tuple[Operator, ...]:
    """The permutations of Megatron core's `alltoall` (NVIDIA/Megatron-LM@d98e8a64 token_dispatcher.py).

    Before the exchange a kernel writes a copy of a token for each chosen expert. What arrives is in the order
    of the senders, so a second kernel sorts it by expert where a rank has several; the combine reverses both.
    """
    if base in EXPANDS:
        permuted = replace(op, bytes_read=op.bytes_written / top_k)
        return (permuted, _sort(op, op.bytes_written)) if local_experts > 1 else (permuted,)
    if base in REDUCES:
        summed = replace(op, bytes_written=op.bytes_read / top_k)
        return (_sort(op, op.bytes_read), summed) if local_experts > 1 else (summed,)
    return (op,)


def _sort(op: Operator, moved: float) -> Operator:
    """Copy of all received rows from the order of their senders into that of the experts, or back."""
    name = op.name.replace("expand", "sort").replace("reduce", "unsort")
    return replace(op, name=name, variant="expand", bytes_read=moved, bytes_written=moved)


def _around_all_gather(op: Operator, base: str, top_k: float, ranks: int) -> tuple[Operator, ...]:
    """The permutations of Megatron core's `allgather` dispatcher, which holds the tokens of all ranks.

    A kernel takes the rows of the rank's own experts out of them; after the experts another adds them into a
    zeroed buffer for the tokens of all ranks, which the reduce-scatter reads.
    """
    if base in EXPANDS:
        return (replace(op, bytes_read=op.bytes_written),)
    if base in REDUCES:
        everyone = op.bytes_read / top_k * ranks
        return (replace(op, bytes_written=op.bytes_read + everyone),)
    return (op,)
