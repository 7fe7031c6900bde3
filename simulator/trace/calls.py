"""The calls of operators on a rank's compute stream, with their sizes and what ran beside them."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.simulator.trace.classes import CLASSES
from moesim.simulator.trace.events import BACKWARD, KERNEL, OPTIMIZER, RECOMPUTE
from moesim.simulator.trace.read import RankTrace, StepTrace
from moesim.simulator.trace.summary import is_communication, spans_of

Sizes = list[list[int]]
QUEUED_NS = 20_000
"""A kernel launched this long before the one before it ended did not wait for the host."""
LONGEST_GAP_NS = 20_000
GATHER_COPY = "aten::_foreach_copy_"
"""FSDP2 copies its shards into the buffer of an all-gather with it, on a stream of its own."""


class TracedCall(Struct):
    """The kernels of one operator's call; `ns` as if it ran alone, where that is known."""

    cls: str
    op: str
    backward: bool
    optimizer: bool
    dims: list[Any]
    types: list[Any]
    start: int
    end: int
    ns: float
    beside_ns: int = 0
    names: str = ""
    recompute: bool = False
    lost_ns: float = 0.0
    known_alone: bool = True
    step: int = 0
    external: int = -1
    """The call's number in the file, or one below 0 of its own; ranks of one run number their calls alike."""
    rank: int = 0

    @property
    def elements(self) -> int:
        """Elements of the first tensor, or of all of the first list; 0 if not said."""
        return sum(prod(size) for size in self.first)

    @property
    def first(self) -> Sizes:
        """The sizes of the first tensor, or of all of the first list of tensors."""
        first = self.dims[0] if self.dims and isinstance(self.dims[0], list) else []
        return [size for size in ([first] if is_size(first) else first) if is_size(size)]

    @property
    def sizes(self) -> Sizes:
        """The sizes of the inputs that are tensors."""
        return [size for size in self.dims if is_size(size)]


def is_size(value: object) -> bool:
    """Whether a value of a file is the size of a tensor."""
    return isinstance(value, list) and bool(value) and all(isinstance(side, int) for side in value)


def calls_of(rank: RankTrace) -> list[TracedCall]:
    """Calls of operators on the compute stream of a rank, inside its steps, in order."""
    events, names = rank.events, rank.names
    talks = is_communication(events)
    inside = np.zeros(len(events), bool)
    numbers = np.zeros(len(events), np.int64)
    for step in rank.steps:
        own = (events["end"] > step["start_ns"]) & (events["start"] < step["start_ns"] + step["wall_ns"])
        inside |= own
        numbers[own] = step["number"]
    kept = inside & ~talks & ~events["graph"] & (events["activity"] <= 1)
    if not kept.any():
        return []
    length = events["end"] - events["start"]
    streams = np.unique(events["stream"][kept])
    main = max(streams.tolist(), key=lambda stream: int(length[kept & (events["stream"] == stream)].sum()))
    busy = spans_of(events[talks & (events["activity"] == KERNEL)])
    parsed: dict[int, tuple[list[Any], list[Any]]] = {}
    calls: list[TracedCall] = []
    last = (-2, "")
    longest = 0
    copies = [n for n, name in enumerate(names) if name == GATHER_COPY]
    gathers = kept & np.isin(events["op"], copies) & np.isin(events["cls"], [CLASSES.index("fsdp_copy")])
    on_main = kept & (events["stream"] == main)
    for n in [*np.flatnonzero(on_main).tolist(), *np.flatnonzero(gathers & ~on_main).tolist()]:
        event = events[n]
        place = int(event["dims"])
        if place not in parsed:
            parsed[place] = _parsed(names[place] if place >= 0 else "")
        op = names[int(event["op"])] if event["op"] >= 0 else ""
        start, end, external = int(event["start"]), int(event["end"]), int(event["external"])
        beside = _shared(busy, start, end)
        name, cls, phase = names[int(event["name"])], CLASSES[int(event["cls"])], int(event["phase"])
        if calls and external > 0 and (external, op) == last:
            call = calls[-1]
            call.end, call.ns, call.beside_ns = end, call.ns + end - start, call.beside_ns + beside
            call.names += f" {name}"
            if end - start > longest:
                call.cls, longest = cls, end - start
            continue
        last, longest = (external, op), end - start
        calls.append(TracedCall(
            cls, op, phase == BACKWARD, phase == OPTIMIZER, *parsed[place], start, end,
            float(end - start), beside, name,
            phase == RECOMPUTE, step=int(numbers[n]), external=external if external > 0 else -n - 2,
            rank=rank.raw.rank,
        ))  # fmt: skip
    return calls


def _parsed(text: str) -> tuple[list[Any], list[Any]]:
    try:
        dims, _, types = text.partition("\t")
        return json.loads(dims or "[]"), json.loads(types or "[]")
    except ValueError:
        return [], []


def _shared(spans: tuple[Any, Any], start: int, end: int) -> int:
    """Nanoseconds of a span that merged spans cover."""
    starts, ends = spans
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end, "left")
    return int((np.minimum(ends[first:last], end) - np.maximum(starts[first:last], start)).sum())


def take_alone(calls: Sequence[TracedCall]) -> None:
    """Give a call beside a collective the median of equal calls that ran alone; say where there is none."""
    groups: dict[Any, list[TracedCall]] = defaultdict(list)
    for call in calls:
        groups[call.cls, call.op, call.names, str(call.dims)].append(call)
    for group in groups.values():
        alone = [call.ns for call in group if not call.beside_ns]
        usual = statistics.median(alone) if alone else 0.0
        for call in group:
            if call.beside_ns and alone:
                call.lost_ns, call.ns = call.ns - usual, usual
            call.known_alone = bool(alone)


def check_one_run(trace: StepTrace) -> None:
    """Raise InputError where the ranks of a trace are of different GPUs or of two runs."""
    gpus = sorted({rank.raw.gpu for rank in trace.ranks})
    if len(gpus) > 1:
        raise InputError(
            f"{trace.source}: its ranks ran on {' and '.join(gpu or 'a GPU not named' for gpu in gpus)}; a "
            f"profile is "
            "of one accelerator: give the ranks of one"
        )
    kernels = [{rank.names[n] for n in np.unique(rank.events["name"]).tolist()} for rank in trace.ranks]
    if len(trace.ranks) > 1 and not trace.matched and all(rank.collectives for rank in trace.ranks):
        raise InputError(
            f"{trace.source}: no collective of one of its {len(trace.ranks)} ranks meets one of another, so "
            f"these are "
            "not ranks of one run; give the files of one run"
        )
    for one, other in pairwise(kernels):
        if len(one & other) * 4 < min(len(one), len(other)):
            raise InputError(
                f"{trace.source}: ranks share {len(one & other)} of {min(len(one), len(other))} kernels, so "
                f"these are "
                "two runs; give the files of one run"
            )


def queued_gaps(rank: RankTrace) -> list[int]:
    """Gaps between kernels of the compute stream whose launch had come long before."""
    events = rank.events[(rank.events["activity"] == KERNEL) & ~is_communication(rank.events)]
    if not len(events):
        return []
    streams, counts = np.unique(events["stream"], return_counts=True)
    own = events[events["stream"] == streams[int(counts.argmax())]]
    gap = own["start"][1:] - own["end"][:-1]
    queued = (own["launch"][1:] >= 0) & (own["launch"][1:] + QUEUED_NS < own["end"][:-1])
    return [int(ns) for ns in gap[queued & (gap >= 0) & (gap < LONGEST_GAP_NS)]]


# -- classes of calls -------------------------------------------------------------------------------


def gemm_shape(call: TracedCall) -> tuple[str, int, int, int, int] | None:
    """Use, m, n, k and groups of a GEMM in BF16; None where its sizes or its format are not known."""
    tensors = [size for size in call.sizes if len(size) in (2, 3)]
    if call.types and not any("BFloat16" in str(kind) for kind in call.types):
        return None
    if "grouped_mm" in call.op and len(call.sizes) >= 3:
        left, right, ends = call.sizes[:3]
        if len(left) == 2 and left[-1] == right[-2]:
            use = "wgrad_gemm" if len(right) == 2 else "grouped_gemm"
            return use, left[0], right[-1], left[1], ends[0]
        return None
    if call.cls == "grouped_gemm" or len(tensors) < 2 or any(len(size) != 2 for size in tensors[-2:]):
        return None
    left, right = tensors[-2:]
    if left[1] != right[0]:
        return None
    return call.cls, left[0], right[1], left[1], 1


_TIED = ("rope", "permute", "topk")
_COUNTING = re.compile(r"::(?:sort|argsort|histc|bincount|cumsum)$")


def chained(kinds: Sequence[str], ops: Sequence[str], backward: Sequence[bool]) -> list[str]:
    """Classes of what runs on a stream, in order, by the chain that each stands in.

    Casts belong to the rotation, the permute or the choice of experts beside them, and sorts of the routing
    to the choice of experts.
    """
    found = [
        "topk" if kind == "permute" and not back and _COUNTING.search(op) else kind
        for kind, op, back in zip(kinds, ops, backward, strict=True)
    ]
    n = 0
    while n < len(found):
        end = n
        while end < len(found) and found[end] == "cast":
            end += 1
        near = [found[n - 1] if n else "", found[end] if end < len(found) else ""]
        owner = next((cls for cls in near if cls in (*_TIED, "loss")), "")
        if owner in _TIED:
            found[n:end] = [owner] * (end - n)
        n = end + 1
    return found


def give_to_chains(calls: Sequence[TracedCall]) -> None:
    """Give the calls of a stream the classes of their chains."""
    columns = [call.cls for call in calls], [call.op for call in calls], [call.backward for call in calls]
    for call, cls in zip(calls, chained(*columns), strict=True):
        call.cls = cls


EXPERT_BIAS = "expert_bias"
"""Class of calls that repeat, join and sum the biases of experts, or slice what their activation clamps."""
_OF_BIAS = re.compile(r"::(?:index_add_?|gather|repeat_interleave)$")
ROWS = 100_000
"""Elements that rows of tokens have at least; lists of tokens and counts of experts have fewer."""


def set_biases_apart(calls: Sequence[TracedCall], missing: list[str]) -> None:
    """Take out of the permutes what models with biases of experts run between them.

    These calls have tensors of one row an expert, or rows that are not of the hidden size.
    """
    shapes = [gemm_shape(call) for call in calls if call.cls == "grouped_gemm" and not call.backward]
    shape = next((shape for shape in shapes if shape and shape[0] == "grouped_gemm"), None)
    if shape is None:
        return
    hidden, experts = shape[3], shape[4]
    permutes = [call for call in calls if call.cls == "permute"]
    for call in permutes:
        tensors = [size for size in (call.sizes or call.first) if len(size) > 1]
        of_experts = bool(_OF_BIAS.search(call.op) and tensors and tensors[0][0] == experts)
        other_width = sum(map(prod, tensors)) > ROWS and all(hidden not in size[-2:] for size in tensors)
        if of_experts or other_width:
            call.cls = EXPERT_BIAS
    if any(call.cls == EXPERT_BIAS for call in permutes):
        for call in permutes:  # a bias joined to many rows of padding; routed rows are joined to one of zeros
            if call.op == "aten::cat" and len(call.first) > 1 and min(size[0] for size in call.first) > 1:
                call.cls = EXPERT_BIAS
        missing.append("biases of experts and their clamped activation")
