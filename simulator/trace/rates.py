"""What a trace teaches about rates: one plain row a GEMM, attention, operator and collective of its run.

A row has `use` (what a prediction looks up, such as `norm/eager_forward`), the sizes that `moesim calibrate`
would measure it at, `bytes` as our model counts them, `seconds` of one piece of work with its quartiles, and
`count`. Only kernels of the compute stream count. A kernel beside a collective counts with the median of
equal kernels that ran alone, where there are such; what it lost beside them is `interference`.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.operator_shapes import ELEMENT_BYTES
from moesim.simulator.trace.calls import (
    GATHER_COPY,
    TracedCall,
    calls_of,
    check_one_run,
    gemm_shape,
    give_to_chains,
    is_size,
    queued_gaps,
    set_biases_apart,
    take_alone,
)
from moesim.simulator.trace.events import CALL
from moesim.simulator.trace.read import StepTrace
from moesim.simulator.trace.summary import SYNCHRONISATIONS

Row = dict[str, Any]

WIDTHS = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}
"""Bytes of an element by the type that PyTorch's profiler writes."""
LEAST_PART = 4
"""A product that our model joins is at most so many times the largest of its traced parts."""
SHAPES, SCENARIO = "tensor shapes", "scenario"
"""Where the sizes of a row come from."""
MATCHED, SHORTEST = "transfer of matched ranks", "shortest of equal collectives, an upper bound"
"""Where the time of a collective comes from."""


class Lessons(Struct, frozen=True):
    """What a trace teaches: `rows`, `facts` of the whole run, and what could not be learnt, in words."""

    rows: tuple[Row, ...]
    facts: Mapping[str, Any]
    missing: tuple[str, ...] = field(default=())


def learn(trace: StepTrace, operators: Sequence[Mapping[str, Any]] = ()) -> Lessons:
    """The rates in a trace; `operators` are those of the traced run's scenario (`predict.operator_shapes`).

    Raises InputError for a trace whose ranks are of different GPUs or runs, or that teaches nothing.
    """
    check_one_run(trace)
    by_rank = [calls_of(rank) for rank in trace.ranks]
    calls = [call for own in by_rank for call in own]
    for own in by_rank:
        take_alone(own)
    rows: list[Row] = []
    missing: list[str] = []
    for find in (_gemms, _attention, _pieces, _moved):
        rows += find(calls, operators, missing)
    rows += _collectives(trace, missing)
    if not any(row["measurement"] == "operators" for row in rows):
        raise InputError(
            f"{trace.source}: none of its kernels teaches a rate "
            f"({'; '.join(missing) or 'no operator is known'}); "
            "record with record_shapes=True, without graph replay, and give that trace"
        )
    return Lessons(tuple(rows), _facts(trace, calls), tuple(missing))


# -- rows --------------------------------------------------------------------------------------------


def _row(
    use: str, calls: Sequence[TracedCall], seconds: float, sizes: Mapping[str, Any], of: str, count: int = 0
) -> Row:
    """A row of `operators`: seconds of one piece, its quartiles by the spread of equal calls."""
    spread = _spread(calls)
    return {
        "measurement": "operators",
        "parameters": {"use": use, "launches": 1, **sizes},
        "seconds": seconds,
        "low_s": seconds * (1 - spread),
        "high_s": seconds * (1 + spread),
        "count": count or len(calls),
        "sizes_from": of,
        "beside_only": sum(not call.known_alone for call in calls),
        "values": {},
    }


def _spread(calls: Sequence[TracedCall]) -> float:
    """Half the inter-quartile range of equal calls over their median, a mean by time; 0 for single calls."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for call in calls:
        if not call.lost_ns:
            groups[call.op, call.names, str(call.dims)].append(call.ns)
    total, off = 0.0, 0.0
    for lengths in groups.values():
        if len(lengths) > 1:
            low, middle, high = np.quantile(lengths, (0.25, 0.5, 0.75))
            total += middle * len(lengths)
            off += (high - low) / 2 * len(lengths)
    return min(0.9, off / total) if total else 0.0


def _by(calls: Iterable[TracedCall], key: Callable[[TracedCall], Any]) -> dict[Any, list[TracedCall]]:
    found: dict[Any, list[TracedCall]] = defaultdict(list)
    for call in calls:
        found[key(call)].append(call)
    return {at: group for at, group in found.items() if at}


def _median_s(calls: Sequence[TracedCall]) -> float:
    return statistics.median(call.ns for call in calls) * 1e-9


def _gemms(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """Products by shape, and those that our model joins (queries, keys and values) from their parts."""
    own = [call for call in calls if call.cls in ("gemm", "wgrad_gemm", "gate_gemm", "grouped_gemm")]
    shaped = _by(own, gemm_shape)
    if lost := len(own) - sum(map(len, shaped.values())):
        missing.append(f"{lost} of {len(own)} GEMMs (no sizes, or not in BF16)")
    rows = {}
    for (use, m, n, k, groups), group in shaped.items():
        rows[use, m, n, k, groups] = _gemm_row((use, m, n, k, groups), group, _median_s(group), SHAPES)
    for wanted in operators:
        key = tuple(wanted.get(side, 0) for side in ("use", "m", "n", "k", "groups"))
        if not wanted.get("m") or key in rows:
            continue
        parts = {shape: group for shape, group in shaped.items() if _is_part(shape, key)}
        if parts and max(prod(shape[1:4]) for shape in parts) * LEAST_PART >= prod(key[1:4]):
            flop = sum(2.0 * prod(shape[1:4]) * len(group) for shape, group in parts.items())
            rate = flop / sum(call.ns for group in parts.values() for call in group) * 1e9
            joined = [call for group in parts.values() for call in group]
            rows[key] = _gemm_row(key, joined, 2.0 * prod(key[1:4]) / rate, SCENARIO)
    return list(rows.values())


def _gemm_row(shape: tuple[Any, ...], calls: Sequence[TracedCall], seconds: float, of: str) -> Row:
    sizes = dict(zip(("m", "n", "k", "groups"), shape[1:], strict=True))
    return _row(shape[0], calls, seconds, sizes, of) | {"values": {"flop": 2.0 * prod(shape[1:4])}}


def _is_part(part: tuple[Any, ...], whole: tuple[Any, ...]) -> bool:
    """Whether a product has two sides of `whole` (experts' rows within 5 %, padded) and less of the third."""
    if part[0] != whole[0] or (part[4] > 1) != (whole[4] > 1):
        return False
    slack = 0.05 if whole[4] > 1 else 0.0
    near = [abs(a - b) <= slack * b for a, b in zip(part[1:4], whole[1:4], strict=True)]
    return all(near) or (
        sum(near) == 2 and all(a <= b * (1 + slack) for a, b in zip(part[1:4], whole[1:4], strict=True))
    )


def _attention(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """Core attention by sizes, taken as causal; a backward holds the kernels before and after its core."""
    rows = []
    own = [call for call in calls if call.cls in ("attention_forward", "attention_backward")]
    shaped = _by(own, _attention_shape)
    if lost := len(own) - sum(map(len, shaped.values())):
        missing.append(f"{lost} of {len(own)} core attentions (no sizes of four sides)")
    for (use, heads, length, dqk, dv), group in shaped.items():
        sides = 3 * dqk + 2 * dv if use.endswith("backward") else dqk + dv
        sizes = {"heads": heads, "length": length, "dqk": dqk, "dv": dv}
        row = _row(use, group, _median_s(group), sizes, SHAPES)
        rows.append(row | {"values": {"flop": float(heads) * length * length * sides}})
    return rows


def _attention_shape(call: TracedCall) -> tuple[str, int, int, int, int] | None:
    skip = 1 if call.cls.endswith("backward") else 0  # the gradient comes first
    tensors = [size for size in call.sizes if len(size) == 4][skip : skip + 3]
    if len(tensors) < 3 or "flex" in f"{call.op} {call.names}":
        return None
    q, _, v = tensors
    by_token = re.search(r"aten::_(?:flash|efficient)_attention", call.op)
    heads, length = (q[2], q[1]) if by_token else (q[1], q[2])
    return call.cls, q[0] * heads, length, q[3], v[3]


# -- pieces that memory limits -----------------------------------------------------------------------


class _Piece(Struct, frozen=True):
    """A use whose time is all of `cls` in one pass, over the calls that `anchor` counts and sizes."""

    use: str
    cls: str
    backward: bool
    anchor: str
    alike: bool = False
    """Whether only calls with as many elements as the anchor belong to it."""


_PIECES = (
    _Piece("norm/eager_forward", "norm", False, r"rms_norm$|layer_norm$", True),
    _Piece("norm/eager_backward", "norm", True, r"norm_backward$", True),
    _Piece("swiglu/eager_forward", "swiglu", False, r"::(?:silu|gelu)$", True),
    _Piece("swiglu/eager_backward", "swiglu", True, r"::(?:silu|gelu)_backward$", True),
    _Piece("topk/eager_forward", "topk", False, r"::topk$"),
    _Piece("topk/eager_backward", "topk", True, r"::topk$"),
    _Piece("loss/eager_forward", "loss", False, r"::_log_softmax$"),
    _Piece("loss/eager_backward", "loss", True, r"_log_softmax_backward_data$"),
    _Piece("embedding/gather", "embedding", False, r"::embedding$|index_select$|::gather$"),
    _Piece("embedding/scatter", "embedding", True, r"embedding_dense_backward$"),
)
HEADS = range(1, 257)
"""Widths of a head, whose norms have a use of their own."""
EMBEDDING_BYTES = {"embedding/gather": 4.0, "embedding/scatter": 10.0}
"""Bytes that the model counts for an element of an embedding's output."""


def _pieces(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """Norms, activations, routing, permutes, rope, loss, embedding and the optimizer."""
    give_to_chains(calls)
    set_biases_apart(calls, missing)
    rows: list[Row] = []
    priced = _by([call for call in calls if not call.optimizer], lambda call: call.cls)
    for piece in _PIECES:
        own = [
            call
            for call in priced.get(piece.cls, ())
            if call.backward == piece.backward and not call.recompute
        ]
        anchors = [
            call for call in priced.get(piece.cls, ())
            if re.search(piece.anchor, call.op) and not call.recompute
            and (call.backward == piece.backward or piece.cls == "topk")
        ]  # fmt: skip
        if own and anchors:
            found = _anchored(piece, own, anchors, operators)
            rows += found
            if not found:
                missing.append(f"{piece.use} (no sizes)")
    rows += _with_residual(rows, calls)
    rows += _permutes(calls, operators, missing)
    rows += _ropes(priced.get("rope", []), missing)
    rows += _optimizer(calls, operators, missing)
    return rows


def _anchored(
    piece: _Piece,
    own: Sequence[TracedCall],
    anchors: Sequence[TracedCall],
    operators: Sequence[Mapping[str, Any]],
) -> list[Row]:
    rows = []
    known = _known_bytes(piece.use, operators)
    groups = _by(anchors, _alike) if piece.alike else {(0, 0): list(anchors)}
    for (elements, width), heads in groups.items():
        group = [call for call in own if call.elements == elements] if piece.alike else own
        if piece.cls == "norm":
            group = heads
        count = len({(call.rank, call.external) for call in heads})
        each = elements or sum(call.elements for call in heads) // len(heads)
        if piece.use == "embedding/gather":
            each = prod(heads[0].sizes[-1]) if len(heads[0].sizes) == 3 else 0
        size = ELEMENT_BYTES.get(piece.use, EMBEDDING_BYTES.get(piece.use, 0.0)) * each
        of = SHAPES
        if known and (not size or not piece.alike):
            size, of = known, SCENARIO
        if size and group:
            seconds = sum(call.ns for call in group) * 1e-9 / count
            more = {"width": width} if piece.cls == "norm" else {}
            use = (
                piece.use.replace("eager", "eager_head")
                if width in HEADS and len(heads[0].sizes[0]) == 4
                else piece.use
            )
            rows.append(_row(use, group, seconds, {"bytes": size, **more}, of, count))
    return _joined_norms(rows, operators) if piece.cls == "norm" else rows


def _alike(call: TracedCall) -> tuple[int, int] | None:
    return (call.elements, call.dims[0][-1]) if call.elements and is_size(call.dims[0]) else None


def _joined_norms(rows: list[Row], operators: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Norms of queries and keys as the one operator that our model has, where the scenario is known."""
    for op in operators:
        parts = [
            row for row in rows
            if row["parameters"]["use"] == op["use"] and row["parameters"]["width"] == op.get("width")
        ]  # fmt: skip
        size = sum(row["parameters"]["bytes"] for row in parts)
        if len(parts) > 1 and abs(size - op["bytes"]) < 0.01 * size:
            whole = dict(parts[0]) | {"sizes_from": SCENARIO}
            whole |= {key: sum(row[key] for row in parts) for key in ("seconds", "low_s", "high_s")}
            whole["parameters"] = parts[0]["parameters"] | {"bytes": op["bytes"]}
            rows = [row for row in rows if row not in parts] + [whole]
    return rows


def _known_bytes(use: str, operators: Sequence[Mapping[str, Any]]) -> float:
    """Bytes of a use in the scenario, where all its operators have one size; else 0."""
    sizes = {float(op["bytes"]) for op in operators if op["use"] == use or op.get("was") == use}
    return sizes.pop() if len(sizes) == 1 else 0.0


def _with_residual(rows: Sequence[Row], calls: Sequence[TracedCall]) -> list[Row]:
    """Norms behind the addition of the residual: the norm and the sum of equal size, each as traced."""
    added = _by(
        (c for c in calls if c.cls == "elementwise" and c.op == "aten::add" and not c.backward),
        lambda c: c.elements,
    )
    found = []
    for row in rows:
        elements = round(row["parameters"].get("bytes", 0) / ELEMENT_BYTES["norm/eager_forward"])
        if row["parameters"]["use"] == "norm/eager_forward" and elements in added:
            seconds = row["seconds"] + _median_s(added[elements])
            size = ELEMENT_BYTES["norm/eager_forward_add"] * elements
            found.append(
                _row("norm/eager_forward_add", added[elements], seconds, {"bytes": size}, row["sizes_from"])
            )
    return found


def _permutes(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """Expansion and reduction of rows: what stands before and behind the grouped GEMMs of each pass."""
    rows = []
    sides: dict[str, list[TracedCall]] = defaultdict(list)
    passes: dict[str, int] = {"F": 0, "B": 0}
    shape: tuple[Any, ...] | None = None
    marks = ("permute", "grouped_gemm", "attention_forward", "attention_backward", "norm", "loss")
    ordered = [call for call in calls if not call.recompute and call.cls in marks]
    behind = backward = False
    for call in ordered:
        behind, backward = behind and call.backward == backward, call.backward
        if call.cls == "grouped_gemm":
            found = gemm_shape(call)
            if not behind:
                passes["B" if call.backward else "F"] += 1
            if found and found[0] == "grouped_gemm":
                shape = shape or (found if not call.backward else None)
            behind = True
        elif call.cls == "permute":
            names = ("reduce_gradient", "expand_gradient") if call.backward else ("reduce", "expand")
            sides[names[0 if behind else 1]].append(call)
        elif call.cls != "norm" or not behind:
            behind = False
    for side, group in sides.items():
        use = f"permute/eager_{side}"
        count = passes["B" if side.endswith("gradient") else "F"]
        size, of = _known_bytes(use, operators), SCENARIO
        if not size and shape:
            size, of = ELEMENT_BYTES[use] * shape[1] * shape[3], SHAPES
        if not size or not count:
            missing.append(f"{use} (no sizes of grouped GEMMs)")
            continue
        rows.append(_row(use, group, sum(c.ns for c in group) * 1e-9 / count, {"bytes": size}, of, count))
    return rows


def _ropes(calls: Sequence[TracedCall], missing: list[str]) -> list[Row]:
    """Rotary embeddings: the time of a pass over the elements that its multiplications turn."""
    halves = any(call.op == "aten::neg" for call in calls)
    rows = []
    for backward in (False, True):
        own = [call for call in calls if call.backward == backward and not call.recompute]
        turned: dict[int, float] = defaultdict(float)
        for call in own:
            if call.op == "aten::mul" and call.sizes:
                # x cos + turned x sin are two products; a complex number is two elements
                turned[call.elements * (1 if halves else 2)] += 0.5 if halves else 1.0
        use = f"rope/eager{'_halves' * halves}{'_backward' * (halves and backward)}"
        whole = sum(elements * count for elements, count in turned.items())
        if own and not whole:
            missing.append(f"{use} (no sizes)")
        rate = sum(call.ns for call in own) * 1e-9 / whole if whole else 0.0
        for elements, count in turned.items():
            size = {"bytes": ELEMENT_BYTES[use] * elements}
            rows.append(_row(use, own, rate * elements, size, SHAPES, round(count)))
    return rows


_STEP_USES = (
    ("optimizer/adamw", "optimizer", "adam"),
    ("optimizer/norm", "clip", "_norm$"),
    ("optimizer/update", "clip", "_mul_$"),
)
SCALE_BYTES = 8.0
"""Bytes with which clipping scales an FP32 gradient."""


def _optimizer(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """AdamW, the norm of all gradients and their scaling, of all parameters of a step."""
    rows = []
    steps = max(1, len({(call.rank, call.step) for call in calls if call.optimizer}))
    norms = [call for call in calls if call.op == "aten::_foreach_norm"]
    packed = [
        call
        for call in calls
        if call.op == "aten::_chunk_cat" and len(call.sizes) and len(call.sizes[-1]) == 2
    ]
    elements = float(sum(call.elements for call in norms)) if all(call.elements for call in norms) else 0.0
    elements = (elements or float(sum(call.sizes[-1][1] for call in packed))) / steps
    for use, cls, op in _STEP_USES:
        own = [call for call in calls if call.cls == cls and re.search(op, call.op)]
        priced = sum(float(known["bytes"]) for known in operators if known["use"] == use)
        size, of = (priced, SCENARIO) if priced else (ELEMENT_BYTES.get(use, SCALE_BYTES) * elements, SHAPES)
        if own and size:
            rows.append(_row(use, own, sum(c.ns for c in own) * 1e-9 / steps, {"bytes": size}, of, steps))
        elif own:
            missing.append(f"{use} (no sizes of parameters)")
    return rows


def _moved(
    calls: Sequence[TracedCall], operators: Sequence[Mapping[str, Any]], missing: list[str]
) -> list[Row]:
    """Sums, casts and copies by the bytes of their tensors."""
    found: dict[tuple[str, float], list[TracedCall]] = defaultdict(list)
    for call in calls:
        use = _moved_use(call)
        size = _moved_bytes(call) if use else 0.0
        if use and size:
            found[use, size].append(call)
    if not found and any(call.cls in ("fsdp_copy", "cast", "elementwise") for call in calls):
        missing.append("copies, casts and sums (no sizes or types of tensors)")
    return [
        _row(use, group, _median_s(group), {"bytes": size}, SHAPES)
        for (use, size), group in found.items()
        if size > 1e5
    ]


def _moved_use(call: TracedCall) -> str:
    kinds = [str(kind) for kind in call.types]
    if re.search("HtoD|DtoH|PtoP", call.names):
        return ""
    if call.op == "aten::_chunk_cat":
        return "copy/pack"
    if call.op == GATHER_COPY and call.cls == "fsdp_copy":
        return "copy/gather_in"
    if call.op == "aten::cat" and call.cls == "copy" and all(len(size) == 4 for size in call.first):
        return "copy/eager_cat"
    if call.op == "aten::split_with_sizes_copy":
        return "copy/flat"
    if call.op in ("aten::add", "aten::add_") and call.cls == "elementwise" and len(call.sizes) == 2:
        return "elementwise/add" if kinds[0] == kinds[1] else "copy/add_widened"
    if call.op == "aten::copy_" and len(kinds) > 1 and call.cls in ("cast", "fsdp_copy", "memcpy_d2d"):
        wide = [WIDTHS.get(kind, 0) for kind in kinds[:2]]
        return "copy/flat" if wide[0] == wide[1] else "copy/widen" if wide[0] > wide[1] else "copy/narrow"
    return ""


def _moved_bytes(call: TracedCall) -> float:
    """Bytes of a call: every tensor once, as the model counts them; 0 where a size or type is unknown."""
    if call.op in ("aten::_chunk_cat", GATHER_COPY, "aten::cat"):
        return ELEMENT_BYTES[_moved_use(call)] * call.elements
    widths = [WIDTHS.get(str(kind), 0) for kind in call.types]
    if not call.elements or not widths or not widths[0]:
        return 0.0
    if call.op == "aten::split_with_sizes_copy":
        return 2.0 * widths[0] * call.elements
    if call.op == "aten::copy_":
        return float(call.elements * (widths[0] + widths[1])) if len(widths) > 1 and widths[1] else 0.0
    if call.sizes[0] != call.sizes[1]:
        return 0.0
    return float(call.elements * (2 * widths[0] + widths[1]))


# -- communication and the whole run -----------------------------------------------------------------


def _collectives(trace: StepTrace, missing: list[str]) -> list[Row]:
    """Collectives by bytes: transfer of matched ranks, or the shortest of equal ones as an upper bound."""
    sizes: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    matched = {
        (row["rank"], row["class"], row["group"], row["occurrence"]): row["transfer_ns"]
        for row in trace.matched
    }
    for rank in trace.ranks:
        for row in rank.collectives:
            ranks = len(row["ranks"]) or 0
            if row["where"] == "between nodes" or ranks < 2 or row["bytes"] < 1e5:
                continue
            key = (rank.raw.rank, row["class"], row["group"], row["occurrence"])
            if not trace.matched or key in matched:
                took = matched.get(key, row["end_ns"] - row["start_ns"])
                sizes[row["class"], ranks, row["bytes"]].append(float(took))
    rows = []
    for (kind, ranks, size), lengths in sorted(sizes.items()):
        if kind not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            continue
        low, middle, high = np.quantile(lengths, (0.25, 0.5, 0.75)) if trace.matched else [min(lengths)] * 3
        if middle <= 0:
            continue
        rows.append({
            "measurement": "collective",
            "parameters": {"operation": kind, "ranks": ranks, "bytes": size},
            "seconds": middle * 1e-9, "low_s": low * 1e-9, "high_s": high * 1e-9, "count": len(lengths),
            "sizes_from": MATCHED if trace.matched else SHORTEST,
            "values": {},
        })  # fmt: skip
    if not rows and any(rank.collectives for rank in trace.ranks):
        missing.append("collectives (their ranks or bytes are not in the file)")
    return rows


def _facts(trace: StepTrace, calls: Sequence[TracedCall]) -> dict[str, Any]:
    """Figures of the whole run: gaps of launches, the host, synchronisations, jitter and interference."""
    steps = sum(len(rank.steps) for rank in trace.ranks)
    walls = [step["wall_ns"] for rank in trace.ranks for step in rank.steps]
    gaps, host, waits, spent = [], [], 0, 0
    for rank in trace.ranks:
        gaps += queued_gaps(rank)
        own = rank.raw.host
        named = {n for n, name in enumerate(rank.names) if any(word in name for word in SYNCHRONISATIONS)}
        held = (own["kind"] == CALL) & np.isin(own["name"], list(named))
        waits, spent = waits + int(held.sum()), spent + int((own["end"] - own["start"])[held].sum())
        launches = np.sort(own["start"][(own["kind"] == CALL) & ~held])
        host += np.diff(launches).tolist()
    beside = [call for call in calls if call.beside_ns and call.known_alone]
    lost = sum(call.lost_ns for call in beside)
    return {
        "source": trace.source,
        "gpu": trace.ranks[0].raw.gpu,
        "ranks": len(trace.ranks),
        "steps": steps,
        "step_s": [wall * 1e-9 for wall in walls],
        "gap_s": statistics.median(gaps) * 1e-9 if gaps else None,
        "gap_quartiles_s": [float(g) * 1e-9 for g in np.quantile(gaps, (0.25, 0.75))] if gaps else None,
        "gaps": len(gaps),
        "host_launch_s": statistics.median(host) * 1e-9 if host else None,
        "synchronisations": waits / steps if steps else 0.0,
        "synchronisation_s": spent * 1e-9 / steps if steps else 0.0,
        "jitter": float(_spread(calls)),
        "lost_beside": lost / sum(c.beside_ns for c in beside) if beside else None,
        "lost_beside_calls": len(beside),
        "notes": list(trace.notes),
    }
