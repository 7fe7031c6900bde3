"""The largest differences of two steps in words: plan first, then causes, then what follows from causes.

A finding's nanoseconds are its part of the difference of a bar. The difference of a class of GEMMs is split
into number (FLOP) and rate; that of exposed communication into waiting, transfer and what is hidden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from moesim.simulator.trace.classes import CLASSES, COMMUNICATION
from moesim.simulator.trace.events import FORWARD
from moesim.simulator.trace.partition import NOT_PRICED, WAITING, StepSide, Totals, side_of
from moesim.simulator.trace.read import StepTrace

if TYPE_CHECKING:
    from moesim.simulator.predict.step import ExecutedStep

Role = Literal["plan", "cause", "consequence"]
ROLES: tuple[Role, ...] = ("plan", "cause", "consequence")
MOST, LEAST = 10, 0.002
"""Most findings, and the least share of the measured step for which one is made."""
SEVERAL = 0.25
"""A difference has two findings where each explains at least this share of it."""


class Finding(Struct, frozen=True):
    """A difference in words. `ns`: its part of the gap, 0 where it has none of its own."""

    role: Role
    part: str
    ns: int
    text: str
    check: str

    def row(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {"role": self.role, "part": self.part, "ns": self.ns, "text": self.text, "check": self.check}


def find(
    one: StepSide, two: StepSide, measured: StepTrace, plan: Sequence[Finding], predicted: bool
) -> tuple[Finding, ...]:
    """The ten largest findings, plan first, causes before consequences, each group by size."""
    word = "the prediction" if predicted else two.label
    found: list[Finding] = list(plan)
    for name in {**one.totals, **two.totals}:
        found += (
            _talk(one, two, name, word) if name in COMMUNICATION else _work(one, two, name, word, predicted)
        )
    found += _idle(one, two, word)
    found += _late_rank(one, measured)
    least = LEAST * max(one.wall_ns, 1)
    kept = [finding for finding in found if finding.role == "plan" or abs(finding.ns) >= least]
    largest = sorted(kept, key=lambda f: (f.role != "plan", -abs(f.ns)))[:MOST]
    return tuple(sorted(largest, key=lambda f: (ROLES.index(f.role), -abs(f.ns), f.part)))


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f} ms"


def _part(side: StepSide, kind: str, name: str) -> int:
    return side.parts.get((kind, name), 0)


# -- compute ------------------------------------------------------------------------------------------

_ADVICE = {
    "gemm": "compare clocks and power with those of the profile; moesim calibrate measures the shape",
    "grouped_gemm": "look at rows by expert (imbalance) and the grouped kernel; moesim calibrate --model",
    "attention": "check which attention kernel ran and its mask; moesim calibrate --model measures it",
    "permute": "look at the kernels named here; a fused permutation, or a calibration of rows with --model",
    "optimizer": "check a fused optimizer and which kernels clip; compare the formats of the states",
    "fsdp_copy": "check how parameters are copied (software.framework), and precision.parameters",
    "other": "see whether these kernels could be fused or compiled; moesim calibrate --model measures them",
}  # fmt: skip


def _advice(name: str) -> str:
    if name in ("wgrad_gemm", "gate_gemm"):
        return _ADVICE["gemm"]
    if name.startswith("attention"):
        return _ADVICE["attention"]
    return _ADVICE["optimizer" if name == "clip" else name if name in _ADVICE else "other"]


def _work(one: StepSide, two: StepSide, name: str, word: str, predicted: bool) -> list[Finding]:
    """Findings on one class of computing kernels."""
    gap = _part(one, "compute", name) - _part(two, "compute", name)
    mine, other = one.totals.get(name, Totals()), two.totals.get(name, Totals())
    if not gap:
        return []
    if not other.ns:
        why = "the model does not price them" if predicted and name in NOT_PRICED else f"{word} has none"
        text = f"{mine.count} kernels of class {name} take {_ms(mine.ns)}, and {why}: {_longest(one, name)}."
        return [Finding("cause", name, gap, text, "remove them, or name their class with --rules")]
    if not mine.ns:
        text = f"{word} has {_ms(other.ns)} of {name}; the trace has no kernel of this class."
        check = "the kernels may be fused into others or classed otherwise: see moesim trace read, --rules"
        return [Finding("cause", name, gap, text, check)]
    number = _number(one, two, name)
    if number is None or mine.ns == other.ns:
        return [_rate(one, two, name, word, gap)]
    by_number = other.ns * (number - 1.0)
    by_rate = mine.ns - other.ns - by_number
    whole = abs(by_number) + abs(by_rate)
    scale = gap / (mine.ns - other.ns)
    found = []
    if abs(by_number) >= SEVERAL * whole:
        text = (
            f"{name} does {number:.2f} times the work of {word} ({_phases(mine, other)}): it runs more "
            "or less often, or at other sizes."
        )
        check = "compare layers, micro-batches, sequence length and recompute with the scenario"
        found.append(Finding("cause", name, round(by_number * scale), text, check))
    if abs(by_rate) >= SEVERAL * whole:
        found.append(_rate(one, two, name, word, round(by_rate * scale)))
    return found


def _number(one: StepSide, two: StepSide, name: str) -> float | None:
    """How many times the other side's work: by FLOP where shapes are known, by calls of core attention."""
    mine, other = one.totals[name], two.totals[name]
    if all(side.flop and side.flop_ns > 0.95 * side.ns for side in (mine, other)):
        return mine.flop / other.flop
    if name in ("attention_forward", "attention_backward"):
        return _calls(one, name) / _calls(two, name)
    runs = [_shape_of_run(side) for side in (one, two)]
    if all(
        "layers" in run for run in runs
    ):  # layers and micro-batches that differ change all of their kernels
        blocks = [run["layers"] * run["microbatches"] for run in runs]
        return blocks[0] / blocks[1] if blocks[0] != blocks[1] else None
    return None


def _calls(side: StepSide, name: str) -> int:
    """Calls of a class whose call is one long kernel: the number of its longest kernel's name."""
    own = side.events[side.events["cls"] == CLASSES.index(name)]
    totals: Counter[int] = Counter()
    for number, length in zip(own["name"].tolist(), (own["end"] - own["start"]).tolist(), strict=True):
        totals[number] += length
    return int((own["name"] == totals.most_common(1)[0][0]).sum())


def _rate(one: StepSide, two: StepSide, name: str, word: str, gap: int) -> Finding:
    mine, other = one.totals[name], two.totals[name]
    slower = "slower" if gap > 0 else "faster"
    text = f"{name} takes {_ms(mine.ns)} in {mine.count} kernels, {_ms(other.ns)} in {word}"
    if mine.flop_ns and other.flop_ns:
        rates = [total.flop / total.flop_ns / 1e3 for total in (mine, other)]
        text += f": {rates[0]:.0f} TFLOP/s against {rates[1]:.0f}, {slower} at the same work"
        shape = _worst_shape(mine, other, gap)
        text += f"; {shape}" if shape else ""
    else:
        text += f" ({_phases(mine, other)}); longest: {_longest(one, name)}"
    return Finding("cause", name, gap, text + ".", _advice(name))


def _worst_shape(mine: Totals, other: Totals, gap: int) -> str:
    rows: list[tuple[float, str, float, float]] = []
    for shape in mine.shapes.keys() & other.shapes.keys():
        (count, taken), (others, given) = mine.shapes[shape], other.shapes[shape]
        rows.append((count * (taken / count - given / others), shape, taken / count, given / others))
    if not rows:
        return ""
    lost, shape, each, usual = max(rows) if gap > 0 else min(rows)
    return f"most at {shape}: {each / 1e3:.0f} us against {usual / 1e3:.0f} a call" if lost * gap > 0 else ""


def _phases(mine: Totals, other: Totals) -> str:
    rows = [(phase, mine.phases_ns.get(phase, 0), other.phases_ns.get(phase, 0))
            for phase in {**mine.phases_ns, **other.phases_ns}]  # fmt: skip
    rows.sort(key=lambda row: -abs(row[1] - row[2]))
    return ", ".join(f"{phase} {_ms(a)} against {_ms(b)}" for phase, a, b in rows[:3])


def _longest(side: StepSide, name: str) -> str:
    own = side.events[side.events["cls"] == CLASSES.index(name)]
    totals: Counter[str] = Counter()
    for number, op, length in zip(
        own["name"].tolist(), own["op"].tolist(), (own["end"] - own["start"]).tolist(), strict=True
    ):
        outer = f" of {side.rank.names[op]}" if op >= 0 and op != number else ""
        totals[f"{side.rank.names[number][:60] if number >= 0 else name}{outer[:60]}"] += length
    return "; ".join(f"{text} ({_ms(taken)})" for text, taken in totals.most_common(2))


# -- communication --------------------------------------------------------------------------------------


def _talk(one: StepSide, two: StepSide, name: str, word: str) -> list[Finding]:
    """Findings on one class of communication: waiting, transfer, and what is no longer hidden."""
    kind = "exposed communication"
    shown = [_part(side, kind, name) + _part(side, kind, name + WAITING) for side in (one, two)]
    gap = shown[0] - shown[1]
    mine, other = one.totals.get(name, Totals()), two.totals.get(name, Totals())
    if not mine.ns or not other.ns:
        here, there = ("the trace", word) if mine.ns else (word, "the trace")
        total = mine if mine.ns else other
        text = (
            f"{here} has {total.count} x {name} of {_ms(total.ns)} ({_ms(abs(gap))} exposed), {there} none."
        )
        check = f"compare the plans: {_KEYS.get(name, 'parallel')}"
        return [Finding("cause", name, gap, text, check)]
    waits = [side.waiting_ns for side in (mine, other)]
    known = waits[0] is not None
    waited = (waits[0] or 0) - ((waits[1] or 0) if known else 0)
    moved = mine.ns - other.ns - waited
    hidden = (mine.ns - shown[0]) - (other.ns - shown[1])
    found = []
    longer = waited + moved
    if longer * hidden > 0:  # what is longer and hidden does not show: only the rest is exposed
        common = min(abs(longer), abs(hidden)) * (1 if longer > 0 else -1)
        waited = round(waited * (longer - common) / longer)
        moved, hidden = longer - common - waited, hidden - common
    if waited:
        how = "" if one.split else " (what equal calls take beyond the fastest: an estimate from one rank)"
        text = f"{name} waits {_ms(waits[0] or 0)} for peers{how}, {_ms(waits[1] or 0)} in {word}: a peer "
        text += "is late."
        check = "the cause is on the rank that comes last: record all ranks, and look at what it does before"
        found.append(Finding("consequence", name, waited, text, check))
    if moved:
        apart = known or one.split
        text = f"{name}{' without waiting' if apart else ', waiting for peers included,'} takes "
        text += f"{_ms(mine.ns - (waits[0] or 0))} in {mine.count} calls, "
        text += f"{_ms(other.ns - ((waits[1] or 0) if known else 0))} in {other.count} in {word}"
        if mine.bytes and other.bytes:
            text += f"; bytes {mine.bytes / 1e9:.2f} GB against {other.bytes / 1e9:.2f} GB"
        check = "bytes differ: compare plan and formats; else compare the collective's rate (calibrate)"
        role: Role = "cause" if apart or name != "send_recv" else "consequence"
        found.append(Finding(role, name, moved, text + ".", check))
    if hidden:
        text = (
            f"{_ms(mine.ns - shown[0])} of {name} run beside computing, {_ms(other.ns - shown[1])} in {word}."
        )
        check = "check prefetching, streams and priorities: the plan assumes another overlap"
        role = "cause" if hidden < 0 and -hidden > abs(mine.ns - other.ns) else "consequence"
        found.append(Finding(role, name, -hidden, text, check))
    return found


_KEYS = {
    "all_to_all": "parallel.ep, communication.kernels",
    "ep_dispatch": "communication.kernels",
    "ep_combine": "communication.kernels",
    "send_recv": "parallel.pp, parallel.cp",
    "all_gather": "parallel.zero_stage, parallel.tp",
    "reduce_scatter": "parallel.zero_stage, parallel.tp",
    "all_reduce": "parallel.zero_stage, parallel.tp, data-parallel replicas",
}


def _late_rank(one: StepSide, measured: StepTrace) -> list[Finding]:
    """Which rank the shown one waits for most, and what that rank does more of in the step."""
    waits = one.totals
    waited = sum(total.waiting_ns or 0 for name, total in waits.items() if name in COMMUNICATION)
    if not one.split or len(measured.ranks) < 2 or not waited:
        return []
    total: Counter[int] = Counter({rank.raw.rank: 0 for rank in measured.ranks})
    for row in measured.matched:
        total[row["rank"]] += row["waiting_ns"]
    late = min(total, key=lambda number: (total[number], number))
    if late == one.rank.raw.rank:
        return []
    other = side_of(measured, late, int(one.step["number"]), [])
    more = {
        part: other.parts.get(part, 0) - one.parts.get(part, 0)
        for part in {**other.parts, **one.parts}
        if part[0] != "exposed communication"
    }
    part, extra = max(more.items(), key=lambda item: item[1], default=(("", ""), 0))
    if extra <= 0:
        return []
    text = (
        f"rank {late} waits least for the others, so they wait for it; in this step it spends "
        f"{_ms(extra)} more in {part[1]} ({part[0]}) than rank {one.rank.raw.rank}."
    )
    check = f"moesim trace compare with --rank {late}; balance its work or find what slows it"
    return [Finding("cause", part[1], min(extra, waited), text, check)]


# -- idle time ------------------------------------------------------------------------------------------

_IDLE: dict[str, tuple[Role, str, str]] = {
    "launch_bound": ("cause", "the GPU waits for launches of the host",
                     "compile, CUDA graphs, a faster host (software.host); profiling slows it too"),
    "device_synchronisation": ("cause", "the host waits for the device and launches nothing",
                               "remove reads of device values (.item(), counts of tokens) from the step"),
    "profiler": ("cause", "the profiler itself runs", "not in an untraced step: leave it out of the gap"),
    "dependency": ("consequence", "launched kernels wait for another stream, a peer or their queue",
                   "see which communication ends there; it follows from what is late elsewhere"),
    "unknown": ("consequence", "the trace does not say why the GPU is idle", "record host events as well"),
}  # fmt: skip


def _idle(one: StepSide, two: StepSide, word: str) -> list[Finding]:
    found = []
    for cause, (role, what, check) in _IDLE.items():
        mine, other = _part(one, "idle", cause), _part(two, "idle", cause)
        if mine != other:
            text = f"Idle, {cause.replace('_', ' ')}: {what} for {_ms(mine)}, {_ms(other)} in {word}."
            found.append(Finding(role, cause, mine - other, text, check))
    return found


# -- plans ----------------------------------------------------------------------------------------------


def plan_findings(
    trace: StepTrace, step: ExecutedStep, one: StepSide, two: StepSide
) -> tuple[list[Finding], list[str]]:
    """Where the traced run follows another plan than the scenario, with the keys; and notes."""
    prepared, found, notes = step.prepared, [], []
    raw = one.rank.raw
    codes = [
        set(re.findall(r"[A-Z]{1,2}\d{2,4}[A-Z]?", text.upper())) for text in (raw.gpu, two.rank.raw.gpu)
    ]
    if all(codes) and not codes[0] & codes[1]:
        notes.append(
            f"the trace is of {raw.gpu}, the scenario of {two.rank.raw.gpu}: rates differ for that alone"
        )

    def differs(part: str, what: str, mine: float, other: float, keys: str) -> None:
        if mine != other:
            text = f"The trace has {mine:g} {what}, the scenario {other:g}."
            found.append(Finding("plan", part, 0, text, f"set {keys} as in the run, or compare another run"))

    if raw.world > 0:
        differs("GPUs", "GPUs", raw.world, prepared.n_gpus, "cluster and parallel")
    counts = [_shape_of_run(side) for side in (one, two)]
    for part, what, keys in (
        ("layers", "layers with core attention on this rank", "stages.layers, model.n_layers, parallel.pp"),
        ("microbatches", "forwards of core attention for each of these layers (micro-batches)",
         "batch.sequences, parallel.microbatch"),
        ("rows", "rows in most forward GEMMs", "batch.sequence_length, parallel.microbatch, cp, tp"),
    ):  # fmt: skip
        if all(count.get(part) for count in counts):
            differs(part, what, counts[0][part], counts[1][part], keys)
    for name, key in (("all_to_all", "parallel.ep"), ("all_gather", "parallel.zero_stage, shard_group")):
        sizes = [_group(side, name) for side in (one, two)]
        if all(sizes):
            differs(name, f"ranks in a group of {name}", sizes[0], sizes[1], key)
    return found, notes


def _shape_of_run(side: StepSide) -> dict[str, int]:
    """Layers of core attention, forwards of each, rows of most forward GEMMs; without what is not known."""
    found: dict[str, int] = {}
    events = side.events
    core = events[(events["cls"] == CLASSES.index("attention_forward")) & (events["phase"] == FORWARD)]
    layers = len(set(core["layer"][core["layer"] >= 0].tolist()))
    if layers:
        calls = max(Counter(core["name"].tolist()).values())
        found["layers"], found["microbatches"] = layers, max(1, round(calls / layers))
    rows: Counter[int] = Counter()
    named = (events["phase"] == FORWARD) & (events["shape"] >= 0)
    chosen = events[named & (events["cls"] == CLASSES.index("gemm"))]
    lengths = (chosen["end"] - chosen["start"]).tolist()
    for shape, length in zip(chosen["shape"].tolist(), lengths, strict=True):
        rows[int(side.rank.names[shape].rpartition(" of ")[2].split("x")[0])] += length
    if rows:
        found["rows"] = rows.most_common(1)[0][0]
    return found


def _group(side: StepSide, name: str) -> int:
    own: Iterable[int] = side.events["comm"][side.events["cls"] == CLASSES.index(name)].tolist()
    comms = [side.rank.raw.comms[n] for n in own if n >= 0]
    sizes = Counter(max(comm.size, len(comm.ranks)) for comm in comms)
    return sizes.most_common(1)[0][0] if sizes else 0
