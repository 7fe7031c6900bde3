"""Operators of PyTorch's eager mode in the blocks of a model, with the tensors that each allocates and saves.

The order and the variables are those of torchtitan 0.2.2 (`models/llama3`, `models/deepseek_v3`, `models/moe`,
`distributed/expert_parallel.py`); what an operator saves is what torch 2.11's `derivatives.yaml` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moesim.simulator.layout.eager_tape import INPUT, EagerOp
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape

NARROW, WIDE, INDEX = 2, 4, 8
"""Bytes of an element in BF16, in FP32, and of an index."""
EXPERTS = "experts"
"""Unit of the routed experts."""
PADDED_ROWS = 8
"""Rows by which the rows of an expert are padded at most (`TOKEN_GROUP_ALIGN_SIZE_M`)."""


@dataclass
class _Block:
    """Collects the operators of a block and counts its GEMMs."""

    tokens: float
    hidden: int
    ops: list[EagerOp] = field(default_factory=list)
    gemms: int = 0
    unit: str = ""

    def add(
        self, output: str, inputs: tuple[str, ...], elements: float, size: int = NARROW, **more: object
    ) -> str:
        """Append an operator whose output has `elements` of `size` bytes."""
        op = EagerOp(output, inputs, elements * size, unit=self.unit)
        self.ops.append(replace(op, **more))  # type: ignore[arg-type]
        return output

    def linear(
        self,
        output: str,
        source: str,
        rows: float,
        columns_in: float,
        columns_out: float,
        counted: bool = True,
    ) -> str:
        """Append a GEMM with a weight; selective policies keep the first, third, ... of those counted."""
        self.gemms += counted
        return self.add(
            output,
            (source,),
            rows * columns_out,
            saves=(source,),
            gradients=((source, NARROW * rows * columns_in),),
            weights=(NARROW * columns_in * columns_out,),
            kept=counted and self.gemms % 2 == 1,
        )

    def norm(self, output: str, source: str, rows: float, width: int) -> str:
        """Append a fused RMSNorm, which saves its input and one FP32 number a row."""
        return self.add(
            output,
            (source,),
            rows * width,
            saves=(source,),
            gradients=((source, NARROW * rows * width),),
            weights=(NARROW * width,),
            extra_bytes=WIDE * rows,
        )

    def convert(self, output: str, source: str, elements: float, to: int, until: str = "") -> str:
        """Append a cast to elements of `to` bytes."""
        back = NARROW + WIDE - to
        return self.add(output, (source,), elements, to, gradients=((source, back * elements),), until=until)

    def rotate(self, name: str, source: str, elements: float, until: str) -> None:
        """Append the cast to FP32 and the complex product of a rotation, both held up to `until`."""
        self.convert(f"{name} wide", source, elements, WIDE, until)
        wide = WIDE * elements
        self.add(
            f"{name} turned",
            (f"{name} wide",),
            elements,
            WIDE,
            gradients=((f"{name} wide", wide),),
            until=until,
        )

    def residual(self, output: str, source: str, other: str) -> str:
        """Append the sum of the residual stream and the output of a half."""
        return self.add(
            output, (source, other), self.tokens * self.hidden, gradients=((source, 0.0), (other, 0.0))
        )


def eager_block(shape: ModelShape, block: BlockShape, tokens: float, ep: int) -> tuple[EagerOp, ...] | None:
    """Operators of one block for a micro-batch of `tokens` tokens; None for blocks that are not described.

    Described are embedding, head with its loss in FP32, and layers of grouped-query or latent attention with a
    gated FFN or routed experts. Experts receive as many rows as are sent.
    """
    out = _Block(tokens, shape.hidden)
    if block.is_embedding:
        table = (float(NARROW * shape.vocab * shape.hidden),)
        out.add("y", (INPUT,), tokens * shape.hidden, weights=table, extra_bytes=512)
        return tuple(out.ops)
    if block.is_head:
        _head(out, shape)
        return tuple(out.ops)
    layer = block.layer
    if layer is None or block.is_mtp or layer.streams > 1 or layer.sandwich_norms or layer.halves < 2:
        return None
    attention, feed_forward = layer.attention, layer.feed_forward
    out.norm("attention input", INPUT, tokens, shape.hidden)
    if isinstance(attention, GroupedQueryAttention):
        if attention.features - {attention.kind} or not attention.rotary:
            return None
        _grouped_query(out, attention)
    elif isinstance(attention, MLA):
        if attention.features != {"mla"}:
            return None
        _latent(out, attention)
    else:
        return None
    out.residual("h", INPUT, "attention output")
    out.norm("ffn input", "h", tokens, shape.hidden)
    if isinstance(feed_forward, DenseFFN) and feed_forward.gated:
        _ffn(out, "", feed_forward.width, "ffn output")
    elif isinstance(feed_forward, MoE) and feed_forward.expert_gated and feed_forward.latent is None:
        _moe(out, feed_forward, ep)
    else:
        return None
    out.residual("y", "h", "ffn output")
    return tuple(out.ops)


def _head(out: _Block, shape: ModelShape) -> None:
    """Final norm and output projection."""
    out.norm("normalised", INPUT, out.tokens, shape.hidden)
    out.linear("logits", "normalised", out.tokens, shape.hidden, shape.vocab)


def eager_loss(vocabulary: int, tokens: float, compiled: bool = False) -> tuple[EagerOp, ...]:
    """Operators of the loss, which no module of the model contains: cross-entropy of logits cast to FP32.

    `compiled` by `torch.compile` it keeps the 16-bit logits alone and writes their gradient at once.
    """
    out, logits = _Block(tokens, vocabulary), tokens * vocabulary
    if compiled:
        narrow = NARROW * logits
        out.add(
            "loss", (INPUT,), 1, WIDE, saves=(INPUT,), gradients=((INPUT, narrow),), extra_bytes=WIDE * tokens
        )
        return tuple(out.ops)
    out.convert("wide logits", INPUT, logits, WIDE)
    wide = WIDE * logits
    out.add(
        "log-softmax",
        ("wide logits",),
        logits,
        WIDE,
        saves=("log-softmax",),
        gradients=(("wide logits", wide),),
    )
    out.add("loss", ("log-softmax",), 1, WIDE, saves=("log-softmax",), gradients=(("log-softmax", wide),))
    return tuple(out.ops)


def _core(
    out: _Block, q: tuple[str, float], k: tuple[str, float], v: tuple[str, float], heads: int, o: float
) -> None:
    """Append the core attention, which saves its inputs, its output and a log-sum-exp."""
    out.add(
        "attended",
        (q[0], k[0], v[0]),
        out.tokens * o,
        saves=(q[0], k[0], v[0], "attended"),
        gradients=tuple((name, NARROW * out.tokens * width) for name, width in (q, k, v)),
        extra_bytes=WIDE * out.tokens * heads,
        kept=True,
    )


def _grouped_query(out: _Block, attention: GroupedQueryAttention) -> None:
    heads, kv_heads, qk, value = attention.sizes
    t, h = out.tokens, out.hidden
    out.linear("q", "attention input", t, h, heads * qk)
    out.linear("k", "attention input", t, h, kv_heads * qk)
    out.linear("v", "attention input", t, h, kv_heads * value)
    sizes = {"q": t * heads * qk, "k": t * kv_heads * qk}
    for name in sizes:
        if attention.qk_norm:
            out.norm(f"{name} normalised", name, sizes[name] / qk, qk)
    source = {name: f"{name} normalised" if attention.qk_norm else name for name in sizes}
    for name, elements in sizes.items():
        out.convert(f"{name} wide", source[name], elements, WIDE, "k rotated")
    for name, elements in sizes.items():
        wide = WIDE * elements
        out.add(
            f"{name} turned",
            (f"{name} wide",),
            elements,
            WIDE,
            gradients=((f"{name} wide", wide),),
            until="k rotated",
        )
    for name, elements in sizes.items():
        out.convert(f"{name} rotated", f"{name} turned", elements, NARROW)
    _core(
        out,
        ("q rotated", heads * qk),
        ("k rotated", kv_heads * qk),
        ("v", kv_heads * value),
        heads,
        heads * value,
    )
    out.linear("attention output", "attended", t, heads * value, h)


def _latent(out: _Block, attention: MLA) -> None:
    t, h, heads = out.tokens, out.hidden, attention.heads
    nope, rope, value, latent = (
        attention.qk_nope_dim,
        attention.qk_rope_dim,
        attention.v_dim,
        attention.kv_lora_rank,
    )
    qk = nope + rope
    if attention.q_lora_rank:
        out.linear("q latent", "attention input", t, h, attention.q_lora_rank)
        out.norm("q latent normalised", "q latent", t, attention.q_lora_rank)
        out.linear("q", "q latent normalised", t, attention.q_lora_rank, heads * qk)
    else:
        out.linear("q", "attention input", t, h, heads * qk)
    out.rotate("q", "q", t * heads * rope, "q rotated")
    out.convert("q rotated", "q turned", t * heads * rope, NARROW)
    out.add(
        "q joined",
        ("q", "q rotated"),
        t * heads * qk,
        gradients=(("q", NARROW * t * heads * qk), ("q rotated", 0.0)),
    )
    out.linear("kv latent", "attention input", t, h, latent + rope)
    out.rotate("k", "kv latent", t * rope, "k rotated")
    out.convert("k rotated", "k turned", t * rope, NARROW)
    out.norm("kv latent normalised", "kv latent", t, latent)
    out.linear("kv", "kv latent normalised", t, latent, heads * (nope + value))
    both = NARROW * t * heads * (nope + value)
    out.add(
        "k joined",
        ("kv", "k rotated"),
        t * heads * qk,
        gradients=(("kv", both), ("k rotated", NARROW * t * rope)),
    )
    _core(
        out, ("q joined", heads * qk), ("k joined", heads * qk), ("kv", heads * value), heads, heads * value
    )
    out.linear("attention output", "attended", t, heads * value, h)


def _ffn(out: _Block, name: str, width: int, output: str) -> None:
    t, h, source = out.tokens, out.hidden, "ffn input"
    out.linear(f"{name}gate", source, t, h, width)
    _activation(out, name, t * width, lambda: out.linear(f"{name}up", source, t, h, width))
    out.linear(output, f"{name}product", t, width, h)


def _activation(out: _Block, name: str, elements: float, up: object) -> None:
    """Append the SiLU of the gate, the up projection, and their product."""
    assert callable(up)
    size = NARROW * elements
    out.add(
        f"{name}silu", (f"{name}gate",), elements, saves=(f"{name}gate",), gradients=((f"{name}gate", size),)
    )
    up()
    inputs = (f"{name}silu", f"{name}up")
    out.add(f"{name}product", inputs, elements, saves=inputs, gradients=tuple((i, size) for i in inputs))


def _grouped(
    out: _Block, output: str, source: str, rows: float, sizes: tuple[int, int], experts: float
) -> str:
    columns_in, columns_out = sizes
    return out.add(
        output,
        (source,),
        rows * columns_out,
        saves=(source,),
        gradients=((source, NARROW * rows * columns_in),),
        weights=(NARROW * experts * columns_in * columns_out,),
    )


def _moe(out: _Block, moe: MoE, ep: int) -> None:
    t, h, k = out.tokens, out.hidden, moe.top_k
    rows, here = t * k, moe.experts // ep
    padded = rows + PADDED_ROWS * here
    sent = NARROW * rows * h
    source = "ffn input"
    # torchtitan's default of `per_op_sac_force_recompute_mm_shapes_by_fqns` names the router.
    out.linear("router", source, t, h, moe.experts, counted=False)
    out.convert("router wide", "router", t * moe.experts, WIDE)
    scores = WIDE * t * moe.experts
    out.add(
        "scores",
        ("router wide",),
        t * moe.experts,
        WIDE,
        saves=("scores",),
        gradients=(("router wide", scores),),
    )
    out.add("weights", ("scores",), rows, WIDE, gradients=(("scores", scores),), extra_bytes=2 * INDEX * rows)
    out.add("order", ("weights",), rows, INDEX, until="unsorted")
    out.add("gathered", (source, "order"), rows * h, saves=("order",), gradients=((source, NARROW * t * h),))
    out.unit = EXPERTS
    out.add("received", ("gathered",), rows * h, gradients=(("gathered", sent),), kept=True)
    out.add("longer", ("received",), (rows + 1) * h, gradients=(("received", 0.0),))
    out.add(
        "grouped",
        ("longer",),
        padded * h,
        gradients=(("longer", NARROW * (rows + 1) * h),),
        extra_bytes=INDEX * padded,
    )
    f = moe.expert_ffn
    _grouped(out, "routed gate", "grouped", padded, (h, f), here)
    _activation(
        out, "routed ", padded * f, lambda: _grouped(out, "routed up", "grouped", padded, (h, f), here)
    )
    _grouped(out, "routed down", "routed product", padded, (f, h), here)
    out.ops[-1] = replace(out.ops[-1], until="home")
    out.add("scattered", ("routed down",), (rows + 1) * h, gradients=(("routed down", NARROW * padded * h),))
    out.add(
        "home",
        ("scattered",),
        rows * h,
        gradients=(("scattered", NARROW * (rows + 1) * h),),
        kept=True,
        until="ffn output",
    )
    out.unit = ""
    shared = moe.shared_width
    if shared:
        _ffn(out, "shared ", shared, "shared output")
    out.add("unsorted", ("home", "order"), rows * h, gradients=(("home", sent),))
    out.convert("unsorted wide", "unsorted", rows * h, WIDE)
    out.add(
        "summed wide",
        ("weights", "unsorted wide"),
        t * h,
        WIDE,
        saves=("weights", "unsorted wide"),
        gradients=(("weights", WIDE * rows), ("unsorted wide", WIDE * rows * h)),
    )
    if not shared:
        out.convert("ffn output", "summed wide", t * h, NARROW)
        return
    out.convert("summed", "summed wide", t * h, NARROW)
    out.residual("ffn output", "shared output", "summed")
