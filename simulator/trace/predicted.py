"""Our predicted step in the tables of a read trace: `predicted_trace`.

Every phase on the compute stream is split into its operators in order. Their times are their prices, scaled
so that they and the wait for the host add up to the nanoseconds that the engine gave the phase. Times of the
step start at `START_NS`, so that what was launched before it has a launch time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray, IntArray, RecordArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.data_parallel import gather_copies
from moesim.simulator.cost.end_of_step import update_operators
from moesim.simulator.cost.evidence import CONTEXT, REPEATED_EXPERTS, TENSOR
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import PAIR_MODES, PhaseCost
from moesim.simulator.dispatchers.nccl import NCCL, NCCL_ALLGATHER
from moesim.simulator.engine.program import NS, CompiledTask
from moesim.simulator.engine.records import Execution, inputs_ready_ns
from moesim.simulator.memory.gpu import chunks_by_rank
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import GEMM_CLASSES, BlockKind, Operator, Phase
from moesim.simulator.predict.step import ExecutedStep, Prepared
from moesim.simulator.predict.trace import (
    COMMUNICATION,
    COMPUTE,
    DATA_PARALLEL,
    FIRST_SEND,
    INSIDE,
    SHARDING,
    TraceInfo,
    send_lanes,
    trace_info,
)  # fmt: skip
from moesim.simulator.schedules.template import EP_PHASES
from moesim.simulator.trace import summary
from moesim.simulator.trace.attribute import Attributed
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.events import (
    BACKWARD,
    EVENT,
    FORWARD,
    KERNEL,
    OPTIMIZER,
    RECOMPUTE,
    UNKNOWN,
    Comm,
    Names,
    Raw,
    blank,
)  # fmt: skip
from moesim.simulator.trace.read import RankTrace, StepTrace

START_NS = 1_000_000
"""When the step starts; launches that nothing waited for are at 0."""
PREDICTED_STEP = "predicted step"
"""Name of the one step."""
RECEIVES = 7
"""Stream of the receives, which last from when a rank is free until its input is there, as NCCL's do."""

_CLASS_OF = {
    "sparse_attention_forward": "attention_forward", "sparse_attention_backward": "attention_backward",
    "scan_forward": "scan", "scan_backward": "scan", "conv": "scan", "indexer_topk": "indexer",
}  # fmt: skip
_INSIDE = {REPEATED_EXPERTS: "all_to_all", TENSOR: "all_gather", CONTEXT: "send_recv"}


def predicted_trace(step: ExecutedStep, ranks: Sequence[int] | None = None) -> StepTrace:
    """An executed step as a trace, one `RankTrace` a GPU, in integer nanoseconds.

    `ranks`: numbers of GPUs, by default the first of every pipeline rank. In folded resolution a GPU that is
    not simulated is shown as the first of its pipeline rank. A host that is late leaves a gap, which
    `idle_by_cause_ns` names "launch_bound". `matched` has the waiting that the engine found at barriers.
    Raises InputError for a fleet and for a GPU that the cluster does not have.
    """
    prepared = step.prepared
    prepared.pool  # noqa: B018 - refuses a fleet, whose pools have no common table of operators
    shown, matched = [], []
    for number, execution, info, rank, member in gpu_places(step, ranks):
        built = _RankBuilder(prepared, execution, info, rank, member, number)
        shown.append(built.trace(prepared.n_gpus))
        matched += built.matched
    notes = [f"predicted with profile {prepared.profile.name}, seed {prepared.scenario.seed}"]
    return StepTrace(prepared.scenario.name, tuple(shown), (0,) * len(shown), tuple(matched), tuple(notes))


def gpu_places(
    step: ExecutedStep, ranks: Sequence[int] | None
) -> list[tuple[int, Execution, TraceInfo, int, int]]:
    """(GPU, execution, info, pipeline rank, member) of each GPU that is asked for."""
    prepared, layout = step.prepared, step.prepared.layout
    whole = prepared.whole
    groups = whole.running if whole is not None else (0,)
    infos = [trace_info(prepared, group) for group in groups]
    at = {
        gpu: (gpu, step.executions[n], info, rank, member)
        for n, info in enumerate(infos)
        for rank, row in enumerate(info.gpus)
        for member, gpu in enumerate(row)
    }
    if ranks is None:
        return [at[row[0]] for row in infos[0].gpus]
    found = []
    for gpu in ranks:
        if not 0 <= gpu < prepared.n_gpus:
            raise InputError(f"rank {gpu}: the scenario has GPUs 0 to {prepared.n_gpus - 1}")
        if gpu not in at and whole is not None:
            raise InputError(f"rank {gpu}: this GPU is lost in the scenario and does nothing; give another")
        stand_in = infos[0].gpus[layout.coordinates(gpu).pp][0]
        found.append((gpu, *at.get(gpu, at[stand_in])[1:]))
    return found


class _EventParts(Struct):
    """Columns of events, gathered in parts of one stream, name and class."""

    names: Names = field(default_factory=Names)
    comms: list[Comm] = field(default_factory=list)
    parts: list[RecordArray] = field(default_factory=list)

    def add(
        self, stream: int, name: str, cls: str, begin: IntArray, end: IntArray, *, phase: int = UNKNOWN,
        layer: int = -1, microbatch: IntArray | int = -1, launch: IntArray | int = 0, shape: str = "",
        comm: int = -1, task: IntArray | int = -1,
    ) -> None:  # fmt: skip
        """Add events; those that take no time are left out. `task`: its number, kept as `correlation`."""
        kept = end > begin
        rows = blank(int(kept.sum()), EVENT)
        for key in ("correlation", "external", "bytes", "sequence", "op", "scope", "shape"):
            rows[key] = -1
        rows["start"], rows["end"] = begin[kept] + START_NS, end[kept] + START_NS
        rows["stream"], rows["name"], rows["cls"] = stream, self.names[name], CLASSES.index(cls)
        rows["activity"], rows["phase"], rows["layer"], rows["comm"] = KERNEL, phase, layer, comm
        rows["op"], rows["shape"] = rows["name"], self.names[shape] if shape else -1
        rows["microbatch"] = np.broadcast_to(microbatch, begin.shape)[kept]
        rows["launch"] = np.broadcast_to(launch, begin.shape)[kept]
        rows["correlation"] = np.broadcast_to(task, begin.shape)[kept]
        self.parts.append(rows)

    def joined(self) -> RecordArray:
        """All events; filled piece by piece, because joining records compares their fields every time."""
        events = blank(sum(map(len, self.parts)), EVENT)
        at = 0
        for part in self.parts:
            events[at : at + len(part)] = part
            at += len(part)
        return events

    def comm(self, kind: str, group: str, ranks: Sequence[int], size: int, crossing: float) -> int:
        """The number of a collective of which each GPU sends `crossing` bytes to the others of its group."""
        whole = round(crossing * size / (size - 1)) if size > 1 and crossing else -1
        self.comms.append(Comm(kind, group, tuple(ranks), size, whole, whole))
        return len(self.comms) - 1


class _RankBuilder:
    """Builds the events of one GPU."""

    def __init__(
        self, prepared: Prepared, execution: Execution, info: TraceInfo, rank: int, member: int, gpu: int
    ) -> None:
        self.prepared, self.execution, self.info = prepared, execution, info
        self.rank, self.member, self.gpu = rank, member, gpu
        self.pricer: Pricer = prepared.pricer
        self.parts = _EventParts()
        self.matched: list[dict[str, Any]] = []
        routed = [
            (s, b)
            for s, kinds in enumerate(execution.program.blocks)
            for b, k in enumerate(kinds)
            if may_route(k)
        ]
        self.routed = {place: number for number, place in enumerate(routed)}
        blocks = [block for stage in prepared.stages.stages for block in stage]
        layers = accumulate(block.is_layer for block in blocks)  # stated blocks have no numbers
        numbers = iter(
            n - 1 if block.is_layer and block.layer is None else -1 if block.layer is None else block.layer
            for block, n in zip(blocks, layers, strict=True)
        )
        self.layers = [[next(numbers) for _ in stage] for stage in prepared.stages.stages]
        self.shares: dict[tuple[BlockKind, Phase, float | None], tuple[FloatArray, FloatArray]] = {}
        plain = prepared.scenario.communication.kernels in (NCCL.name, NCCL_ALLGATHER.name)
        self.library = prepared.scenario.communication.kernels if plain else ""

    def trace(self, world: int) -> RankTrace:
        """All events as the trace of this GPU."""
        self._actions()
        self._sends()
        self._end_of_step()
        events = self.parts.joined()
        events = events[np.lexsort((events["stream"], events["end"], events["start"]))]
        events["rank"] = events["device"] = self.gpu
        accelerator = self.prepared.cluster.accelerator
        raw = Raw(
            self.prepared.scenario.name, self.gpu, world, events, names=list(self.parts.names),
            comms=self.parts.comms, gpu=accelerator.title, gpus_per_node=self.prepared.cluster.node.n_gpus,
        )  # fmt: skip
        end = START_NS + self.execution.end_ns
        row = {
            "number": 0,
            "name": PREDICTED_STEP,
            "start_ns": START_NS,
            **summary.times(events, START_NS, end),
        }
        idle = summary.gaps(raw, START_NS, end)
        idle["dependency"] += idle.pop("unknown")  # after its last kernel a GPU waits for the others
        row["idle_by_cause_ns"] = {**idle, "unknown": 0}
        how = "of the prediction"
        found = Attributed([(PREDICTED_STEP, START_NS, end)], how, how, how, how)
        return RankTrace(raw, found, [row], summary.collectives(raw))

    # -- actions: phases, their operators, and their transfers ---------------------------------------

    def _actions(self) -> None:
        table, times = self.execution.table, self.execution.times
        first, last = table.first_action[self.rank : self.rank + 2].tolist()
        for code, actions in table.of_code():
            own = actions[(actions >= first) & (actions < last)]
            for number, task in enumerate(code.tasks if len(own) else ()):
                end = times.ends[table.first_task[own] + number, self.member]
                microbatch = table.microbatches[own, task.side]
                own_ns = task.rows_ns[microbatch, self.member]
                stage, at = int(table.stages[own[0], task.side]), table.first_task[own] + number
                if task.transfer is None:
                    waits = np.minimum(own_ns, round(task.price.exposed_s * NS))
                    self._operators(COMPUTE, task, stage, end - own_ns, end - waits, microbatch, at)
                    self._inside(task, stage, end - waits, end, microbatch, at)
                    continue
                ready = inputs_ready_ns(self.execution, code, own, [number])[0][:, self.member] + own_ns
                stream = SHARDING if task.stream == "sharding" else COMMUNICATION
                self._operators(stream, task, stage, ready - own_ns, ready, microbatch, at)
                self._transfer(stream, task, stage, ready, times.begins[at], end, microbatch, at)
        self._receives(first, last)

    def _operators(
        self, stream: int, task: CompiledTask, stage: int, begin: IntArray, end: IntArray, micro: IntArray,
        at: IntArray,
    ) -> None:  # fmt: skip
        """The operators of a phase, one after the other, behind the wait for the host."""
        if not (end > begin).any():
            return
        operators = self.pricer.operators(task.kind).get(task.phase, ())
        edges = self._edges(task, stage, begin, end, micro)
        layer, forward = self.layers[stage][task.block], task.phase.endswith(" F")
        grouped = self.prepared.scenario.software.kernels == "eager"
        for n, op in enumerate(operators):
            side = RECOMPUTE if op.recompute else FORWARD if forward else BACKWARD
            launch = np.where(edges[0] > begin, edges[0] + START_NS, 0) if n == 0 else 0
            self.parts.add(
                stream, op.name, trace_class(op, grouped), edges[n], edges[n + 1], phase=side, layer=layer,
                microbatch=micro, launch=launch, shape=_shape(op), task=at,
            )  # fmt: skip

    def _edges(
        self, task: CompiledTask, stage: int, begin: IntArray, end: IntArray, micro: IntArray
    ) -> list[IntArray]:
        """When the first operator of a phase begins and each one ends; the last ends with the phase."""
        price = task.price
        key = (task.kind, task.phase, task.overlapped_share)
        if key not in self.shares:
            self.shares[key] = self._seconds(*key)
        fixed, row = self.shares[key]
        load: FloatArray = np.ones(len(micro))
        number = self.routed.get((stage, task.block))
        if number is not None and price.row_s:
            load = self.execution.program.variation.loads[number][micro, self.member]
        work_s = price.fixed_s - price.host_s - price.exposed_s
        # An operator's own seconds, scaled to what the phase was given with the other loads on the GPU.
        scale = [given / max(own.sum(), 1e-30) for given, own in ((work_s, fixed), (price.row_s, row))]
        each = fixed[:, None] * scale[0] + row[:, None] * scale[1] * load
        whole = price.host_s + each.sum(axis=0)
        passed = np.concatenate(([np.full(len(micro), price.host_s)], each)).cumsum(axis=0)
        shares = passed / np.maximum(whole, 1e-30)
        shares[-1] = 1.0
        return [begin + np.rint((end - begin) * np.minimum(share, 1.0)).astype(np.int64) for share in shares]

    def _seconds(self, kind: BlockKind, phase: Phase, share: float | None) -> tuple[FloatArray, FloatArray]:
        """Seconds of the operators of a phase that do not and that do grow with the received rows."""
        operators = self.pricer.operators(kind).get(phase, ())
        if share is None:
            seconds = _of(self.pricer.operator_costs(kind, phase, "alone"))
        else:
            reserved, beside = (_of(self.pricer.operator_costs(kind, phase, mode)) for mode in PAIR_MODES)
            seconds = (1.0 - share) * reserved + share * beside
        grows = np.array([op.per_received_row for op in operators], dtype=bool)
        return np.where(grows, 0.0, seconds), np.where(grows, seconds, 0.0)

    def _inside(
        self, task: CompiledTask, stage: int, begin: IntArray, end: IntArray, micro: IntArray, at: IntArray
    ) -> None:
        """The exposed time of the collectives inside a phase."""
        price: PhaseCost = task.price
        if price.exposed_s <= 0.0:
            return
        what = price.moved[0].what if price.moved else TENSOR
        kind, size = _INSIDE.get(what, "all_gather"), self.info.group_sizes["model"]
        group, side = "model", FORWARD if task.phase.endswith(" F") else BACKWARD
        if what == REPEATED_EXPERTS:
            kind = "all_to_all" if self.library else "ep_dispatch"
            size, group, side = self.info.group_sizes["ep"], "ep", RECOMPUTE
        crossing = sum(part.nic_bytes + part.scale_up_bytes for part in price.moved)
        comm = self._comm(kind, group, size, crossing)
        layer = self.layers[stage][task.block]
        self.parts.add(
            INSIDE, what, kind, begin, end, phase=side, layer=layer, microbatch=micro, comm=comm, task=at
        )

    def _transfer(
        self, stream: int, task: CompiledTask, stage: int, ready: IntArray, met: IntArray, end: IntArray,
        micro: IntArray, at: IntArray,
    ) -> None:  # fmt: skip
        """A collective from when this GPU is ready; an expert library's barrier is a kernel of its own."""
        transfer, phase = task.transfer, task.phase
        assert transfer is not None
        side = FORWARD if phase.endswith(" F") else BACKWARD
        layer = self.layers[stage][task.block]

        def add(name: str, cls: str, begin: IntArray, end: IntArray) -> None:
            self.parts.add(
                stream, name, cls, begin, end, phase=side, layer=layer, microbatch=micro, comm=comm, task=at
            )

        cost, sizes = transfer.cost, self.info.group_sizes
        crossing = cost.nic_bytes + cost.scale_up_bytes
        if phase not in EP_PHASES:
            kind = "all_gather" if phase.startswith("gather") else "reduce_scatter"
            comm = self._comm(kind, "shards", sizes["dp"], crossing)
            copies = gather_copies(self.pricer, task.kind) if kind == "all_gather" else ()
            for op, price in zip(copies, self.pricer.operator_prices(copies), strict=True):
                filled = np.minimum(end, ready + round(price.seconds * NS))
                self.parts.add(stream, op.name, trace_class(op), ready, filled, phase=side, layer=layer,
                               microbatch=micro, task=at)  # fmt: skip
                ready = filled
        else:
            kind = "ep_dispatch" if phase in ("dispatch F", "combine B") else "ep_combine"
            if self.library:
                kind = "all_to_all" if self.library == NCCL.name else _gathered(kind)
            comm = self._comm(kind, "ep", sizes["ep"], crossing)
        begin = ready
        if phase in EP_PHASES and not self.library:
            begin = np.minimum(end, met + transfer.launch_ns)
            add(f"notify {phase}", "ep_notify", ready, begin)
        add(f"{kind} {phase}", kind, begin, end)
        self._match(kind, begin, np.maximum(met, begin), end)

    def _comm(self, kind: str, group: str, size: int, crossing: float) -> int:
        """The number of a collective; its ranks where the layout says them."""
        layout, own = self.prepared.layout, self.gpu
        first = own - own % size
        ranks: Sequence[int] = {
            "ep": layout.ep_group(own), "model": range(first, first + size), "pp": (),
            "gradient norm": range(self.prepared.n_gpus),
        }.get(group, layout.dp_group(own))  # fmt: skip
        return self.parts.comm(kind, group, ranks if len(ranks) == size else (), size, crossing)

    def _match(self, kind: str, begin: IntArray, met: IntArray, end: IntArray) -> None:
        for one, last, stop in zip(begin.tolist(), met.tolist(), end.tolist(), strict=True):
            if stop > one:
                wait = min(max(last - one, 0), stop - one)
                self.matched.append({
                    "rank": self.gpu, "class": kind, "group": "", "occurrence": -1, "bytes": -1,
                    "start_ns": one + START_NS, "waiting_ns": wait, "transfer_ns": stop - one - wait,
                })  # fmt: skip

    # -- between pipeline ranks, and the end of the step ---------------------------------------------

    def _receives(self, first: int, last: int) -> None:
        """Waits for an activation or a gradient, from when the rank is free until the action begins."""
        table, times = self.execution.table, self.execution.times
        length = {s.label: s.end - s.start for s in self.execution.sends if s.target == self.rank}
        free, begins, ends, starts = 0, [], [], []
        for action in range(first, last):
            begin, step = int(times.start[action, self.member]), table.steps[action]
            (forward, backward), (micro, other) = step.stages, step.microbatches
            inputs = f"{forward - 1}F{micro}", f"{backward + 1}B{other}"
            came = [length[label] for label in inputs if label in length]
            if begin > free and came:
                begins.append(free)
                ends.append(begin)
                starts.append(max(free, begin - max(came)))
            free = int(times.free[action, self.member])
        begin_ns, end_ns = np.array(begins, np.int64), np.array(ends, np.int64)
        comm = self._comm("send_recv", "pp", 2, 0.0)
        self.parts.add(RECEIVES, "receive", "send_recv", begin_ns, end_ns, comm=comm)
        self._match("send_recv", begin_ns, np.array(starts, np.int64), end_ns)

    def _sends(self) -> None:
        sent = [send for send in self.execution.sends if send.source == self.rank]
        if not sent:
            return
        comm = self._comm("send_recv", "pp", 2, self.execution.program.costs.send_bytes / 2)
        for send, lane in send_lanes(sent):
            side = FORWARD if "F" in send.label else BACKWARD
            span = np.array([send.start]), np.array([send.end])
            self.parts.add(FIRST_SEND + lane, f"send {send.label}", "send_recv", *span, phase=side, comm=comm)

    def _end_of_step(self) -> None:
        sync, sizes = self.execution.syncs[self.rank], self.info.group_sizes
        whole = sync.gather[1] == sync.gather[0]  # without a gather every rank updated all parameters
        parts = (
            (
                "all_reduce" if whole else "reduce_scatter",
                "gradients",
                sizes["dp"],
                sync.ready_ns,
                sync.reduce,
            ),
            ("all_reduce", "gradient norm", sizes["world"], sync.reduce[1], sync.norm),
            ("all_gather", "parameters", sizes["dp"], sync.gather[0], sync.gather),
        )
        for kind, name, size, ready, (begin, end) in parts:
            if end > begin:
                comm = self._comm(kind, name, size, 0.0)
                spans = [np.array([when], np.int64) for when in (min(ready, begin), begin, end)]
                self.parts.add(
                    DATA_PARALLEL, f"{kind} of {name}", kind, spans[0], spans[2], phase=OPTIMIZER, comm=comm
                )
                self._match(kind, *spans)
        schedule, by_place = self.prepared.schedule, self.prepared.scenario.software.buckets_by_chunk
        held = chunks_by_rank(schedule, self.prepared.stages, by_place=by_place)[self.rank]
        operators, costs = update_operators(self.pricer, held, schedule)
        begin, end = sync.optimizer
        seconds = _of(costs)
        passed = np.append(0.0, seconds.cumsum()) / max(float(seconds.sum()), 1e-30)
        edges = [begin + round((end - begin) * min(float(share), 1.0)) for share in passed[:-1]] + [end]
        for op, (one, other) in zip(operators, pairwise(edges), strict=True):
            clips = op.name in ("optimizer.gradient_norm", "gradients.clip") or op.variant == "norm"
            kind = "clip" if clips else "optimizer"
            self.parts.add(COMPUTE, op.name, kind, np.array([one]), np.array([other]), phase=OPTIMIZER)


def _of(costs: Sequence[OperatorCost]) -> FloatArray:
    return np.array([cost.seconds for cost in costs], dtype=float)


def _gathered(kind: str) -> str:
    return "all_gather" if kind == "ep_dispatch" else "reduce_scatter"


def trace_class(op: Operator, grouped: bool = True) -> str:
    """The class of `CLASSES` that a kernel of this operator has in a read trace.

    `grouped`: whether the weight gradients of all experts are one kernel, as PyTorch's `_grouped_mm`; else
    each expert has its own, as in DeepSeek's trace.
    """
    if op.name.startswith("fsdp."):
        return "fsdp_copy"
    if op.gemm is not None and op.gemm.groups > 1 and op.cls in (
        "gemm", "grouped_gemm", "wgrad_gemm" if grouped else "",
    ):  # fmt: skip
        return "grouped_gemm"
    if op.name.startswith("logits."):
        return "cast"
    if op.variant == "index_add":  # gradients of biases, summed by expert
        return "permute"
    return _CLASS_OF.get(op.cls, op.cls)


def _shape(op: Operator) -> str:
    if op.gemm is None or op.cls not in GEMM_CLASSES:
        return ""
    m, n, k = (round(size) for size in (op.gemm.m, op.gemm.n, op.gemm.k))
    return f"{m}x{n}x{k}"
