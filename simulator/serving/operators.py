"""Operators of one step of an inference engine on one GPU, by kind of layer.

The list is that of fused engines (vLLM, SGLang, TensorRT-LLM): norms add the residual, one GEMM forms
queries, keys and values, activations are one kernel that quantises too, experts are two grouped GEMMs.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import BF16, FP32, gemm, move, norm
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.serving import Format
from moesim.simulator.serving.attention import attention_operators, cache_row_bytes
from moesim.simulator.serving.linear import ACTIVATION_BYTES, Split, StepRows, linear, product

__all__ = [
    "ExpertLoad",
    "LayerSection",
    "Split",
    "StepRows",
    "cache_bytes_per_token",
    "draft_operators",
    "step_operators",
]

Part = Literal["attention", "dense", "router", "shared", "experts", "head"]
"""Parts of a layer; `router` ends before a dispatch, and `experts` run until the combine."""


class LayerSection(NamedTuple):
    """Operators that run one after the other in each of `layers` equal layers."""

    layer: str
    part: Part
    layers: int
    operators: tuple[Operator, ...]


def cache_bytes_per_token(shape: ModelShape, split: Split) -> float:
    """Bytes of keys and values of one token in all layers on one rank."""
    return sum(cache_row_bytes(layer.attention, split) for layer in shape.layers)


# -- load of the experts -----------------------------------------------------------------------------


class ExpertLoad(NamedTuple):
    """What reaches the priced rank: rows of its experts, and experts that have any.

    `tokens`: of all ranks together. `received`: distinct tokens behind the rows.
    """

    tokens: float
    rows: float
    active: float
    received: float

    @classmethod
    def of(cls, moe: MoE | None, split: Split, tokens: float, alpha: float = 0.0) -> ExpertLoad:
        """The load of `tokens` tokens of the whole group: the mean rank's.

        With `alpha`, exponent of a power law of the experts' loads, the most loaded rank's (eq. Q3).
        """
        if moe is None:
            return cls(tokens, 0.0, 0.0, 0.0)
        local = (moe.experts + split.redundant_experts) / split.ep
        chosen = tokens * moe.routed_rows
        if alpha and tokens:
            rows, active = most_loaded(moe.experts, moe.top_k, split.ep, tokens, alpha)
        else:
            rows = chosen / split.ep
            active = local * (1.0 - (1.0 - min(moe.top_k / moe.experts, 1.0)) ** tokens)
        missed = 1.0 - min(moe.top_k / moe.experts, 1.0)
        received = tokens * (1.0 - missed ** (moe.experts * rows / chosen)) if chosen else 0.0
        return cls(tokens, rows, active, received)


DRAWS = 48
"""Draws of a power law behind a mean."""


@lru_cache(maxsize=4096)
def most_loaded(experts: int, top_k: int, ranks: int, tokens: float, alpha: float) -> tuple[float, float]:
    """Mean rows, and experts with rows, of the most loaded of `ranks` ranks (eq. Q3).

    Loads follow a power law between 1 and 0.8 of the tokens (0.01 and 2 for few tokens), as in the tables of
    ai-dynamo/aiconfigurator@095f58a (`collector/helper.py`); the seed is fixed.
    """
    rng = np.random.default_rng(20261126)
    least, most = (1.0, max(0.8 * tokens, 1.001)) if tokens * top_k > experts else (0.01, 2.0)
    power = 1.0 - alpha
    u = rng.random((DRAWS, experts))
    loads = ((most**power - least**power) * u + least**power) ** (1.0 / power)
    loads = np.minimum(loads / loads.sum(1, keepdims=True) * tokens * top_k, tokens)
    by_rank = loads.reshape(DRAWS, ranks, experts // ranks)
    worst = by_rank[np.arange(DRAWS), by_rank.sum(2).argmax(1)]
    return float(worst.sum(1).mean()), float((worst >= 0.5).sum(1).mean())


# -- feed-forward ------------------------------------------------------------------------------------


def dense(width: float, gated: bool, hidden: int, t: float, fmt: Format, name: str = "ffn") -> list[Operator]:
    """A dense FFN or shared experts: two GEMMs and an activation that quantises its output."""
    if not t:
        return []
    columns = width * (2 if gated else 1)
    written = t * width * ACTIVATION_BYTES[fmt]
    act = move(f"{name}.act", "swiglu", "F", t * columns * BF16, written)
    up = linear(f"{name}.gate_up", t, columns, hidden, fmt)
    return [*up, act, *linear(f"{name}.down", t, hidden, width, fmt, cast=False)]


def router(moe: MoE, hidden: int, t: float) -> list[Operator]:
    """Scores of all experts and the choice, which one kernel makes."""
    if not t:
        return []
    written = t * moe.top_k * 2 * FP32
    return [
        gemm("gate", "F", t, moe.scored, hidden, "bf16", cls="gate_gemm"),
        move("topk", "topk", "F", t * moe.scored * FP32, written, variant="fused"),
    ]


PADDED = {"marlin": (128, 256), "triton": (64, 1)}
"""Multiples to which an expert's width and rows are padded (vllm 0.20.2 fused_moe/oracle/mxfp4.py)."""


def experts(moe: MoE, hidden: int, load: ExpertLoad, split: Split, decode: bool) -> list[Operator]:
    """The routed experts of one rank, after its tokens arrived and before they go back.

    DeepGEMM's masked kernels (`decode`) take rows where the low-latency dispatch put them; its contiguous
    ones need a scatter into the order of the experts and a gather. Fused kernels and Marlin read rows through
    an index, and a kernel sums a token's rows; OpenAI's Triton kernels activate in the first product.
    """
    if not load.rows:
        return []
    fmt, r = split.experts, load.rows
    multiples = PADDED.get(split.kernels, (1, 1))
    sizes = moe.expert_ffn / split.expert_tp, float(moe.row_width(hidden))
    width, row = (ceil(s / by) * by if by > 1 else s for s, by in zip(sizes, multiples, strict=True))
    columns, groups = width * moe.branches, max(round(load.active), 1)
    family = split.kernels if split.kernels != "deepgemm" else "masked" if decode else "contiguous"
    few = load.tokens <= (moe.experts + split.redundant_experts) / split.ep  # vLLM's tiles depend on it
    variant = f"{family}-{fmt}" if family != "fused" else f"fused-{'few' if few else 'many'}-{fmt}"
    in_bytes, act = ACTIVATION_BYTES[fmt], r * width * ACTIVATION_BYTES[fmt]
    up = product("experts.gate_up", r, columns, row, fmt, cls="grouped_gemm", groups=groups, variant=variant)
    down = product("experts.down", r, row, width, fmt, cls="grouped_gemm", groups=groups, variant=variant)
    middle = move("experts.act", "swiglu", "F", r * columns * BF16, act, variant=family)
    if family == "masked":
        return [up, middle, down]
    tokens = load.received
    if family == "contiguous":
        scatter = move(
            "experts.scatter", "permute", "F", tokens * row * in_bytes, r * row * in_bytes, variant="scatter"
        )
        gather = move("experts.gather", "permute", "F", r * row * BF16, tokens * row * BF16, variant="gather")
        return [scatter, up, middle, down, gather]
    sort = "routing" if family == "triton" else "align"
    add = {"triton": "reduce", "marlin": "sum-marlin"}.get(family, "sum")
    align = move("experts.align", "permute", "F", r * FP32, r * FP32, variant=sort)
    total = move("experts.sum", "permute", "F", r * row * BF16, tokens * row * BF16, variant=add)
    if family == "triton":
        return [align, up, down, total]
    cast = linear("experts.quantise", tokens, 1.0, row, fmt)[:-1]
    return [align, *cast, up, middle, down, total]


def hyper(hidden: int, t: float, streams: int, half: str) -> tuple[list[Operator], list[Operator]]:
    """Kernels that mix several residual streams into a half's input, and that spread its output over them.

    Hyper-connections of DeepSeek-V4: the streams are read once to mix them, and read and written to add the
    output.
    """
    if streams == 1 or not t:
        return [], []
    one = t * hidden * BF16
    mix = move(f"{half}.mix", "elementwise", "F", streams * one, one, variant="mix")
    spread = move(f"{half}.spread", "elementwise", "F", (streams + 1) * one, streams * one, variant="spread")
    return [mix], [spread]


def norms(hidden: int, t: float, *names: str) -> list[Operator]:
    """Norms that add the residual, by default those before both halves of a layer."""
    return (
        [norm(name, "F", t, hidden, residual=True) for name in names or ("attn_norm", "ffn_norm")]
        if t
        else []
    )


# -- a step ------------------------------------------------------------------------------------------


def layer_operators(
    shape: ModelShape, index: int, rows: StepRows, split: Split, load: ExpertLoad
) -> tuple[tuple[Part, tuple[Operator, ...]], ...]:
    """Operators of one layer in the order in which they run, by part."""
    layer, hidden, t = shape.layers[index], shape.hidden, rows.tokens
    streams = shape.residual_streams
    mixed, spread = hyper(hidden, t, streams, "attn")
    attention = [*mixed, *norms(hidden, t, "attn_norm")]
    attention += [*attention_operators(layer.attention, hidden, rows, split), *spread]
    mixed, spread = hyper(hidden, t, streams, "ffn")
    before = [*mixed, *norms(hidden, t, "ffn_norm")]
    ffn = layer.feed_forward
    if isinstance(ffn, DenseFFN):
        after = dense(ffn.width / split.tp, ffn.gated, hidden, t, split.weights)
        return ("attention", tuple(attention)), ("dense", (*before, *after, *spread))
    if not isinstance(ffn, MoE):
        return (("attention", tuple(attention)),)
    shares = split.shared_tp or split.tp
    width, all_t = ffn.shared_width / shares, t * max(shares / split.tp, 1.0)
    shared = dense(width, ffn.expert_gated, hidden, all_t, split.weights, "shared") if width else []
    routed = experts(ffn, hidden, load, split, decode=rows.prefills == 0.0)
    return (
        ("attention", tuple(attention)),
        ("router", (*before, *router(ffn, hidden, t), *spread)),
        ("shared", tuple(shared)),
        ("experts", tuple(routed)),
    )


def head(shape: ModelShape, rows: StepRows, split: Split) -> tuple[Operator, ...]:
    """Embedding, final norm, logits of the sequences that get a token, and sampling."""
    n, columns = rows.sequences, shape.vocab / split.tp
    size = rows.tokens * shape.hidden * BF16
    first = [move("embedding", "embedding", "F", size, size)] if rows.tokens else []
    return (
        *first,
        *norms(shape.hidden, rows.tokens, "final_norm"),
        *([product("logits", n, columns, shape.hidden, "bf16")] if n else []),
        *(
            [move("sample", "elementwise", "F", n * shape.vocab * FP32, n * FP32, variant="add", launches=4)]
            if n
            else []
        ),
    )


def step_operators(
    shape: ModelShape, rows: StepRows, split: Split, load: ExpertLoad
) -> tuple[LayerSection, ...]:
    """Operators of a step on one rank: each kind of layer once with its count, then the head.

    Raises InputError for kinds of attention that serving does not know.
    """
    kinds: dict[tuple[object, object], list[int]] = {}
    for index, layer in enumerate(shape.layers):
        kinds.setdefault((layer.attention, layer.feed_forward), []).append(index)
    out = [
        LayerSection(shape.layer_kinds[same[0]], part, len(same), operators)
        for same in kinds.values()
        for part, operators in layer_operators(shape, same[0], rows, split, load)
        if operators
    ]
    return (*out, LayerSection("head", "head", 1, head(shape, rows, split)))


def draft_operators(
    shape: ModelShape, rows: StepRows, split: Split, load: ExpertLoad
) -> tuple[LayerSection, ...]:
    """Operators that draft one token a sequence with a multi-token-prediction layer.

    It projects hidden state and embedding, and runs a layer as the last of the model and the shared head.
    """
    t, hidden = rows.tokens, shape.hidden
    joint = [
        norm("draft.norms", "F", 2 * t, hidden),
        *linear("draft.projection", t, hidden, 2 * hidden, split.weights),
    ]
    last = layer_operators(shape, len(shape.layers) - 1, rows, split, load)
    (first, attention), *others = last
    return (
        LayerSection("draft", first, 1, (*joint, *attention)),
        *(LayerSection("draft", part, 1, operators) for part, operators in others if operators),
        LayerSection("draft", "head", 1, head(shape, rows, split)),
    )
