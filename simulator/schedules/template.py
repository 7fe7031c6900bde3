"""The phases inside one schedule action as plain data, with their streams, order and dependencies.

A pipeline action (F, B, I, W or an overlapped F&B pair) becomes a `Template`: a list of `Task`s on in-order
streams: `compute`, `communication` for expert-parallel transfers, and `sharding` for the collectives of
ZeRO-3. The engine walks the template; nothing here knows time.
"""

from __future__ import annotations

from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules.overlap_order import (
    COMMUNICATION_PHASES,
    EP_PHASES,
    FORWARD_CHAIN,
    INPUT_CHAIN,
    OVERLAP_ORDERS,
    SHARDING_PHASES,
    WEIGHT_OF,
    OverlapOrder,
)
from moesim.simulator.schedules.overlapped_pair import pair_template
from moesim.simulator.schedules.tasks import ActionKind, BlockPhases, Stream, Task, Template, stream_of

__all__ = [
    "COMMUNICATION_PHASES",
    "EP_PHASES",
    "FORWARD_CHAIN",
    "INPUT_CHAIN",
    "OVERLAP_ORDERS",
    "SHARDING_PHASES",
    "WEIGHT_OF",
    "ActionKind",
    "BlockPhases",
    "OverlapOrder",
    "Stream",
    "Task",
    "Template",
    "build_template",
]


def build_template(
    kind: ActionKind,
    forward: BlockPhases = (),
    backward: BlockPhases = (),
    order: OverlapOrder | None = None,
) -> Template:
    """Return the task template of an action.

    Actions outside of pairs run serially: every task waits for the one before it, except ZeRO-3's parameter
    gathers, which run one block ahead, and its gradient scatters, for which no task waits. Both run in order
    on a stream of their own, beside compute and expert-parallel transfers. In an overlapped pair, and in a
    backward without a partner where `order` says so and which gathers no parameters, two streams run
    concurrently in `order`, and only data dependencies join them. Sources: `OVERLAP_ORDERS`; docs/model.md,
    section "Inside an action". Raises InputError for an order that deadlocks, ValueError for a pair without
    an order or with ZeRO-3 phases.
    """
    paired = kind in ("F&B", "F&I")
    if paired and order is None:
        raise ValueError("an overlapped pair needs an overlap order")
    sharded = any(SHARDING_PHASES & have for have in backward)
    streams = kind == "B" and order is not None and order.lone_backward == "streams" and not sharded
    used = order if paired or streams else None
    key = (kind, tuple(forward), tuple(backward), used)
    return _TEMPLATES.get(key, lambda: _template(kind, forward, backward, used))


_TEMPLATES: BoundedCache[Template] = BoundedCache(100_000, lambda template: len(template.tasks) + 1)
"""Templates of the actions of the scenarios before, limited by their tasks (about 30 MB)."""


def _template(
    kind: ActionKind, forward: BlockPhases, backward: BlockPhases, order: OverlapOrder | None
) -> Template:
    if order is None:
        return _serial(kind, forward if kind == "F" else backward)
    if kind == "B":
        return pair_template(kind, (), backward, order)
    weights = kind == "F&B"
    kept = [have if weights else have - set(WEIGHT_OF) for have in backward]
    return pair_template(kind, forward, kept, order)


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
        tasks.append(Task(phase, stream_of(phase), side, block, deps))
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
