"""Attributes GPU events: launch, operators, class, phase, layer, micro-batch and step, each with how it is
known.

A launch is the host call with the same correlation; what encloses that call on its thread are the
operators and annotations that launched the kernel. A graph replay has one launch for all its kernels: they
get a class by their names and nothing else, and the notes say so.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import RecordArray
from moesim.simulator.trace.classes import CLASSES, UNCLASSIFIED, Rules, classify, context, own_class
from moesim.simulator.trace.events import (
    ANNOTATION,
    BACKWARD,
    CALL,
    FORWARD,
    OPTIMIZER,
    OVERHEAD,
    PHASES,
    RECOMPUTE,
    UNKNOWN,
    Names,
    Raw,
    records,
)  # fmt: skip

_LAYER = re.compile(
    r"(?:\blayers?|\bblocks?|\bh|DecoderLayer|TransformerBlock|TransformerLayer)[._](\d{1,4})\b"
)
_ENGINE = "autograd::engine::evaluate_function: "
_STEP = re.compile(r"^ProfilerStep#?\s*(\d+)|^(?:step|iteration|train_step|training_step)[ _#:]*(\d+)$", re.I)
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#|^##? ?optimizer(?:\.step)? ?#*$|optimizer[._]step", re.I)
_GRAPH = re.compile(r"GraphLaunch", re.I)
RECOMPUTED = -3
"""Stands in a path between an autograd node and operators with a number of their own that run in it again."""
_PROBE = re.compile(r"bwd|backward|bprop|dgrad|wgrad|_bwd_", re.I)


class Attributed(Struct):
    """What was derived for one rank beside the columns of its events."""

    steps: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, start and end of each step in nanoseconds."""
    step_method: str = ""
    layer_method: str = ""
    microbatch_method: str = ""
    phase_method: str = ""
    replayed: int = 0
    unlaunched: int = 0


def attribute(raw: Raw, rules: Rules | None = None) -> Attributed:
    """Fill the derived columns of `raw.events` in place; names may be added to `raw.names`."""
    result = Attributed()
    events, names = raw.events, Names()
    for name in raw.names:
        names[name]
    order = np.lexsort((events["end"], events["start"]))
    raw.events = events[order]
    raw.classes = [raw.classes[n] for n in order.tolist()] if raw.classes else []
    paths = _launches(raw, result)
    kinds = _classes(raw, paths, rules)
    _sides(raw, paths, result)
    _shapes(raw, names, kinds)
    own = {n: found for n, name in enumerate(raw.names) if (found := own_class(name))}
    raw.events["cls"] = [
        CLASSES.index(own.get(name, kind))
        for name, kind in zip(raw.events["name"].tolist(), kinds, strict=True)
    ]
    result.steps, result.step_method = find_steps(raw)
    _number_steps(raw, result)
    if not raw.classes:
        _late_sides(raw, any(_ENGINE in name for name in raw.names))
    _layers(raw, paths, result)
    raw.names = list(names)
    return result


def _launches(raw: Raw, result: Attributed) -> list[tuple[int, ...]]:
    """The numbers of the names around the launch of each event, outermost first."""
    host = raw.host
    length = host["end"] - host["start"]
    host[:] = host[np.lexsort((host["kind"], -length, host["start"], host["thread"]))]
    path_of: dict[tuple[int, int, bool], int] = {}
    paths: list[tuple[int, ...]] = [()]
    chains: list[int] = [0] * len(host)
    sequences: list[int] = [-1] * len(host)
    shapes: list[int] = [-1] * len(host)
    stack: list[tuple[int, int, int, int]] = []
    engine = {number for number, name in enumerate(raw.names) if name.startswith(_ENGINE)}
    inside: set[int] = set()
    markers = {number for number, name in enumerate(raw.names) if _STEP.match(name)}
    thread = None
    fields = ("start", "end", "thread", "name", "kind", "sequence", "shape")
    for n, (start, end, owner, name, kind, sequence, shape) in enumerate(records(host, fields)):
        if owner != thread:
            stack, thread = [], owner
        while stack and stack[-1][0] <= start:
            stack.pop()
        top = stack[-1] if stack else (0, 0, -1, -1)
        if kind in (CALL, OVERHEAD):
            chains[n], sequences[n], shapes[n] = top[1], top[2], top[3]
            continue
        if name in markers:  # a step is no launcher, and would make every path of its own
            stack.append((end, *top[1:]))
            continue
        again = sequence >= 0 and top[2] >= 0 and sequence != top[2] and top[1] in inside
        key = (top[1], name, again)
        path = path_of.get(key)
        if path is None:
            path = path_of[key] = len(paths)
            paths.append((*paths[top[1]], RECOMPUTED, name) if again else (*paths[top[1]], name))
            if name in engine or (not again and top[1] in inside):
                inside.add(path)
        sequence = sequence if sequence >= 0 else top[2]
        shape = shape if shape >= 0 else top[3]
        stack.append((end, path, sequence, shape))
        chains[n], sequences[n], shapes[n] = path, sequence, shape
    return _joined(raw, result, paths, chains, sequences, shapes)


def _joined(
    raw: Raw,
    result: Attributed,
    paths: list[tuple[int, ...]],
    chains: list[int],
    sequences: list[int],
    shapes: list[int],
) -> list[tuple[int, ...]]:
    """Join events to host calls by correlation, and where there is none to operators by External id."""
    host, events = raw.host, raw.events
    calls = {
        int(host["correlation"][n]): n
        for n in np.flatnonzero((host["kind"] == CALL) & (host["correlation"] >= 0))
    }
    operators = {
        int(host["external"][n]): n
        for n in np.flatnonzero((host["kind"] <= ANNOTATION) & (host["external"] >= 0))
    }
    graphs = {number for number, name in enumerate(raw.names) if _GRAPH.search(name)}
    found: list[tuple[int, ...]] = []
    ops, scopes = np.full(len(events), -1), np.full(len(events), -1)
    for n, (correlation, external, graph) in enumerate(records(events, ("correlation", "external", "graph"))):
        place = calls.get(correlation, -1)
        if place >= 0:
            events["launch"][n] = host["start"][place]
            if graph or int(host["name"][place]) in graphs:
                events["graph"][n] = True
                result.replayed += 1
                found.append(())
                continue
        path = paths[chains[place]] if place >= 0 else ()
        other = operators.get(external, -1) if external != correlation else -1
        if not path and other >= 0:
            place, path = other, paths[chains[other]]
        if place < 0:
            result.unlaunched += 1
        elif path:
            events["sequence"][n], events["shape"][n] = sequences[place], shapes[place]
        for name in reversed(path):
            if name == RECOMPUTED:
                continue
            text = raw.names[name]
            is_op = text.startswith(("aten::", "c10d::", "autograd::")) or "Backward" in text or "::" in text
            if ops[n] < 0 and is_op and not text.startswith("FSDP::"):
                ops[n] = name
            if scopes[n] < 0 and not text.startswith(
                ("aten::", "autograd::", "c10d::", "PythonD", "PythonS")
            ):
                scopes[n] = name
        found.append(path)
    if raw.classes:
        return found
    events["op"], events["scope"] = ops, scopes
    return found


def _classes(raw: Raw, paths: list[tuple[int, ...]], rules: Rules | None) -> list[str]:
    """The class of every event; generic arithmetic of a stream by its neighbours, backward by its forward."""
    if raw.classes:
        return list(raw.classes)
    events = raw.events
    memory: dict[tuple[Any, ...], str] = {}
    kinds = []
    keys = records(events, ("name", "activity", "comm"))
    for (name, activity, comm), path in zip(keys, paths, strict=True):
        key = (name, activity, comm, path)
        if key not in memory:
            begin = _start(path)
            outer = (raw.names[part] for part in path[: max(begin - 1, 0)])
            words = tuple(word for word in outer if word.startswith("FSDP::"))
            words += tuple(raw.names[part] for part in path[begin:])
            memory[key] = classify(
                raw.names[name], words, activity, raw.comms[comm].kind if comm >= 0 else "", rules
            )
        kinds.append(memory[key])
    ops = [raw.names[op] if op >= 0 else "" for op in events["op"].tolist()]
    backward = [RECOMPUTED not in path and any(_ENGINE in raw.names[part] for part in path) for path in paths]
    decided = list(kinds)
    for stream in np.unique(events["stream"]):
        places = np.flatnonzero(events["stream"] == stream).tolist()
        for place, kind in zip(
            places, context([kinds[n] for n in places], [ops[n] for n in places]), strict=True
        ):
            decided[place] = kind
    forward: dict[int, str] = {}
    for n, sequence in enumerate(events["sequence"].tolist()):
        if sequence >= 0 and not backward[n] and decided[n] not in ("fill", "memset"):
            forward[sequence] = decided[n]
    for n, sequence in enumerate(events["sequence"].tolist()):
        twin = forward.get(sequence, "")
        if backward[n] and kinds[n].startswith("?") and twin in (
            "rope", "swiglu", "permute", "norm", "topk", "loss", "embedding", "cast", "transpose",
        ):  # fmt: skip
            decided[n] = twin
        if backward[n] and twin == "gate_gemm" and kinds[n] == "gemm":
            decided[n] = "gate_gemm"
        if backward[n] and twin == "topk" and kinds[n] == "permute":
            decided[n] = "topk"
        if twin == "permute" and decided[n] in ("fill", "memset"):
            decided[n] = "permute"
    return decided


def _start(path: tuple[int, ...]) -> int:
    """Where the words of a path begin that say what the kernel does: behind the mark of a recomputation."""
    return len(path) - path[::-1].index(RECOMPUTED) if RECOMPUTED in path else 0


def _sides(raw: Raw, paths: list[tuple[int, ...]], result: Attributed) -> None:
    """The phase of every event: by autograd's spans, by annotations, else by the name of the kernel."""
    if raw.classes:
        result.phase_method = "in the file"
        return
    memory: dict[tuple[int, ...], int] = {}
    trains = any(_ENGINE in name for name in raw.names)
    for n, path in enumerate(paths):
        if path not in memory:
            memory[path] = (
                RECOMPUTE if RECOMPUTED in path else _side([raw.names[part] for part in path], trains)
            )
        side = memory[path]
        if (
            side == UNKNOWN
            and (not path or not trains)
            and _PROBE.search(raw.names[int(raw.events["name"][n])])
        ):
            side = BACKWARD
        raw.events["phase"][n] = side
    result.phase_method = "autograd's spans and annotations" if trains else "names and annotations only"


def _side(words: list[str], trains: bool) -> int:
    joined = " ".join(words)
    own = re.search(r"\bmoesim::phase::(\w+)", joined)
    if own and own[1] in PHASES:
        return PHASES.index(own[1])
    if re.search(r"Optimizer\.step|clip_grad|_foreach_norm|_foreach_mul_|_fused_adam|## optimizer", joined):
        return OPTIMIZER
    for place, word in enumerate(words):
        if word.startswith(_ENGINE):
            node = word.removeprefix(_ENGINE)
            if "PythonDispatchMode" in words[place + 1 :]:  # selective checkpointing watches what runs again
                return RECOMPUTE
            following = words[place + 1] if place + 1 < len(words) else ""
            same = (
                following == node
                or "AccumulateGrad" in node
                or following.startswith(("aten::add", "aten::sum", "aten::detach", "FSDP::"))
                or not following
            )
            if "CheckpointFunctionBackward" in node:
                inner = any(other.startswith(_ENGINE) for other in words[place + 1 :])
                return BACKWARD if inner else RECOMPUTE
            return BACKWARD if same or "Backward" in following or "AccumulateGrad" in following else RECOMPUTE
    if re.search(r"backward|bwd|ddp\.reducer", joined, re.I):
        return BACKWARD
    if re.search(
        r"FSDP::(?:pre_forward|forward_prefetch|root_pre|cast_forward)|\bforward\b|## forward", joined
    ):
        return FORWARD
    works = any(word.startswith(("aten::", "c10d::", "_c10d_functional::")) for word in words)
    return FORWARD if trains and works else UNKNOWN


def _dims(text: str) -> list[list[int]]:
    try:
        listed = json.loads(text.partition("\t")[0])
    except (ValueError, RecursionError):
        return []
    return [
        item
        for item in listed
        if isinstance(item, list) and item and all(type(x) is int and 0 <= x < 2**40 for x in item)
    ]


def _shapes(raw: Raw, names: Names, kinds: list[str]) -> None:
    """Replace the operands' sizes of GEMMs by m x n x k, and find the weight gradients among them."""
    events = raw.events
    events["dims"] = events["shape"]
    product: dict[int, tuple[int, int, int, int]] = {}
    for place in np.unique(events["shape"]).tolist():
        dims = _dims(raw.names[place]) if place >= 0 else []
        matrices = [item for item in dims if len(item) in (2, 3)][-2:]
        if len(matrices) == 2:
            (left, right) = matrices
            if left[-1] == right[-2]:
                batch = left[0] if len(left) == 3 and len(right) == 3 else 1
                rows_left = left[-2] * (left[0] if len(left) == 3 and len(right) == 2 else 1)
                product[place] = (batch, rows_left, right[-1], left[-1])
    forward: dict[int, tuple[int, int, int, int]] = {}
    recompute_or_forward = np.isin(events["phase"], (FORWARD, RECOMPUTE))
    for n in np.flatnonzero(recompute_or_forward).tolist():
        shape = product.get(int(events["shape"][n]))
        if shape and kinds[n] == "gemm" and events["sequence"][n] >= 0:
            forward[int(events["sequence"][n])] = shape
    for n, kind in enumerate(kinds):
        shape = product.get(int(events["shape"][n]))
        if shape is None or kind not in ("gemm", "gate_gemm", "grouped_gemm"):
            events["shape"][n] = -1
            continue
        batch, m, width, k = shape
        op = raw.names[int(events["op"][n])] if events["op"][n] >= 0 else ""
        if kind == "gemm" and op == "aten::bmm" and 1 in (m, width, k):
            kinds[n] = "permute"
        before = forward.get(int(events["sequence"][n]))
        if events["phase"][n] == BACKWARD and before and kinds[n] == "gemm" and batch == 1:
            _, tokens, out, inner = before
            if k == tokens and sorted((m, width)) == sorted((out, inner)):
                kinds[n] = "wgrad_gemm"
        text = f"{m}x{width}x{k}"
        events["shape"][n] = names[f"{batch} of {text}" if batch > 1 else text]


def find_steps(raw: Raw) -> tuple[list[tuple[str, int, int]], str]:
    """Steps as (name, start, end) on the host's clock, and how they were found."""
    host, events = raw.host, raw.events
    marked = {number: match for number, name in enumerate(raw.names) if (match := _STEP.match(name))}
    spans = []
    for n in np.flatnonzero(host["kind"] == ANNOTATION).tolist():
        if int(host["name"][n]) in marked:
            spans.append((raw.names[int(host["name"][n])], int(host["start"][n]), int(host["end"][n])))
    if spans:
        spans.sort(key=lambda span: span[1])
        outer = [spans[0]]
        for span in spans[1:]:
            if span[1] >= outer[-1][2]:
                outer.append(span)
        return outer, "annotations of steps (such as ProfilerStep)"
    if not len(events):
        return [], "no GPU events"
    first, last = int(events["start"].min()), int(events["end"].max())
    ends = {number for number, name in enumerate(raw.names) if _OPTIMIZER_STEP.search(name)}
    places = np.flatnonzero((host["kind"] <= ANNOTATION) & np.isin(host["name"], list(ends)))
    begin = int(min(first, host["start"].min())) if len(host) else first
    tops = _outermost(host, places)
    if len(tops) > 1:
        edges = [begin, *[end for _, end in tops]]
        return _between(edges), "the ends of the optimizer's annotations"
    return _by_kernels(raw, first, last)


def _outermost(host: RecordArray, places: np.ndarray) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted((int(host["start"][n]), int(host["end"][n])) for n in places):
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found


def _between(edges: list[int]) -> list[tuple[str, int, int]]:
    return [(f"step {n}", start, end) for n, (start, end) in enumerate(pairwise(edges))]


def _by_kernels(raw: Raw, first: int, last: int) -> tuple[list[tuple[str, int, int]], str]:
    """Steps by runs of optimizer kernels, else by a kernel that returns at even distances, else one span."""
    events = raw.events
    times = events["start"][events["cls"] == CLASSES.index("optimizer")]
    whole = last - first
    if len(times) > 1:
        gaps = np.flatnonzero(np.diff(times) > max(whole // 50, 1))
        runs = len(gaps) + 1
        if runs > 1:
            edges = [first, *events["start"][np.searchsorted(events["start"], times[gaps])].tolist(), last]
            ends = [int(events["end"][events["start"] == time].max()) for time in edges[1:-1]]
            tail = int(events["end"][np.flatnonzero(events["cls"] == CLASSES.index("optimizer"))[-1]])
            return _between([first, *ends, tail]), "runs of optimizer kernels, with other work between"
    numbers, counts = np.unique(events["name"], return_counts=True)
    for count in range(2, 65) if not raw.classes else ():
        if counts[counts % count == 0].sum() < 0.99 * len(events):
            continue
        for number in numbers[counts == count].tolist():
            starts = events["start"][events["name"] == number]
            distances = np.diff(starts)
            median = float(np.median(distances))
            even = float(np.abs(distances - median).max()) < 0.1 * median
            if even and median * count > 0.8 * whole and len(events) >= 20 * count:
                return _between([*starts.tolist(), min(last, int(starts[-1] + median))]), (
                    f"repetition: {count} times the same kernels, every {median / 1e6:.3g} ms from "
                    f"{raw.names[number][:60]}"
                )
    return [("whole trace", first, last)], "no step was found: the whole trace is one span"


def _late_sides(raw: Raw, trains: bool) -> None:
    """Phases that only neighbours tell: between clipping and the update, and kernels without operators.

    Compiled kernels of the forward pass have no operator around them: they take the phase of the one before.
    """
    events = raw.events
    for step in np.unique(events["step"]).tolist():
        own = (events["step"] == step) & (events["launch"] >= 0)
        update = events["launch"][own & (events["phase"] == OPTIMIZER)]
        if len(update):
            inside = own & (events["launch"] >= update.min()) & (events["launch"] <= update.max())
            events["phase"][inside & (events["phase"] == FORWARD)] = OPTIMIZER
    if not trains:
        return
    before = UNKNOWN
    for n in np.argsort(events["launch"], kind="stable").tolist():
        phase = int(events["phase"][n])
        if phase != UNKNOWN:
            before = phase
        elif before == FORWARD and events["launch"][n] >= 0 and not events["graph"][n]:
            events["phase"][n] = FORWARD


def _number_steps(raw: Raw, result: Attributed) -> None:
    events = raw.events
    events["step"] = -1
    if not result.steps:
        return
    starts = np.array([step[1] for step in result.steps])
    ends = np.array([step[2] for step in result.steps])
    by_host = result.step_method.startswith("annot") or "annotations" in result.step_method
    when = np.where((events["launch"] >= 0) & by_host, events["launch"], events["start"])
    place = np.searchsorted(starts, when, side="right") - 1
    inside = (place >= 0) & (when <= ends[np.maximum(place, 0)])
    events["step"] = np.where(inside, place, -1)


def _layers(raw: Raw, paths: list[tuple[int, ...]], result: Attributed) -> None:
    """Layers by annotations, else by core attention; micro-batches by embeddings or losses that return."""
    if raw.classes:
        result.layer_method = "in the file"
        return
    events = raw.events
    layer_of = {n: int(match[1]) for n, name in enumerate(raw.names) if (match := _LAYER.search(name))}
    if layer_of:
        _layers_by_annotation(raw, paths, layer_of)
        result.layer_method = "annotations that name a layer, and what runs between its hooks"
    attention = np.flatnonzero(
        (events["cls"] == CLASSES.index("attention_forward")) & (events["phase"] == FORWARD)
    )
    marks = _microbatch_marks(raw)
    if len(marks) > 1:
        forward = np.flatnonzero(events["phase"] == FORWARD)
        passed = np.searchsorted(marks, events["start"][forward], side="right") - 1
        for step in np.unique(events["step"][forward]).tolist():
            own = events["step"][forward] == step
            first = np.searchsorted(marks, events["start"][forward][own].min())
            events["microbatch"][forward[own]] = np.maximum(passed[own] - first, 0)
        result.microbatch_method = (
            "embedding, loss or receive of the forward pass, which returns with every one"
        )
    if not layer_of and len(attention):
        _layers_by_attention(events, attention)
        result.layer_method = "repetition: a layer begins at its forward core attention"
    twins = {
        sequence: n for n, sequence in enumerate(events["sequence"].tolist())
        if sequence >= 0 and events["phase"][n] == FORWARD
    }  # fmt: skip
    for n in np.flatnonzero(events["phase"] == BACKWARD).tolist():
        twin = twins.get(int(events["sequence"][n]), -1)
        if twin >= 0:
            for key in ("layer", "microbatch"):
                if events[key][n] < 0:
                    events[key][n] = events[key][twin]


def _layers_by_annotation(raw: Raw, paths: list[tuple[int, ...]], layer_of: dict[int, int]) -> None:
    host, events = raw.host, raw.events
    states: dict[int, tuple[list[int], list[int]]] = {}
    places = np.flatnonzero(host["kind"] == ANNOTATION)
    for n in places[np.argsort(host["start"][places], kind="stable")].tolist():
        name = raw.names[int(host["name"][n])]
        number = layer_of.get(int(host["name"][n]), -1)
        if re.match(r"FSDP::pre_(?:forward|backward) ", name) or (
            name.startswith("nn.Module") and number >= 0
        ):
            for which in {0, int(host["thread"][n]) + 1}:
                starts, numbers = states.setdefault(which, ([], []))
                starts.append(int(host["start"][n]))
                numbers.append(number)
    begins, layers = (np.array(column) for column in states.get(0, ([], [])))
    for n, path in enumerate(paths):
        direct = next((layer_of[part] for part in reversed(path) if part in layer_of), -1)
        named = any(part >= 0 and raw.names[part].startswith("FSDP::all_gather") for part in path)
        if (
            direct < 0
            and not named
            and len(begins)
            and events["launch"][n] >= 0
            and events["phase"][n] != OPTIMIZER
        ):
            place = int(np.searchsorted(begins, events["launch"][n], side="right")) - 1
            direct = int(layers[place]) if place >= 0 else -1
        events["layer"][n] = direct


def _microbatch_marks(raw: Raw) -> np.ndarray:
    events = raw.events
    forward = events["phase"] == FORWARD
    for kind, word in (("embedding", "gather"), ("loss", "nll_loss_forward"), ("loss", "SoftMaxForward")):
        named = np.isin(events["name"], [n for n, name in enumerate(raw.names) if word in name])
        chosen = events["start"][forward & named & (events["cls"] == CLASSES.index(kind))]
        if 1 < len(chosen) <= 4096:
            return np.sort(chosen)
    return np.zeros(0, np.int64)


def _layers_by_attention(events: RecordArray, attention: np.ndarray) -> None:
    starts = events["start"][attention]
    forward = np.flatnonzero(events["phase"] == FORWARD)
    for step in np.unique(events["step"]).tolist():
        for batch in np.unique(events["microbatch"]).tolist():
            own = (events["step"][attention] == step) & (events["microbatch"][attention] == batch)
            mine = forward[(events["step"][forward] == step) & (events["microbatch"][forward] == batch)]
            place = np.searchsorted(starts[own], events["start"][mine], side="right") - 1
            events["layer"][mine] = np.clip(place, -1, 32767)


def unclassified_names(raw: Raw) -> list[tuple[str, int]]:
    """Names of the events that no rule knows, with their nanoseconds, longest first."""
    events = raw.events
    lost = events[events["cls"] == CLASSES.index(UNCLASSIFIED)]
    totals: dict[int, int] = {}
    for name, length in zip(lost["name"].tolist(), (lost["end"] - lost["start"]).tolist(), strict=True):
        totals[name] = totals.get(name, 0) + length
    return sorted(((raw.names[n], t) for n, t in totals.items()), key=lambda item: -item[1])
