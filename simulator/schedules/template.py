"""The phases inside one schedule action as plain data, with their streams, order and dependencies.

A pipeline action (F, B, I, W or an overlapped F&B pair) becomes a `Template`: a list of `Task`s on in-order
streams: `compute`, `communication` for expert-parallel transfers, and `sharding` for the collectives over
replicas inside the step. The engine walks the template; nothing here knows time.
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
    SCATTER,
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
    "SCATTER",
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
    *,
    scatters_wait: bool = False,
) -> Template:
    """Return the task template of an action.

    Actions outside of pairs run serially: every task waits for the one before it, except ZeRO-3's parameter
    gathers, which run one block ahead, and gradient scatters, for which no task waits unless `scatters_wait`.
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
    key = (kind, tuple(forward), tuple(backward), used, scatters_wait)
    return _TEMPLATES.get(key, lambda: _template(kind, forward, backward, used, scatters_wait))


_TEMPLATES: BoundedCache[Template] = BoundedCache(100_000, lambda template: len(template.tasks) + 1)
"""Templates of the actions of the scenarios before, limited by their tasks (about 30 MB)."""


def _template(
    kind: ActionKind,
    forward: BlockPhases,
    backward: BlockPhases,
    order: OverlapOrder | None,
    scatters_wait: bool,
) -> Template:
    if order is None:
        return _serial(kind, forward if kind == "F" else backward, scatters_wait)
    if kind == "B":
        return pair_template(kind, (), backward, order)
    weights = kind == "F&B"
    kept = [have if weights else have - {*WEIGHT_OF, SCATTER} for have in backward]
    return pair_template(kind, forward, kept, order)


_SERIAL: dict[str, tuple[Phase, ...]] = {
    "F": ("gather F", *FORWARD_CHAIN),
    "I": ("gather B", *INPUT_CHAIN),
    "W": ("mlp W", "attn W", "scatter W"),
    "B": ("gather B", "combine B", "mlp I", "mlp W", "dispatch B", "attn I", "attn W", "scatter W"),
}


def _serial(kind: ActionKind, blocks: BlockPhases, scatters_wait: bool) -> Template:
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
        if SCATTER in _SERIAL[kind] and SCATTER in blocks[block]:
            scattered = add(SCATTER, block, chain)
            chain = scattered if scatters_wait else chain
    if kind == "B":  # autograd passes the gradient on when the whole chunk has ended
        ended_by_scatter = chain is not None and tasks[chain].phase == SCATTER
        out = None if ended_by_scatter else chain
    return Template(kind, tuple(tasks), out if kind == "F" else None, out if kind in ("B", "I") else None)
