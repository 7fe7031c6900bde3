"""The phases inside one schedule action as plain data, with their streams, order and dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from pydantic import model_validator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.model.operator import Phase

# -- order of the phases inside an overlapped pair, as DeepSeek and Megatron core post them ------------

EP_PHASES: frozenset[str] = frozenset({"dispatch F", "combine F", "combine B", "dispatch B"})
SCATTER: Phase = "scatter W"
"""Reduce-scatter of the gradients of a block and micro-batch."""
SHARDING_PHASES: frozenset[str] = frozenset({"gather F", "gather B", SCATTER})
"""Parameter gathers and gradient scatters over replicas, with a communicator and a stream of their own."""
COMMUNICATION_PHASES: frozenset[str] = EP_PHASES | SHARDING_PHASES

FORWARD_CHAIN: tuple[Phase, ...] = ("attn F", "dispatch F", "mlp F", "combine F")
INPUT_CHAIN: tuple[Phase, ...] = ("combine B", "mlp I", "dispatch B", "attn I")
WEIGHT_OF: dict[Phase, Phase] = {"mlp W": "mlp I", "attn W": "attn I"}
"""Input gradient that each weight gradient follows, because it computes an operand of the weight gradient."""


class OverlapOrder(Section):
    """Order of the phases of one layer pair inside an overlapped F&B action.

    Both streams run their list in order, layer pair by layer pair; dependencies do the rest.
    """

    compute: tuple[Phase, ...]
    """Phases of the compute stream, in order."""
    communication: tuple[Phase, ...]
    """Phases of the communication stream, in order."""
    source: str
    """Where the order comes from."""
    weight_gradients: Literal["delayed", "with-input"] = "delayed"
    """`delayed`: a weight gradient is a task of its own, and what needs the input gradient does not wait for
    it. `with-input`: both come out of one backward call, so that the next phase waits for both."""
    pairs: Literal["blocks", "layers"] = "blocks"
    """What the forward and backward sides pair: `blocks` counts embedding and head as well; `layers` runs
    them before or after the pairs, without a partner."""
    lone_backward: Literal["serial", "streams"] = "serial"
    """How a backward without a forward beside it runs: as one chain, or on both streams as in a pair."""
    busy: Literal["transfers", "durations"] = "transfers"
    """Share of the compute of a layer pair that runs beside busy communication SMs: by the number of
    transfers (eq. E6), or by how long they take (eq. E20)."""

    @model_validator(mode="after")
    def _complete(self) -> OverlapOrder:
        want_compute = {"attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"}
        if set(self.compute) != want_compute or len(self.compute) != len(want_compute):
            raise ValueError(
                f"compute must name each of {sorted(want_compute)} once, got {list(self.compute)}"
            )
        if self.weight_gradients == "with-input":
            for weight, source in WEIGHT_OF.items():
                if self.compute.index(weight) != self.compute.index(source) + 1:
                    raise ValueError(
                        f"weight_gradients=with-input needs {weight!r} right after {source!r} in compute, "
                        f"got {list(self.compute)}"
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
    "megatron": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="NVIDIA/Megatron-LM@d98e8a64 megatron/core/models/common/model_chunk_schedule_plan.py, "
        "TransformerLayerSchedulePlan.run and TransformerModelChunkSchedulePlan.run",
        pairs="layers",
        lone_backward="streams",
        busy="durations",
    ),
    "megatron-early-attention": OverlapOrder(
        compute=("attn F", "mlp I", "mlp W", "attn I", "mlp F", "attn W"),
        communication=("combine B", "dispatch F", "dispatch B", "combine F"),
        source="as megatron, with ep_overlap_early_attn_memory_release: the backward of the attention half "
        "before the forward of the experts",
        pairs="layers",
        lone_backward="streams",
        busy="durations",
    ),
}


def joined_weight_gradients(compute: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The compute list with every weight gradient right after the input gradient that it comes with."""
    after = {source: weight for weight, source in WEIGHT_OF.items()}
    kept = [phase for phase in compute if phase not in WEIGHT_OF]
    return tuple(part for phase in kept for part in (phase, after.get(phase)) if part is not None)


# -- tasks of one schedule action, and the template that lists them: plain data without times ----------

Stream = Literal["compute", "communication", "sharding"]
ActionKind = Literal["F", "B", "I", "W", "F&B", "F&I"]

BlockPhases = Sequence[frozenset[Phase]]
"""Phases of every block of a stage, in forward order."""


class Task(Struct, frozen=True):
    """One phase of one block. `deps` are positions of earlier tasks in the same template."""

    phase: Phase
    stream: Stream
    side: int
    """0: the forward micro-batch of the action, 1: the backward one."""
    block: int
    """Position of the block in its stage."""
    deps: tuple[int, ...]
    overlapped_share: float | None = None
    """In an action on two streams, the share of the four expert-parallel transfers of a MoE layer pair that
    this layer pair has; this share of its compute runs while communication kernels occupy their SMs (eq. E6).
    None where the action runs as one chain."""
    layer_pair: int = 0
    """Number of the layer pair of the task, in the order in which they run."""


class Template(Struct, frozen=True):
    """Tasks in an order that respects every stream and every dependency.

    `forward_out` is the position of the task after which the activation leaves for the next stage, and
    `backward_out` that of the task after which the input gradient leaves; None where the action produces
    none, it leaves at the end of the action, or the stage has no such phase.
    """

    kind: ActionKind
    tasks: tuple[Task, ...]
    forward_out: int | None
    backward_out: int | None
    by_duration: bool = False
    """Whether the share of compute beside busy communication SMs follows from durations (eq. E20)."""

    @property
    def on_two_streams(self) -> bool:
        """Whether compute and expert-parallel transfers run side by side."""
        return any(task.overlapped_share is not None for task in self.tasks)


def stream_of(phase: Phase) -> Stream:
    """The in-order stream that a phase runs on."""
    if phase in SHARDING_PHASES:
        return "sharding"
    return "communication" if phase in EP_PHASES else "compute"


# -- the template of an action on two streams: an overlapped pair, or a backward without a partner -----


class _Slot(Struct, frozen=True):
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
    # Transfers of the layer pair of every (side, block), over the four of a MoE layer pair (eq. E6).
    shares, number = dict[tuple[int, int], float](), dict[tuple[int, int], int]()
    for count, row in enumerate(rows):
        transfers = sum(phase in have and _runs(side, phase) for side, _, have in row for phase in EP_PHASES)
        shares |= {(side, block): transfers / len(EP_PHASES) for side, block, _ in row}
        number |= {(side, block): count for side, block, _ in row}
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
    compute, communication = (
        [
            _Slot(phase, side, block)
            for row in rows
            for phase in phases
            for side, block, have in row
            if phase in have and _runs(side, phase)
        ]
        for phases in (order.compute, order.communication)
    )
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
        return [ahead[i : i + 1] + back[i : i + 1] for i in range(max(len(ahead), len(back)))]
    first, second = _by_layer(ahead), _by_layer(back)
    rows = [[place] for part in (first, second) for place in part[0]]
    for i in range(1, max(len(first), len(second))):
        groups = [part[i] for part in (first, second) if i < len(part)]
        rows.append([group[0] for group in groups])
        rows += [[place] for group in groups for place in group[1:]]
    return rows


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


def build_template(
    kind: ActionKind,
    forward: BlockPhases = (),
    backward: BlockPhases = (),
    order: OverlapOrder | None = None,
    *,
    scatters_wait: bool = False,
    gathers_wait: bool = False,
) -> Template:
    """Return the task template of an action.

    Actions outside of pairs run serially: every task waits for the one before it, except ZeRO-3's parameter
    gathers, which run one block ahead unless `gathers_wait`, and gradient scatters, for which no task waits
    unless `scatters_wait`.
    Both run in order on a stream of their own, beside compute and expert-parallel transfers; an action ends
    when they have ended. In an overlapped pair, and in a backward without a partner where `order` says so and
    which gathers no parameters, two streams run concurrently in `order`, and only data dependencies join
    them; scatters run beside both. Sources: `OVERLAP_ORDERS`; docs/model.md, section "Inside an action".
    Raises InputError for an order that deadlocks, ValueError for a pair without an order or with parameter
    gathers.
    """
    paired = kind in ("F&B", "F&I")
    if paired and order is None:
        raise ValueError("an overlapped pair needs an overlap order")
    gathers = any("gather B" in have for have in backward)
    streams = kind == "B" and order is not None and order.lone_backward == "streams" and not gathers
    used = order if paired or streams else None

    def made() -> Template:
        if used is None:
            return _serial(kind, forward if kind == "F" else backward, scatters_wait, gathers_wait)
        if kind == "B":
            return pair_template(kind, (), backward, used)
        kept = [have if kind == "F&B" else have - {*WEIGHT_OF, SCATTER} for have in backward]
        return pair_template(kind, forward, kept, used)

    return _TEMPLATES.get((kind, tuple(forward), tuple(backward), used, scatters_wait, gathers_wait), made)


_TEMPLATES: BoundedCache[Template] = BoundedCache(100_000, lambda template: len(template.tasks) + 1)
"""Templates of the actions of the scenarios before, limited by their tasks (about 30 MB)."""


_SERIAL: dict[str, tuple[Phase, ...]] = {
    "F": ("gather F", *FORWARD_CHAIN),
    "I": ("gather B", *INPUT_CHAIN),
    "W": ("mlp W", "attn W", "scatter W"),
    "B": ("gather B", "combine B", "mlp I", "mlp W", "dispatch B", "attn I", "attn W", "scatter W"),
}


def _serial(kind: ActionKind, blocks: BlockPhases, scatters_wait: bool, gathers_wait: bool) -> Template:
    order = list(range(len(blocks)) if kind == "F" else range(len(blocks) - 1, -1, -1))
    gather = next((phase for phase in _SERIAL[kind] if phase.startswith("gather")), None)
    side = 0 if kind == "F" else 1
    tasks: list[Task] = []
    gathered: dict[int, int] = {}

    def add(phase: Phase, block: int, *waits: int | None) -> int:
        deps = tuple(sorted(d for d in waits if d is not None))
        tasks.append(Task(phase, stream_of(phase), side, block, deps))
        return len(tasks) - 1

    def prefetch(position: int, after: int | None) -> None:
        if gather is not None and position < len(order) and gather in blocks[order[position]]:
            gathered[order[position]] = add(gather, order[position], after)

    chain: int | None = None
    out: int | None = None
    if not gathers_wait:
        prefetch(0, None)
    for position, block in enumerate(order):
        prefetch(position if gathers_wait else position + 1, chain)
        for phase in (p for p in _SERIAL[kind] if p in blocks[block] and p not in SHARDING_PHASES):
            chain = add(phase, block, chain, gathered.get(block))
            out = chain if kind == "F" or phase in INPUT_CHAIN else out
        if SCATTER in _SERIAL[kind] and SCATTER in blocks[block]:
            scattered = add(SCATTER, block, chain)
            chain = scattered if scatters_wait else chain
    if kind == "B":  # autograd passes the gradient on when the whole chunk has ended
        ended_by_scatter = chain is not None and tasks[chain].phase == SCATTER
        out = None if ended_by_scatter else chain
    return Template(kind, tuple(tasks), out if kind == "F" else None, out if kind in ("B", "I") else None)
