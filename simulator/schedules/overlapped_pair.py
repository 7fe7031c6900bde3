"""Builds the template of an action on two streams: an overlapped pair, or a backward without a partner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules.overlap_order import (
    EP_PHASES,
    FORWARD_CHAIN,
    INPUT_CHAIN,
    SCATTER,
    WEIGHT_OF,
    OverlapOrder,
)
from moesim.simulator.schedules.tasks import ActionKind, BlockPhases, Task, Template, stream_of


@dataclass(frozen=True, slots=True)
class _Slot:
    phase: Phase
    side: int
    block: int


_Place = tuple[int, int, frozenset[Phase]]
"""(side, block, phases of that side) of a block in a layer pair."""


def pair_template(
    kind: ActionKind, forward: BlockPhases, backward: BlockPhases, order: OverlapOrder
) -> Template:
    """Return the tasks of a forward and a backward, either of which may be empty, on two streams in `order`.

    Gradient scatters run beside both on a stream of their own, each after the last compute of its block's
    backward; nothing waits for them. Raises InputError for an order that deadlocks, ValueError for parameter
    gathers, for which compute would wait at a place that no order names.
    """
    gathers = sorted({p for have in (*forward, *backward) for p in have if p.startswith("gather")})
    if gathers:
        raise ValueError(
            f"an overlapped pair has no slot for {', '.join(gathers)}: ZeRO-3 needs another schedule"
        )
    rows = _layer_pairs(forward, backward, order)
    chain = _dependencies(forward, backward, order)
    shares, number = _shares(rows), _numbers(rows)
    tasks: list[Task] = []
    at: dict[_Slot, int] = {}
    scattered = {slot for slot in chain if slot.side == 1 and SCATTER in backward[slot.block]}
    last = Counter((slot.side, slot.block) for slot in chain if slot.phase not in EP_PHASES)
    for slot in _issued(rows, chain, order, at):
        place = slot.side, slot.block
        deps = tuple(at[d] for d in chain[slot])
        at[slot] = len(tasks)
        stream = stream_of(slot.phase)
        tasks.append(Task(slot.phase, stream, *place, deps, shares[place], number[place]))
        last[place] -= slot.phase not in EP_PHASES
        if last[place] == 0 and slot.phase not in EP_PHASES and slot in scattered:
            tasks.append(Task(SCATTER, stream_of(SCATTER), *place, (at[slot],), shares[place], number[place]))
    forward_last = [at[s] for s in at if s.side == 0]
    backward_last = [at[s] for s in at if s.side == 1 and s.phase in INPUT_CHAIN]
    if order.weight_gradients == "with-input":
        backward_last = [at[s] for s in at if s.side == 1]
    return Template(
        kind,
        tuple(tasks),
        max(forward_last, default=None),
        max(backward_last, default=None),
        order.busy == "durations",
    )


def _issued(
    rows: Sequence[Sequence[_Place]],
    chain: dict[_Slot, tuple[_Slot, ...]],
    order: OverlapOrder,
    at: dict[_Slot, int],
) -> Iterator[_Slot]:
    """Slots of both streams in an order that respects dependencies; `at` has the slots already issued."""
    compute, communication = _stream_slots(rows, order)
    while compute or communication:
        for queue in (compute, communication):
            if queue and all(d in at for d in chain[queue[0]]):
                yield queue.pop(0)
                break
        else:
            stuck = " and ".join(f"{queue[0].phase!r}" for queue in (compute, communication) if queue)
            raise InputError(
                f"communication.overlap deadlocks at {stuck}: what is next in a stream waits for a phase "
                "that stands behind it; put every phase after those it depends on, as in deepseek-v3"
            )


def _layer_pairs(forward: BlockPhases, backward: BlockPhases, order: OverlapOrder) -> list[list[_Place]]:
    """Blocks of both sides by layer pair, with forward blocks in order and backward ones from the last."""
    ahead = [(0, block, have) for block, have in enumerate(forward)]
    back = [(1, block, backward[block]) for block in range(len(backward) - 1, -1, -1)]
    if order.pairs == "blocks":
        return [_at(ahead, i) + _at(back, i) for i in range(max(len(ahead), len(back)))]
    first, second = _by_layer(ahead), _by_layer(back)
    rows = [[place] for part in (first, second) for place in part[0]]
    for i in range(1, max(len(first), len(second))):
        groups = [part[i] for part in (first, second) if i < len(part)]
        rows.append([group[0] for group in groups])
        rows += [[place] for group in groups for place in group[1:]]
    return rows


def _at(places: Sequence[_Place], number: int) -> list[_Place]:
    return list(places[number : number + 1])


def _by_layer(places: Sequence[_Place]) -> list[list[_Place]]:
    """Blocks before the first layer, then every layer with the blocks that follow it."""
    groups: list[list[_Place]] = [[]]
    for place in places:
        if place[2] & {"attn F", "attn I"}:
            groups.append([])
        groups[-1].append(place)
    return groups


def _runs(side: int, phase: Phase) -> bool:
    return (side == 0) == (phase in FORWARD_CHAIN)


def _shares(rows: Sequence[Sequence[_Place]]) -> dict[tuple[int, int], float]:
    """Transfers of the layer pair of every (side, block), over the four of a MoE layer pair (eq. E6)."""
    shares: dict[tuple[int, int], float] = {}
    for row in rows:
        transfers = sum(phase in have and _runs(side, phase) for side, _, have in row for phase in EP_PHASES)
        shares |= {(side, block): transfers / len(EP_PHASES) for side, block, _ in row}
    return shares


def _numbers(rows: Sequence[Sequence[_Place]]) -> dict[tuple[int, int], int]:
    return {(side, block): number for number, row in enumerate(rows) for side, block, _ in row}


def _stream_slots(rows: Sequence[Sequence[_Place]], order: OverlapOrder) -> tuple[list[_Slot], list[_Slot]]:
    """Queues of both streams, layer pair by layer pair."""
    queues: tuple[list[_Slot], list[_Slot]] = ([], [])
    for row in rows:
        for phases, queue in zip((order.compute, order.communication), queues, strict=True):
            queue += [
                _Slot(phase, side, block)
                for phase in phases
                for side, block, have in row
                if phase in have and _runs(side, phase)
            ]
    return queues


def _dependencies(
    forward: BlockPhases, backward: BlockPhases, order: OverlapOrder
) -> dict[_Slot, tuple[_Slot, ...]]:
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
        have = backward[block]
        for phase in INPUT_CHAIN:
            if phase in have:
                slot = _Slot(phase, 1, block)
                chain[slot] = before
                before = (slot,)
            for weight, source in WEIGHT_OF.items():
                if source == phase and weight in have:
                    slot = _Slot(weight, 1, block)
                    chain[slot] = (_Slot(source, 1, block),) if source in have else before
                    if order.weight_gradients == "with-input":
                        before = (slot,)
    return chain
