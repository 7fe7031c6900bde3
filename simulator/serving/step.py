"""What a step of an inference engine takes: operators, exchange and host, and tables of it for events (pure).

A step is a sum of terms that each depend on few numbers: layers on the rows of a rank, attention on sequences
and keys, experts on the rows of a group, the exchange on the rows of the fullest rank, logits on sequences.
`cost` adds the terms (eqs. Q8 to Q11), `pace` reads them from tables that grow where they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, hypot
from typing import NamedTuple

from moesim.simulator.cost.evidence import Evidence, combined
from moesim.simulator.serving.deployment import Deployment, EngineFigure
from moesim.simulator.serving.replicas import StepPace
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.terms import Piece, Plane, StepTerms, TableRow, Total, total

TO_80 = 1.2816
"""Half an 80 % interval of a normal error in standard deviations."""
LEFT_OUT_DECODES, LEFT_OUT_PROMPTS = 0.05, 0.15
"""Standard deviations of the relative error that no entry carries, of steps without and with prompts.

Assumed from errors of simulators whose steps were measured, so that kernels count once: SGLang's has
1 to 4 % in TPOT and 2 to 6 % in TTFT, LLMServingSim 2 1.7 and 22 % (1.25 mean absolute errors are a standard
deviation: the most of TPOT, the middle of TTFT). The 10 % of training (`MODEL_ERROR`) hold kernels too.
"""


class StepPart(NamedTuple):
    """Seconds of a class of work in a step, exposed ones and all."""

    name: str
    kind: str
    exposed_s: float
    busy_s: float
    launches: int
    evidence: Evidence


@dataclass(frozen=True)
class StepCost:
    """A step: its seconds, ends of an 80 % interval, and parts, whose exposed seconds add up to it."""

    seconds: float
    low: float
    high: float
    parts: tuple[StepPart, ...] = field(repr=False)


class StepShares(NamedTuple):
    """A step put together: seconds, and what of compute, exchange, launches and host nothing hides."""

    seconds: float
    compute_s: float
    exchange_s: float
    launches_s: float
    host_s: float


class _Rows(NamedTuple):
    """Rows of a step: whether a graph is replayed, rows of the fullest rank and of all ranks (padded)."""

    graph: bool
    most: float
    group: float
    prefill: bool


class QuickTables(NamedTuple):
    """Tables of a replica with one rank, without drafts and micro-batches; they fill, and never shrink.

    `whole`: layers, experts and exchange over rows, by whether the step has prompts. `core_launches`: kernels
    of attention by whether there are decodes and prompts. `graph_prefill`: most rows with prompts in a graph.
    `buckets`: decodes of captured graphs. Seconds: of a launch, of a host that works ahead, and what every
    step waits for it.
    """

    whole: dict[bool, TableRow]
    logits: TableRow
    decodes: Plane
    prompts: Plane
    core_launches: dict[tuple[bool, bool], int]
    graph_prefill: int
    buckets: tuple[int, ...]
    launch_s: float
    host_s: float
    exposed_s: float


class StepModel:
    """Prices steps of one replica; equal batches are priced once."""

    def __init__(self, deployment: Deployment) -> None:
        """Tables are empty until `pace` asks for them."""
        self.deployment = deployment
        self.terms = StepTerms(deployment)
        terms = self.terms
        self._known: dict[tuple[tuple[StepBatch, ...], int, int], StepCost] = {}
        self._own = TableRow(lambda n: total(terms.own(n)), lambda n: total(terms.own(n, True)))
        self._logits = TableRow(lambda n: total(terms.logits(n)))
        self._experts, self._exchange = (
            {prefill: TableRow(partial(one, prefill=prefill)) for prefill in (False, True)}
            for one in (
                lambda n, prefill: total(terms.experts(n, prefill)),
                lambda n, prefill: total(terms.exchange(n, prefill)),
            )
        )
        self._whole = {
            prefill: TableRow(partial(self._of_one, prefill), partial(self._of_one, prefill, captured=True))
            for prefill in (False, True)
        }
        self._core_launches: dict[tuple[bool, bool], int] = {}
        self._formed = TableRow(lambda n: total(terms.formed(n)))
        self._decodes = Plane(lambda n, keys: total(terms.decodes(n, n * keys)))
        self._prefills = Plane(lambda n, keys: total(terms.prefills(n, n * keys)))
        self._drafts = Plane(lambda n, keys: total(terms.drafts(n, n * keys)))
        pool = deployment.pool
        self._is_quick = pool.dp * pool.pp == 1 and not (pool.two_batch_overlap or pool.draft_tokens)

    def _of_one(self, prefill: bool, rows: float, captured: bool = False) -> Total:
        """Layers, experts and exchange of a replica with one rank of attention."""
        terms = self.terms
        return total(
            [*terms.own(rows, captured), *terms.experts(rows, prefill), *terms.exchange(rows, prefill)]
        )

    # -- a step -----------------------------------------------------------------------------------

    def _graph(self, decodes: int, rows: float, prefill: bool) -> tuple[bool, float]:
        """Whether a graph is replayed, and the rows of a rank with which it was captured (else its own)."""
        pool, engine = self.deployment.pool, self.deployment.engine
        if not pool.cuda_graphs:
            return False, rows
        if prefill:
            stated = pool.graph_prefill_tokens
            return rows <= (engine.graph_prefill if stated is None else stated), rows
        at = bisect_left(engine.graph_buckets, decodes)
        if at == len(engine.graph_buckets):
            return False, rows
        return True, float(engine.graph_buckets[at] * (1 + pool.draft_tokens))

    def _divided(self, ranks: Sequence[StepBatch]) -> tuple[Sequence[StepBatch], _Rows, int]:
        """Batches of one micro-batch of a step, their rows, and how many of them make the step."""
        pool = self.deployment.pool
        if pool.pp > 1:
            ranks = [_share(batch, pool.pp) for batch in ranks]
        per = 1 + pool.draft_tokens
        rows = [b.decodes * per + b.prefill_tokens for b in ranks]
        prefill = any(b.prefill_tokens for b in ranks)
        graph, most = self._graph(max([b.decodes for b in ranks]), max(rows), prefill)
        group = most * len(ranks) if graph and not prefill else float(sum(rows))
        times = 2 if pool.two_batch_overlap and most >= 2 else 1
        if times == 2:
            ranks, most, group = [_share(batch, 2) for batch in ranks], most / 2, group / 2
        return ranks, _Rows(graph, most, group, prefill), times

    def __reduce__(self) -> tuple[type[StepModel], tuple[Deployment]]:
        """For another process, which prices anew."""
        return StepModel, (self.deployment,)

    def cost(self, ranks: Sequence[StepBatch]) -> StepCost:
        """The cost of a step in which each rank of `dp` has its batch."""
        distinct = set(ranks)
        key = tuple(sorted(distinct)), sum(b.decodes + b.prefill_tokens for b in ranks), len(ranks)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= 10_000:
                self._known.clear()
            known = self._known[key] = self._price(ranks)
        return known

    def _price(self, ranks: Sequence[StepBatch]) -> StepCost:
        terms, per = self.terms, 1 + self.deployment.pool.draft_tokens
        ranks, rows, times = self._divided(ranks)
        cores = [
            [*terms.decodes(b.decodes * per, b.context * per), *terms.prompts(b)]
            for b in dict.fromkeys(ranks)
        ]
        slowest = max(cores, key=lambda pieces: sum(piece.seconds for piece in pieces))
        captured = rows.graph and not rows.prefill
        side = [*slowest, *terms.own(rows.most, captured)]
        experts = terms.experts(rows.group, rows.prefill)
        exchange = terms.exchange(rows.most, rows.prefill)
        rest = terms.logits(times * max(b.decodes * per + b.prefills for b in ranks))
        decodes, context = max(b.decodes for b in ranks) * times, max(b.context for b in ranks) * times
        if per > 1 and decodes:
            rest += terms.drafts(decodes, context)
        shares = self._together(rows, times, total(side), total(experts), total(exchange), total(rest))
        return self._parts(shares, rows, times, [*side, *experts], exchange, rest)

    def _together(
        self, rows: _Rows, times: int, side: Total, experts: Total, exchange: Total, rest: Total
    ) -> StepShares:
        """A step of `times` micro-batches from totals: outside experts, in them, exchange, once a step."""
        engine, compute = self.deployment.engine, side.plus(experts)
        busy, exposed = times * compute.seconds, exchange.seconds
        if times == 2 and exchange.held:
            # Rows travel without SMs; calls hold all of them.
            exposed = overlapped(compute.seconds + exchange.held, exchange.seconds - exchange.held) - busy
        elif times == 2:
            back = exchange.seconds - exchange.out
            slots = in_slots if rows.prefill else _anywhere
            exposed = slots(side.slowed, experts.slowed, exchange.out, back) - busy
        gpu = busy + exposed + rest.seconds
        launches = times * (compute.launches + exchange.launches) + rest.launches
        waited = self._waited(0 if rows.graph else launches, gpu, engine.launch_s.value)
        eager = 0.0 if rows.graph else waited
        host = waited - eager + self._exposed.value
        return StepShares(gpu + eager + host, busy, exposed, eager, host)

    def _waited(self, launches: int, gpu: float, launch_s: float) -> float:
        """What a GPU that has `gpu` seconds of work waits for a host that works ahead (eq. Q8).

        One thread plans the step and launches its kernels, one after the other.
        """
        d = self.deployment
        return max(launches * launch_s + d.engine.host_s.value * d.host_overlapped - gpu, 0.0)

    @property
    def _exposed(self) -> EngineFigure:
        """What every GPU step waits for the host."""
        d = self.deployment
        return d.engine.exposed_host_s if d.host_overlapped else d.engine.host_s

    def _parts(
        self, shares: StepShares, rows: _Rows, times: int, compute: list[Piece], exchange: list[Piece],
        rest: list[Piece],
    ) -> StepCost:  # fmt: skip
        engine = self.deployment.engine
        sent = times * sum(piece.seconds for piece in exchange)
        parts = [_part(piece, times, 1.0) for piece in compute]
        parts += [_part(piece, times, shares.exchange_s / sent if sent else 0.0) for piece in exchange]
        parts += [_part(piece, 1, 1.0) for piece in rest]
        launches = sum(part.launches for part in parts)
        for name, seconds, figure, many in (
            ("launches", shares.launches_s, engine.launch_s, launches),
            ("host", shares.host_s, engine.host_s, 1),
        ):
            parts.append(StepPart(name, "host", seconds, many * figure.value, 0, _said(name, figure)))
        kept: dict[str, StepPart] = {}
        for part in parts:
            kept[part.name] = _joined(kept[part.name], part) if part.name in kept else part
        left_out = LEFT_OUT_PROMPTS if rows.prefill else LEFT_OUT_DECODES
        spread = TO_80 * _error([*compute, *rest], exchange, times, shares, self._exposed, left_out)
        seconds, gpu = shares.seconds, shares.seconds - shares.launches_s - shares.host_s
        # A host that hardly waits at its own middle may at the slow end of its range.
        less, more = (
            0.0 if rows.graph else abs(self._waited(launches, gpu, end) - shares.launches_s)
            for end in (engine.launch_s.low, engine.launch_s.high)
        )
        low, high = seconds - hypot(spread, less), seconds + hypot(spread, more)
        return StepCost(seconds, max(low, 0.0), high, tuple(kept.values()))

    # -- tables -----------------------------------------------------------------------------------

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """The pace of these batches from tables of `cost` (protocol `replicas.StepTimes`)."""
        prefill = any(b.prefill_tokens for b in ranks)
        if self._is_quick:
            return self._quick(ranks[0], prefill)
        seconds = self._tabulated(ranks)
        if prefill:
            return StepPace(seconds * 1e9)
        gained = self.deployment.tokens_per_step
        ahead = max(min(b.context // (8 * b.decodes) if b.decodes else 64 for b in ranks), 16)
        later = self._tabulated(
            [b._replace(context=b.context + round(ahead * gained * b.decodes)) for b in ranks]
        )
        return StepPace(seconds * 1e9, (later - seconds) / ahead * 1e9, ahead)

    def quick_tables(self) -> QuickTables | None:
        """The tables from which compiled code reads `pace` too; None where `pace` reads others."""
        if not self._is_quick or self.terms.forms:
            return None
        d, stated = self.deployment, self.deployment.pool.graph_prefill_tokens
        graphs = d.pool.cuda_graphs
        return QuickTables(
            self._whole, self._logits, self._decodes, self._prefills, self._core_launches,
            graph_prefill=(d.engine.graph_prefill if stated is None else stated) if graphs else -1,
            buckets=tuple(d.engine.graph_buckets) if graphs else (), launch_s=d.engine.launch_s.value,
            host_s=d.engine.host_s.value * d.host_overlapped, exposed_s=self._exposed.value,
        )  # fmt: skip

    def _quick(self, batch: StepBatch, prefill: bool) -> StepPace:
        """The pace of one rank without drafts and micro-batches."""
        decodes, context, prompts, tokens, pairs = batch
        (graph, most), engine = self._graph(decodes, decodes + tokens, prefill), self.deployment.engine
        table = self._whole[prefill]
        whole = table.exact(most) if graph and not prefill else table.at(most)
        logits = self._logits.at(decodes + prompts)
        gpu, growth, room = whole[0] + logits[0], 0.0, 1.0
        if decodes:
            seconds, growth, room = self._decodes.read(decodes, context / decodes)
            gpu += seconds
        if tokens:
            gpu += self._prefills.read(tokens, pairs / tokens)[0]
            if self.terms.forms:
                gpu += self._formed.at(self.terms.keys_formed(batch))[0]
        count = 0 if graph else self._launches(whole.launches + logits.launches, decodes > 0, prefill)
        gpu += self._waited(count, gpu, engine.launch_s.value)
        return StepPace((gpu + self._exposed.value) * 1e9, growth * 1e9, max(int(room), 1))

    def _launches(self, others: int, decodes: bool, prefill: bool) -> int:
        """Kernels of a step without a graph."""
        found = self._core_launches.get((decodes, prefill))
        if found is None:
            found = total(self.terms.prompts(StepBatch(0, 0, 1, 1, 1))).launches if prefill else 0
            found += total(self.terms.decodes(1, 1)).launches if decodes else 0
            self._core_launches[decodes, prefill] = found
        return others + found

    def _tabulated(self, ranks: Sequence[StepBatch]) -> float:
        """Seconds of a step as `cost` gives them, within 1 %."""
        per = 1 + self.deployment.pool.draft_tokens
        ranks, rows, times = self._divided(ranks)
        core = max([self._core(b, per) for b in set(ranks)])
        own, experts, exchange = self._own, self._experts[rows.prefill], self._exchange[rows.prefill]
        if rows.graph and not rows.prefill:
            layers, inside = own.exact(rows.most), experts.exact(rows.group)
        else:
            layers, inside = own.at(rows.most), experts.at(rows.group)
        rest = self._logits.at(times * max([b.decodes * per + b.prefills for b in ranks]))
        decodes = max([b.decodes for b in ranks]) * times
        if per > 1 and decodes:
            context = max([b.context for b in ranks]) * times
            rest = rest.plus(self._drafts.at(decodes, context / decodes))
        side = core.plus(layers)
        return self._together(rows, times, side, inside, exchange.at(rows.most), rest).seconds

    def _core(self, batch: StepBatch, per: int) -> Total:
        found = Total(0.0, 0.0, 0.0, 0.0, 0)
        if batch.decodes:
            found = self._decodes.at(batch.decodes * per, batch.context / batch.decodes)
        if batch.prefill_tokens:
            tokens = batch.prefill_tokens
            found = found.plus(self._prefills.at(tokens, batch.prefill_pairs / tokens))
            if self.terms.forms:
                found = found.plus(self._formed.at(self.terms.keys_formed(batch)))
        return found


def overlapped(compute: float, exchange: float) -> float:
    """Seconds of two micro-batches, each with so much compute and exchange (eq. Q9).

    The GPU computes for both, a micro-batch computes and sends in turn, and the links carry both.
    """
    return max(2.0 * compute, compute + exchange, 2.0 * exchange)


def _anywhere(side: float, experts: float, out: float, back: float) -> float:
    return overlapped(side + experts, out + back)


def in_slots(side: float, experts: float, out: float, back: float) -> float:
    """Seconds of two micro-batches whose layers alternate in prefills (eq. Q9).

    Beside one's attention the other's rows go out or sums come back, and beside its experts too (sglang 0.5.9
    batch_overlap/operations_strategy.py; decodes yield more often: there any compute hides any exchange).
    """
    return max(side, out) + max(experts, out) + max(experts, back) + max(side, back)


def _share(batch: StepBatch, among: int) -> StepBatch:
    return StepBatch(*(ceil(n / among) for n in batch))


def _part(piece: Piece, times: int, share: float) -> StepPart:
    busy = piece.seconds * times
    evidence = combined([(piece.evidence, busy)])
    return StepPart(piece.name, piece.kind, busy * share, busy, piece.launches * times, evidence)


def _joined(one: StepPart, other: StepPart) -> StepPart:
    return StepPart(
        one.name, one.kind, one.exposed_s + other.exposed_s, one.busy_s + other.busy_s,
        one.launches + other.launches, one.evidence | other.evidence,
    )  # fmt: skip


def _said(name: str, figure: EngineFigure) -> Evidence:
    return Evidence.of([], [f"{name}: {figure.source}"])


def _error(
    compute: Iterable[Piece], exchange: Iterable[Piece], times: int, shares: StepShares, host: EngineFigure,
    left_out: float,
) -> float:  # fmt: skip
    """Standard error of a step: errors of one calibration entry add up, those of several as squares."""
    errors: dict[str, float] = defaultdict(float)
    for piece in compute:
        for entry, relative in piece.evidence.mean_errors().items():
            errors[entry] += relative * piece.seconds * times
    sent = sum(piece.seconds for piece in exchange)
    for piece in exchange:
        errors[piece.name] += piece.error_s / sent * shares.exchange_s if sent else 0.0
    errors["host"] = (host.high - host.low) / 2.0 / TO_80
    errors["model.left_out"] = left_out * shares.seconds
    return hypot(*errors.values())


__all__ = ["StepCost", "StepModel", "StepPart", "StepShares", "in_slots", "overlapped"]
