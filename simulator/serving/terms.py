"""The terms of a step of an inference engine on one GPU, priced: pieces of compute and of exchange (pure)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from moesim.hwmodels.calibration import MeasuredCurve, list_profiles, load_profile
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.evidence import Evidence
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import Operator
from moesim.simulator.serving.attention import attention_operators
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.exchange import Exchange, Fabric, collective, expert_exchange
from moesim.simulator.serving.operators import (
    ExpertLoad,
    StepRows,
    draft_operators,
    experts,
    head,
    layer_operators,
)
from moesim.simulator.serving.prices import price
from moesim.simulator.serving.scheduler import StepBatch

ELEMENT = 2.0
"""Bytes of an element of a hidden state between ranks (BF16)."""
DISPATCH_SMS = 20
"""SMs of DeepEP's normal kernels (deepseek-ai/DeepEP README: Buffer.set_num_sms, 20 to 24)."""


FUSED_BYTES = 8.0 * 2**20
"""Largest buffer that a sum with a norm takes (vllm 0.19.0 config/compilation.py: 0.5 to 64 MiB by ranks)."""


OUTWARD = ("dispatch", "all_gather")
"""Calls that bring rows to the experts; the others bring sums back."""


class Piece(NamedTuple):
    """One operator or call over all layers of a micro-batch.

    `slowed_s`: its seconds beside kernels that hold SMs; `held_s`: seconds in which a call holds all SMs;
    `evidence`: that of one call.
    """

    name: str
    kind: str
    seconds: float
    slowed_s: float
    held_s: float
    error_s: float
    launches: int
    evidence: Evidence


class Total(NamedTuple):
    """Seconds of pieces, the same beside an exchange that holds SMs, and seconds that hold all SMs.

    `out`: of these, seconds in which rows go out to the experts. `launches`: kernels.
    """

    seconds: float
    slowed: float
    held: float
    out: float
    launches: int

    def plus(self, other: Total) -> Total:
        """Both."""
        a, b = self, other
        return Total(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])


@lru_cache(maxsize=8)
def _bursts(architecture: str) -> dict[tuple[str, str], MeasuredCurve]:
    """Sustained over burst rates by class and format; those of FP8 stand for FP4."""
    name = f"{architecture.lower()}-sustained"
    if name not in list_profiles():
        return {}
    found = {}
    for curve in load_profile(name).curves:
        for use in curve.used_for:
            _, kind, dtype = use.split("/")
            found[kind, dtype] = curve
    if ("gemm", "fp8") in found:
        found.setdefault(("gemm", "fp4"), found["gemm", "fp8"])
    return found


def total(pieces: Iterable[Piece]) -> Total:
    """The sum of pieces."""
    seconds = slowed = held = out = 0.0
    launches = 0
    for piece in pieces:
        seconds += piece.seconds
        slowed += piece.slowed_s
        held += piece.held_s
        launches += piece.launches
        if piece.name in OUTWARD:
            out += piece.seconds
    return Total(seconds, slowed, held, out, launches)


def _kind(op: Operator) -> str:
    if op.cls in ("attention_forward", "sparse_attention_forward", "indexer", "indexer_topk"):
        return "attention"
    if op.name.endswith("_absorb"):
        return "attention"
    if op.name.startswith("experts") or op.cls in ("topk", "gate_gemm"):
        return "experts"
    return "linear" if op.cls == "gemm" else "other"


class StepTerms:
    """Terms of a deployment; layers of one kind are priced once."""

    def __init__(self, deployment: Deployment) -> None:
        """Nothing is priced yet."""
        self.deployment = d = deployment
        kinds: dict[object, list[int]] = {}
        for index, layer in enumerate(d.shape.layers):
            kinds.setdefault((layer.attention, layer.feed_forward), []).append(index)
        self._layers = [(same[0], len(same)) for same in kinds.values()]
        self._attentions = Counter(layer.attention for layer in d.shape.layers)
        self._routed = sum(layer.feed_forward.routed for layer in d.shape.layers)
        self._halves = sum(2 for _ in d.shape.layers)

    @cached_property
    def _fabric(self) -> Fabric:
        return Fabric(self.deployment.cluster, self.deployment.profile)

    @cached_property
    def _free(self) -> float:
        """Time over time of compute-bound kernels beside an exchange that holds SMs."""
        n = self.deployment.cluster.accelerator.compute_units
        return n.n / (n.n - DISPATCH_SMS) if n is not None else 1.0

    # -- compute ----------------------------------------------------------------------------------

    def _priced(self, ops: Iterable[Operator], times: int, prefix: str = "") -> list[Piece]:
        d, pieces = self.deployment, []
        for op in ops:
            found = price(op, d.cluster.accelerator, d.profile)
            seconds = times * found.seconds * d.slowest / self._sustained(op, found)
            slowed = seconds * (self._free if found.bound == "compute" else 1.0)
            launches, evidence = times * op.launches, found.evidence
            pieces.append(Piece(prefix + op.name, _kind(op), seconds, slowed, 0.0, 0.0, launches, evidence))
        return pieces

    def _sustained(self, op: Operator, cost: OperatorCost) -> float:
        """Rate over that of a burst: the power limit holds where a pool works on prompts only (eq. Q11)."""
        if self.deployment.role != "prefill" or cost.bound != "compute":
            return 1.0
        kind = "gemm" if op.gemm and op.cls != "attention_forward" else "attention"
        curve = _bursts(self.deployment.cluster.accelerator.architecture).get(
            (kind, op.dtype if kind == "gemm" else "bf16")
        )
        return curve.curve.at(cost.seconds).value if curve else 1.0

    def own(self, tokens: float, captured: bool = False) -> list[Piece]:
        """Norms, projections, router, dense FFNs and shared experts on the rows of a rank.

        Where a graph was captured shared experts may run beside the routed ones: then only their bytes count.
        """
        d, out = self.deployment, []
        fused = self._fuses(tokens)
        rows, none = StepRows(tokens, 0.0, 0.0, 0.0, 0.0, 0.0), ExpertLoad(0.0, 0.0, 0.0, 0.0)
        for index, times in self._layers:
            for part, ops in layer_operators(d.shape, index, rows, d.split, none):
                if part == "shared" and captured and self._beside(tokens):
                    out += self._read(ops, times)
                    continue
                kept = [op for op in ops if op.name not in ("attn_norm", "ffn_norm")] if fused else ops
                out += self._priced(kept, times)
        return out + self._priced(head(d.shape, rows, d.split), 1)

    def _beside(self, tokens: float) -> bool:
        return self.deployment.exchange != "deepep" and tokens <= self.deployment.engine.shared_beside

    def _read(self, ops: Sequence[Operator], times: int) -> list[Piece]:
        """Operators whose calls other kernels hide, at the memory's bandwidth."""
        rate, out = self.deployment.cluster.accelerator.hbm_bytes_per_s, []
        for op, piece in zip(ops, self._priced(ops, times), strict=True):
            seconds = min(piece.seconds, times * (op.bytes_read + op.bytes_written) / rate)
            out.append(piece._replace(seconds=seconds, slowed_s=seconds))
        return out

    def _fuses(self, tokens: float) -> bool:
        """Whether the sums over TP norm as well, so that the norms before both halves take no kernel."""
        d, pool = self.deployment, self.deployment.pool
        inside = pool.dp == pool.pp == 1 < pool.tp <= d.cluster.node.n_gpus
        known = d.cluster.accelerator.architecture in ("Hopper", "Blackwell")
        few = tokens * d.shape.hidden * ELEMENT <= FUSED_BYTES
        return d.engine.fused_norms and inside and known and few and not self._fabric.pcie

    def logits(self, sequences: float) -> list[Piece]:
        """Logits of sequences that get a token, gathered from the ranks of TP, and sampling."""
        d = self.deployment
        out = self._priced(head(d.shape, StepRows(0.0, 0.0, 0.0, sequences, 0.0, 0.0), d.split), 1)
        gathered = collective(self._fabric, "all_gather", sequences * d.shape.vocab * ELEMENT, d.pool.tp)
        return [*out, _call(gathered, 1, "logits.")] if d.pool.tp > 1 else out

    def decodes(self, rows: float, context: float) -> list[Piece]:
        """Decode attention of `rows` rows over `context` keys in all."""
        per = 1.0 + self.deployment.pool.draft_tokens
        return self._core(StepRows(0.0, rows, 0.0, 0.0, context, 0.0, per)) if rows else []

    def prompts(self, batch: StepBatch) -> list[Piece]:
        """Prefill attention of a batch."""
        tokens = batch.prefill_tokens
        pieces = self.prefills(tokens, batch.prefill_pairs) if tokens else []
        return pieces + self.formed(self.keys_formed(batch)) if tokens else []

    _FORMED = frozenset({"kv_up", "kv_up.cast", "keys_pack"})

    def prefills(self, tokens: float, pairs: float) -> list[Piece]:
        """Prefill attention of `tokens` rows that see `pairs` keys in all, without keys formed per head."""
        rows = StepRows(0.0, 0.0, tokens, 0.0, 0.0, pairs, 1.0, 1.0, pairs / tokens + (tokens - 1.0) / 2.0)
        return [piece for piece in self._core(rows) if piece.name not in self._FORMED] if tokens else []

    @cached_property
    def forms(self) -> bool:
        """Whether prefills form keys and values per head."""
        return bool(self.formed(1.0))

    def keys_formed(self, batch: StepBatch) -> float:
        """Keys of the prompts of a batch, earlier chunks included."""
        return max(float(batch.prefill_tokens), StepRows.of(batch).cached)

    def formed(self, keys: float) -> list[Piece]:
        """Keys and values formed per head for prefills of latent attention."""
        rows = StepRows(0.0, 0.0, keys, 0.0, 0.0, keys, 1.0, 1.0, keys)
        return [piece for piece in self._core(rows) if piece.name in self._FORMED] if keys else []

    def _core(self, rows: StepRows) -> list[Piece]:
        d, out = self.deployment, []
        for attention, times in self._attentions.items():
            out += self._priced(attention_operators(attention, d.shape.hidden, rows, d.split), times)
        return out

    def experts(self, tokens: float, prefill: bool) -> list[Piece]:
        """Routed experts of a rank, for `tokens` tokens of its group."""
        d, moe = self.deployment, self.deployment.shape.moe
        if moe is None or not tokens:
            return []
        load = ExpertLoad.of(moe, d.split, tokens)
        more, active = d.fullest(tokens, prefill)
        load = load._replace(rows=load.rows * more, active=active)
        return self._priced(experts(moe, d.shape.hidden, load, d.split, not prefill), self._routed)

    def drafts(self, sequences: float, context: float) -> list[Piece]:
        """Drafting of all tokens of a step, one after the other."""
        d, moe = self.deployment, self.deployment.shape.moe
        rows = StepRows(sequences, sequences, 0.0, sequences, context, 0.0)
        load = ExpertLoad.of(moe, d.split, sequences * d.pool.dp)
        times, out = d.pool.draft_tokens, []
        for section in draft_operators(d.shape, rows, d.split, load):
            out += self._priced(section.operators, times * section.layers, "draft.")
        return out + self._sent(sequences, False, times, times * bool(moe), "draft.")

    # -- exchange ---------------------------------------------------------------------------------

    def exchange(self, tokens: float, prefill: bool) -> list[Piece]:
        """What the fullest rank's `tokens` tokens take over the links (eq. Q8)."""
        return self._sent(tokens, prefill, len(self.deployment.shape.layers), self._routed)

    def _sent(self, tokens: float, prefill: bool, layers: int, routed: int, prefix: str = "") -> list[Piece]:
        d, pool, fabric = self.deployment, self.deployment.pool, self._fabric
        hidden, ranks, out = d.shape.hidden, pool.tp * pool.dp, []
        apart = pool.dp > 1 and d.shape.moe is not None
        if pool.tp > 1:
            # Attention and the feed-forward half, unless experts exchange tokens; and the embedding's rows.
            calls = layers + (layers - routed if apart else layers) + (0 if prefix else 1)
            reduced = collective(fabric, "all_reduce", tokens * hidden * ELEMENT, pool.tp)
            out.append(_call(reduced, calls, prefix))
        if apart and isinstance(d.shape.moe, MoE) and tokens:
            if d.exchange == "deepep":
                sent = tokens / pool.tp * d.fullest(tokens * pool.dp, prefill)[0]
                for operation in ("dispatch", "combine"):
                    call = expert_exchange(
                        fabric, d.shape.moe, hidden, ranks, sent, operation,
                        low_latency=not prefill, sms=DISPATCH_SMS, redundant=pool.redundant_experts,
                    )  # fmt: skip
                    out.append(_call(call, routed, prefix))
            else:
                size = tokens * pool.dp * hidden * ELEMENT
                for ring in ("all_gather", "reduce_scatter"):
                    out.append(_call(collective(fabric, ring, size, ranks), routed, prefix))
        if pool.pp > 1 and not prefix:
            size = tokens * hidden * ELEMENT
            out.append(_call(collective(fabric, "all_gather", 2 * size, 2), pool.pp - 1, "stage."))
        return out


def _call(call: Exchange, times: int, prefix: str = "") -> Piece:
    all_sms = call.busy_s < call.seconds
    held = call.busy_s * times if all_sms else 0.0
    error = (call.high_s - call.low_s) / 2.0 * times
    seconds = call.seconds * times
    return Piece(
        prefix + call.name, "exchange", seconds, seconds, held, error, 2 * times, call.cost.evidence
    )  # fmt: skip


# -- tables ------------------------------------------------------------------------------------------
# Terms over one or two numbers, priced where they are asked for.

EXACT = 16
"""Numbers up to this are tabulated one by one."""
STEPS = 5
"""Grid points for a doubling above that: neighbours differ by 15 %."""
GRID = [*map(float, range(EXACT + 1)), *(EXACT * 2.0 ** (k / STEPS) for k in range(1, 40 * STEPS))]
"""Numbers at which a term is priced."""
MOST_READ = 200_000


def _below(x: float) -> int:
    """Index of the grid point at or below a number of at least 0."""
    return bisect_right(GRID, x) - 1


def _between(low: Total, high: Total, share: float) -> Total:
    a, b, c, d, launches = low
    e, f, g, h, _ = high
    return Total(a + share * (e - a), b + share * (f - b), c + share * (g - c), d + share * (h - d), launches)


class TableRow:
    """A term over one number."""

    def __init__(
        self, price: Callable[[float], Total], captured: Callable[[float], Total] | None = None
    ) -> None:
        """`price`: the term itself; `captured`: the same in a graph, where it differs."""
        self._price, self._captured = price, captured or price
        self.points: dict[int, Total] = {}
        self._read: dict[float, Total] = {}
        self.exact_points: dict[float, Total] = {}

    def at(self, x: float) -> Total:
        """The term at a number of at least 0."""
        found = self._read.get(x)
        if found is None:
            if len(self._read) >= MOST_READ:
                self._read.clear()
            at = _below(x)
            found, low = self._point(at), GRID[at]
            if x > low:
                found = _between(found, self._point(at + 1), (x - low) / (GRID[at + 1] - low))
            self._read[x] = found
        return found

    def exact(self, x: float) -> Total:
        """The term in a graph of so many rows, priced once."""
        found = self.exact_points.get(x)
        if found is None:
            found = self.exact_points[x] = self._captured(x)
        return found

    def _point(self, at: int) -> Total:
        found = self.points.get(at)
        if found is None:
            found = self.points[at] = self._price(GRID[at])
        return found


class TableReading(NamedTuple):
    """Seconds of a term, what they grow by as the second number grows by 1, and how far that law holds."""

    seconds: float
    growth: float
    room: float


class Plane:
    """A term over two numbers."""

    def __init__(self, price: Callable[[float, float], Total]) -> None:
        """`price`: the term itself."""
        self._price = price
        self.points: dict[tuple[int, int], Total] = {}

    def at(self, x: float, y: float) -> Total:
        """The term at two numbers of at least 1."""
        i, j = _below(x), _below(y)
        up = (y - GRID[j]) / (GRID[j + 1] - GRID[j])
        found = self._point(i, j)
        if up:
            found = _between(found, self._point(i, j + 1), up)
        if x > GRID[i]:
            other = _between(self._point(i + 1, j), self._point(i + 1, j + 1), up)
            found = _between(found, other, (x - GRID[i]) / (GRID[i + 1] - GRID[i]))
        return found

    def read(self, x: float, y: float) -> TableReading:
        """The seconds alone, with their growth."""
        i, j, points = _below(x), _below(y), self.points
        low, high = GRID[j], GRID[j + 1]
        try:
            here, there = points[i, j][0], points[i, j + 1][0]
        except KeyError:
            here, there = self._point(i, j)[0], self._point(i, j + 1)[0]
        left = GRID[i]
        if x > left:
            share = (x - left) / (GRID[i + 1] - left)
            try:
                further, furthest = points[i + 1, j][0], points[i + 1, j + 1][0]
            except KeyError:
                further, furthest = self._point(i + 1, j)[0], self._point(i + 1, j + 1)[0]
            here += share * (further - here)
            there += share * (furthest - there)
        growth = (there - here) / (high - low)
        return TableReading(here + (y - low) * growth, growth, high - y)

    def _point(self, i: int, j: int) -> Total:
        found = self.points.get((i, j))
        if found is None:
            found = self.points[i, j] = self._price(GRID[i], GRID[j])
        return found
