"""What a step of an inference engine takes: operators, exchange and host, and tables of it for the events (pure).

A step is a sum of terms that each depend on few numbers: layers on the rows of a rank, decode attention on
sequences and keys, prefill attention on rows and pairs, experts on the rows of a group, the exchange on the rows of
the fullest rank, the head on sequences. `cost` adds the terms, `pace` reads them from tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import NamedTuple

from moesim.simulator.cost.evidence import NO_EVIDENCE, Evidence, combined
from moesim.simulator.model.block import Layer
from moesim.simulator.model.operator import Operator
from moesim.simulator.serving.attention import attention_operators
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.exchange import Fabric, collective, expert_exchange
from moesim.simulator.serving.operators import Load, Rows, dense, experts, head, norms, router
from moesim.simulator.serving.prices import price
from moesim.simulator.serving.replicas import Pace
from moesim.simulator.serving.scheduler import Batch

TO_80 = 1.2816
"""Half an 80 % interval of a normal error in standard deviations."""


class Part(NamedTuple):
    """Seconds of a class of work in a step, exposed ones and all."""

    name: str
    kind: str
    exposed_s: float
    busy_s: float
    launches: int
    evidence: Evidence


@dataclass(frozen=True)
class StepCost:
    """A step: its seconds, best and worst of an 80 % interval, and its parts, whose exposed seconds add up to it."""

    seconds: float
    low: float
    high: float
    parts: tuple[Part, ...] = field(repr=False)


class _Piece(NamedTuple):
    """Seconds of one operator over all layers."""

    name: str
    kind: str
    seconds: float
    launches: int
    evidence: Evidence


def _kind(op: Operator) -> str:
    if op.cls == "attention_forward" or "absorb" in op.name:
        return "attention"
    if op.name.startswith("experts") or op.cls in ("permute", "topk", "gate_gemm"):
        return "experts"
    return "linear" if op.cls == "gemm" else "other"


class _Stack:
    """Terms of some layers of a model on one GPU; layers of one kind are priced once."""

    def __init__(self, deployment: Deployment, layers: Iterable[Layer]) -> None:
        self._d = deployment
        self._layers = Counter(layers)
        self.n_layers = sum(self._layers.values())
        self.routed_layers = sum(n for layer, n in self._layers.items() if layer.feed_forward.routed)

    def _price(self, ops: Iterable[Operator], times: int) -> list[_Piece]:
        cluster = self._d.cluster
        pieces = []
        for op in ops:
            cost = price(op, cluster.accelerator, self._d.profile)
            seconds = cost.seconds
            evidence = combined([(cost.evidence, times)])
            pieces.append(_Piece(op.name, _kind(op), times * seconds, times * op.launches, evidence))
        return pieces

    def _attention(self, layer: Layer, rows: Rows) -> list[Operator]:
        return attention_operators(layer.attention, self._d.shape.hidden, rows, self._d.split)

    _OF_DECODE = frozenset({"q_absorb", "decode", "v_absorb"})
    _OF_PREFILL = frozenset({"kv_up", "kv_up.cast", "keys_pack", "prefill"})

    def own(self, tokens: float) -> list[_Piece]:
        """Norms, projections, dense FFNs and shared experts on the rows of a rank."""
        d, shape, split, out = self._d, self._d.shape, self._d.split, []
        rows = Rows(tokens, 0.0, 0.0, 0.0, 0.0, 0.0)
        for layer, times in self._layers.items():
            ops = norms(shape.hidden, tokens) + self._attention(layer, rows)
            if not layer.feed_forward.routed and (width := getattr(layer.feed_forward, "width", 0)):
                ops += dense(width / split.tp, shape.ffn_gated, shape.hidden, tokens, split.weights)
            elif layer.feed_forward.routed and shape.moe and shape.moe.shared_experts:
                shared = shape.moe.shared_experts * shape.moe.shared_ffn / split.tp
                ops += dense(shared, shape.moe.expert_gated, shape.hidden, tokens, split.weights, "shared")
            out += self._price(ops, times)
        return out if d else []

    def decodes(self, rows: float, context: float) -> list[_Piece]:
        """Decode attention of `rows` rows over `context` keys in all."""
        return self._core(Rows(0.0, rows, 0.0, 0.0, context, 0.0), self._OF_DECODE) if rows else []

    def prefills(self, tokens: float, pairs: float) -> list[_Piece]:
        """Prefill attention of `tokens` rows that see `pairs` keys in all."""
        return self._core(Rows(0.0, 0.0, tokens, 0.0, 0.0, pairs), self._OF_PREFILL) if tokens else []

    def _core(self, rows: Rows, names: frozenset[str]) -> list[_Piece]:
        out = []
        for layer, times in self._layers.items():
            out += self._price([op for op in self._attention(layer, rows) if op.name in names], times)
        return out

    def experts(self, tokens: float) -> list[_Piece]:
        """Router and routed experts of a rank, for `tokens` tokens of its group."""
        shape, split, pool = self._d.shape, self._d.split, self._d.pool
        if not self.routed_layers or not shape.moe:
            return []
        load = Load.of(shape.moe, split, tokens)
        ops = router(shape.moe, shape.hidden, tokens / pool.dp)
        ops += experts(shape.moe, shape.hidden, load, split, decode=True)
        return self._price(ops, self.routed_layers)

    def exchange(self, tokens: float) -> list[_Piece]:
        """Tokens of the fullest rank over the links: all-reduce of TP, dispatch and combine of EP."""
        pool, shape = self._d.pool, self._d.shape
        fabric, out = Fabric(self._d.cluster, self._d.profile), []
        if pool.tp > 1:
            one = collective(fabric, "all_reduce", tokens * shape.hidden * 2, pool.tp)
            times = self.n_layers * (1 if pool.dp > 1 else 2)
            out.append(_Piece("all_reduce", "exchange", times * one.seconds, 2 * times, one.cost.evidence))
        if pool.dp > 1 and self.routed_layers and shape.moe:
            for name in ("dispatch", "combine"):
                one = expert_exchange(
                    fabric, shape.moe, shape.hidden, pool.tp * pool.dp, tokens, name, low_latency=tokens <= 512
                )  # fmt: skip
                seconds = self.routed_layers * one.seconds
                out.append(_Piece(name, "exchange", seconds, 2 * self.routed_layers, one.cost.evidence))
        return out


class _Terms(NamedTuple):
    """What a step is made of: pieces of compute of the slowest rank and of exchange."""

    compute: list[_Piece]
    exchange: list[_Piece]


def _half(batch: Batch) -> Batch:
    return Batch(*((n + 1) // 2 for n in batch))


class StepModel:
    """Prices steps of one replica; equal batches are priced once."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        shape = deployment.shape
        self._stack = _Stack(deployment, shape.layers)
        self._draft = _Stack(deployment, shape.layers[-1:])
        self._known: dict[tuple[tuple[Batch, ...], int], StepCost] = {}

    # -- exact ------------------------------------------------------------------------------------

    def cost(self, ranks: Sequence[Batch]) -> StepCost:
        """The cost of a step in which each rank of `dp` has its batch."""
        key = tuple(sorted(set(ranks))), sum(b.decodes + b.prefill_tokens for b in ranks)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > 10_000:
                self._known.clear()
            known = self._known[key] = self._assemble(ranks)
        return known

    def _rows(self, ranks: Sequence[Batch]) -> tuple[bool, float, float]:
        """Whether a graph is replayed; rows of the fullest rank and of the group, padded to the graph's bucket."""
        pool, engine = self.deployment.pool, self.deployment.engine
        per = 1 + pool.draft_tokens
        rows = [b.decodes * per + b.prefill_tokens for b in ranks]
        most = max(rows)
        prefill = any(b.prefill_tokens for b in ranks)
        if pool.cuda_graphs and not prefill:
            at = bisect_left(engine.graph_buckets, max(b.decodes for b in ranks))
            if at < len(engine.graph_buckets):
                padded = float(engine.graph_buckets[at] * per)
                return True, padded, padded * pool.dp
        return pool.cuda_graphs and most <= engine.graph_prefill, float(most), float(sum(rows))

    def _terms(self, ranks: Sequence[Batch], stack: _Stack, per: int, most: float, group: float) -> _Terms:
        slowest: list[_Piece] = []
        for batch in set(ranks):
            pieces = stack.decodes(batch.decodes * per, batch.context) + stack.prefills(
                batch.prefill_tokens, batch.prefill_pairs
            )
            if not slowest or sum(p.seconds for p in pieces) > sum(p.seconds for p in slowest):
                slowest = pieces
        compute = slowest + stack.own(most) + stack.experts(group)
        return _Terms(compute, stack.exchange(most))

    def _assemble(self, ranks: Sequence[Batch]) -> StepCost:
        pool, engine = self.deployment.pool, self.deployment.engine
        if pool.pp > 1:
            ranks = [Batch(*(-(-n // pool.pp) for n in batch)) for batch in ranks]
        per = 1 + pool.draft_tokens
        graph, most, group = self._rows(ranks)
        overlap = pool.two_batch_overlap and most >= 2
        if overlap:
            ranks = [_half(batch) for batch in ranks]
            most, group = most / 2, group / 2
        terms = self._terms(ranks, self._stack, per, most, group)
        times = 2 if overlap else 1
        compute, exchange = (sum(p.seconds for p in pieces) for pieces in terms)
        sequences = max(b.decodes * per + b.prefills for b in ranks) * times
        rest = self._stack._price(
            head(self.deployment.shape, Rows(0, 0, 0, sequences, 0, 0), self.deployment.split), 1
        )
        decodes = max(b.decodes for b in ranks) * times
        if pool.draft_tokens and decodes:
            one = Batch(decodes, max(b.context for b in ranks) * times, 0, 0, 0)
            draft = self._terms([one], self._draft, 1, decodes, decodes * pool.dp)
            logits = self._stack._price(
                head(self.deployment.shape, Rows(0, 0, 0, decodes, 0, 0), self.deployment.split), 1
            )
            for piece in (*draft.compute, *draft.exchange, *logits):
                rest.append(_scaled(piece, pool.draft_tokens, f"draft.{piece.name}"))
        exposed = overlapped(compute, exchange) - 2 * compute if overlap else exchange
        launches = sum(p.launches for p in (*terms.compute, *terms.exchange)) * times
        launches += sum(p.launches for p in rest)
        gpu = compute * times + exposed + sum(p.seconds for p in rest)
        eager = 0.0 if graph else max(launches * engine.launch_s.value - gpu, 0.0)
        host = max(engine.host_s.value - gpu - eager, 0.0) + engine.exposed_host_s.value
        if not engine.host_overlapped:
            host = engine.host_s.value
        parts = [_part(p, times, 1.0) for p in terms.compute]
        share = exposed / (exchange * times) if exchange else 0.0
        parts += [_part(p, times, share) for p in terms.exchange] + [_part(p, 1, 1.0) for p in rest]
        parts.append(Part("launches", "host", eager, launches * engine.launch_s.value, 0, NO_EVIDENCE))
        parts.append(Part("host", "host", host, engine.host_s.value, 0, NO_EVIDENCE))
        return _interval(parts)

    # -- tabulated --------------------------------------------------------------------------------

    def pace(self, now_ns: int, ranks: Sequence[Batch]) -> Pace:
        """The pace of these batches from tables of `cost` (protocol `replicas.StepTimes`)."""
        seconds = self.cost(ranks).seconds
        prefill = any(b.prefill_tokens for b in ranks)
        gained = 1.0 if prefill else self.deployment.tokens_per_step
        if prefill:
            return Pace(seconds * 1e9)
        ahead = 64
        later = [b._replace(context=b.context + ahead * b.decodes) for b in ranks]
        growth = (self.cost(later).seconds - seconds) / ahead
        return Pace(seconds / gained * 1e9, growth / gained * 1e9, ahead)


def overlapped(compute: float, exchange: float) -> float:
    """Seconds of two micro-batches, each with so much compute and exchange, one computing while the other sends.

    The GPU computes for both, a micro-batch computes and sends in turn, and the links carry both.
    """
    return max(2 * compute, compute + exchange, 2 * exchange)


def _scaled(piece: _Piece, times: int, name: str) -> _Piece:
    return piece._replace(name=name, seconds=piece.seconds * times, launches=piece.launches * times)


def _part(piece: _Piece, times: int, share: float) -> Part:
    busy = piece.seconds * times
    return Part(piece.name, piece.kind, busy * share, busy, piece.launches * times, piece.evidence)


def _interval(parts: Iterable[Part]) -> StepCost:
    """A step with its 80 % interval: errors of one calibration entry add up, those of several as squares."""
    kept: dict[str, Part] = {}
    for part in parts:
        known = kept.get(part.name)
        if known is not None:
            part = Part(
                part.name, part.kind, part.exposed_s + known.exposed_s, part.busy_s + known.busy_s,
                part.launches + known.launches, part.evidence | known.evidence,
            )  # fmt: skip
        kept[part.name] = part
    seconds = sum(part.exposed_s for part in kept.values())
    errors: Counter[str] = Counter()
    for part in kept.values():
        for entry, relative in part.evidence.mean_errors().items():
            errors[entry] += relative * part.exposed_s  # type: ignore[assignment]
    spread = TO_80 * hypot(*errors.values()) if errors else 0.0
    return StepCost(seconds, max(seconds - spread, 0.0), seconds + spread, tuple(kept.values()))
