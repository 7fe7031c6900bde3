"""The phases inside one schedule action as plain data, with their streams, order and dependencies.

A pipeline action (F, B, I, W or an overlapped F&B pair) becomes a `Template`: a list of `Task`s on in-order
streams: `compute`, `communication` for expert-parallel transfers, and `sharding` for the collectives of
ZeRO-3. The engine walks the template; nothing here knows time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.operator import Phase

Stream = Literal["compute", "communication", "sharding"]
ActionKind = Literal["F", "B", "I", "W", "F&B", "F&I"]

EP_PHASES: frozenset[str] = frozenset({"dispatch F", "combine F", "combine B", "dispatch B"})
SHARDING_PHASES: frozenset[str] = frozenset({"gather F", "gather B", "scatter W"})
"""ZeRO-3's parameter gathers and gradient scatters, which have a communicator and a stream of their own."""
COMMUNICATION_PHASES: frozenset[str] = EP_PHASES | SHARDING_PHASES

FORWARD_CHAIN: tuple[Phase, ...] = ("attn F", "dispatch F", "mlp F", "combine F")
INPUT_CHAIN: tuple[Phase, ...] = ("combine B", "mlp I", "dispatch B", "attn I")
WEIGHT_OF: dict[Phase, Phase] = {"mlp W": "mlp I", "attn W": "attn I"}
"""Input gradient that each weight gradient follows, because it computes an operand of the weight gradient."""


class OverlapOrder(BaseModel):
    """Order of the phases of one layer pair inside an overlapped F&B action.

    Both streams run their list in order, layer pair by layer pair; dependencies do the rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    compute: tuple[Phase, ...]
    """Phases of the compute stream, in order."""
    communication: tuple[Phase, ...]
    """Phases of the communication stream, in order."""
    source: str
    """Where the order comes from."""

    @model_validator(mode="after")
    def _complete(self) -> OverlapOrder:
        want_compute = {"attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"}
        if set(self.compute) != want_compute or len(self.compute) != len(want_compute):
            raise ValueError(
                f"compute must name each of {sorted(want_compute)} once, got {list(self.compute)}"
            )
        if set(self.communication) != EP_PHASES or len(self.communication) != 4:
            raise ValueError(
                f"communication must name each of {sorted(EP_PHASES)} once, got {list(self.communication)}"
            )
        return self


OVERLAP_ORDERS: dict[str, OverlapOrder] = {
    "deepseek-v3": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="deepseek-ai/profile-data@449602428a1b train.json, order of the phases in the trace",
    ),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One phase of one block. `deps` are positions of earlier tasks in the same template."""

    phase: Phase
    stream: Stream
    side: int
    """0: the forward micro-batch of the action, 1: the backward one."""
    block: int
    """Position of the block in its stage."""
    deps: tuple[int, ...]
    overlapped_share: float | None = None
    """In an overlapped pair, the share of the four expert-parallel transfers of a MoE layer pair that this
    layer pair has; this share of its compute runs while communication kernels occupy their SMs. None outside
    of pairs."""


@dataclass(frozen=True, slots=True)
class Template:
    """Tasks in an order that respects every stream and every dependency.

    `forward_out` is the position of the task after which the activation leaves for the next stage, and
    `backward_out` that of the task after which the input gradient leaves; None where the action produces
    none, or the stage has no such phase.
    """

    kind: ActionKind
    tasks: tuple[Task, ...]
    forward_out: int | None
    backward_out: int | None


BlockPhases = Sequence[frozenset[Phase]]
"""Phases of every block of a stage, in forward order."""


def build_template(
    kind: ActionKind,
    forward: BlockPhases = (),
    backward: BlockPhases = (),
    order: OverlapOrder | None = None,
) -> Template:
    """Return the task template of an action.

    Actions outside of pairs run serially: every task waits for the one before it, except ZeRO-3's parameter
    gathers, which run one block ahead, and its gradient scatters, for which no task waits. Both run in order
    on a stream of their own, beside compute and expert-parallel transfers. In an overlapped
    pair the two streams run concurrently in `order`, and only data dependencies join them. Source: order
    of the slots in DeepSeek's published H800 profile; docs/model.md, section "Inside an action". Raises
    InputError for an order that deadlocks, ValueError for a pair without an order or with ZeRO-3 phases.
    """
    if kind in ("F&B", "F&I"):
        if order is None:
            raise ValueError("an overlapped pair needs an overlap order")
        weights = kind == "F&B"
        kept = [have if weights else have - set(WEIGHT_OF) for have in backward]
        return _pair(kind, forward, kept, order)
    return _serial(kind, forward if kind == "F" else backward)


_SERIAL: dict[str, tuple[Phase, ...]] = {
    "F": ("gather F", *FORWARD_CHAIN),
    "I": ("gather B", *INPUT_CHAIN),
    "W": ("mlp W", "attn W", "scatter W"),
    "B": ("gather B", "combine B", "mlp I", "mlp W", "dispatch B", "attn I", "attn W", "scatter W"),
}


def _serial(kind: ActionKind, blocks: BlockPhases) -> Template:
    order = list(range(len(blocks)) if kind == "F" else range(len(blocks) - 1, -1, -1))
    gather = next((phase for phase in _SERIAL[kind] if phase.startswith("gather")), None)
    side = 0 if kind == "F" else 1
    tasks: list[Task] = []
    gathered: dict[int, int] = {}

    def add(phase: Phase, block: int, *waits: int | None) -> int:
        deps = tuple(sorted(d for d in waits if d is not None))
        tasks.append(Task(phase, _stream(phase), side, block, deps))
        return len(tasks) - 1

    def prefetch(position: int, after: int | None) -> None:
        if gather is not None and position < len(order) and gather in blocks[order[position]]:
            gathered[order[position]] = add(gather, order[position], after)

    chain: int | None = None
    out: int | None = None
    prefetch(0, None)
    for position, block in enumerate(order):
        prefetch(position + 1, chain)
        for phase in (p for p in _SERIAL[kind] if p in blocks[block] and p not in SHARDING_PHASES):
            chain = add(phase, block, chain, gathered.get(block))
            out = chain if kind == "F" or phase in INPUT_CHAIN else out
        if "scatter W" in _SERIAL[kind] and "scatter W" in blocks[block]:
            add("scatter W", block, chain)
    if kind == "B":
        out = chain  # autograd passes the gradient on when the whole chunk has ended
    return Template(kind, tuple(tasks), out if kind == "F" else None, out if kind in ("B", "I") else None)


def _stream(phase: Phase) -> Stream:
    if phase in SHARDING_PHASES:
        return "sharding"
    return "communication" if phase in EP_PHASES else "compute"


@dataclass(frozen=True, slots=True)
class _Slot:
    phase: Phase
    side: int
    block: int


def _pair(kind: ActionKind, forward: BlockPhases, backward: BlockPhases, order: OverlapOrder) -> Template:
    sharded = sorted(
        {p for have in (*forward, *backward) for p in have if p in COMMUNICATION_PHASES - EP_PHASES}
    )
    if sharded:
        raise ValueError(
            f"an overlapped pair has no slot for {', '.join(sharded)}: ZeRO-3 needs another schedule"
        )
    compute, communication = _stream_slots(forward, backward, order)
    chain = _dependencies(forward, backward)
    shares = _shares(forward, backward)
    tasks: list[Task] = []
    at: dict[_Slot, int] = {}
    queues = {"compute": compute, "communication": communication}
    while compute or communication:
        for name in ("compute", "communication"):
            queue = queues[name]
            if queue and all(d in at for d in chain[queue[0]]):
                slot = queue.pop(0)
                at[slot] = len(tasks)
                deps = tuple(at[d] for d in chain[slot])
                tasks.append(
                    Task(
                        slot.phase,
                        _stream(slot.phase),
                        slot.side,
                        slot.block,
                        deps,
                        shares[slot.side, slot.block],
                    )
                )
                break
        else:
            stuck = " and ".join(f"{queue[0].phase!r}" for queue in (compute, communication) if queue)
            raise InputError(
                f"communication.overlap deadlocks at {stuck}: what is next in a stream waits for a phase "
                "that stands behind it; put every phase after those it depends on, as in deepseek-v3"
            )
    forward_last = [at[s] for s in at if s.side == 0]
    backward_last = [at[s] for s in at if s.side == 1 and s.phase in INPUT_CHAIN]
    return Template(
        kind,
        tuple(tasks),
        max(forward_last, default=None),
        max(backward_last, default=None),
    )


def _shares(forward: BlockPhases, backward: BlockPhases) -> dict[tuple[int, int], float]:
    """Transfers of the layer pair of every (side, block), over the four of a MoE layer pair."""
    shares: dict[tuple[int, int], float] = {}
    for position in range(max(len(forward), len(backward))):
        pair = [(0, position, forward[position])] if position < len(forward) else []
        block = len(backward) - 1 - position
        if block >= 0:
            pair.append((1, block, backward[block]))
        transfers = sum(
            phase in have and (side == 0) == (phase in FORWARD_CHAIN)
            for side, _, have in pair
            for phase in EP_PHASES
        )
        shares |= {(side, number): transfers / len(EP_PHASES) for side, number, _ in pair}
    return shares


def _stream_slots(
    forward: BlockPhases, backward: BlockPhases, order: OverlapOrder
) -> tuple[list[_Slot], list[_Slot]]:
    """Queues of both streams by layer pair, with forward blocks in order and backward ones from the last."""
    compute: list[_Slot] = []
    communication: list[_Slot] = []
    for position in range(max(len(forward), len(backward))):
        pair = []
        if position < len(forward):
            pair.append((0, position, forward[position]))
        if position < len(backward):
            block = len(backward) - 1 - position
            pair.append((1, block, backward[block]))
        for phases, queue in ((order.compute, compute), (order.communication, communication)):
            for phase in phases:
                for side, block, have in pair:
                    if phase in have and (side == 0) == (phase in FORWARD_CHAIN):
                        queue.append(_Slot(phase, side, block))
    return compute, communication


def _dependencies(forward: BlockPhases, backward: BlockPhases) -> dict[_Slot, tuple[_Slot, ...]]:
    """Data dependencies of every slot along its forward or backward chain, across blocks."""
    chain: dict[_Slot, tuple[_Slot, ...]] = {}
    before: tuple[_Slot, ...] = ()
    for block, have in enumerate(forward):
        for phase in FORWARD_CHAIN:
            if phase in have:
                slot = _Slot(phase, 0, block)
                chain[slot] = before
                before = (slot,)
    before = ()
    for block in range(len(backward) - 1, -1, -1):
        for phase in INPUT_CHAIN:
            if phase in backward[block]:
                slot = _Slot(phase, 1, block)
                chain[slot] = before
                before = (slot,)
        for weight, source in WEIGHT_OF.items():
            if weight in backward[block]:
                need = _Slot(source, 1, block)
                chain[_Slot(weight, 1, block)] = (need,) if source in backward[block] else before
    return chain
