"""Allocations of PyTorch's eager operators and autograd, by block, as events of the allocator (eq. M41)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from moesim.simulator.memory.allocator import Event
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape

# A block is a list of `EagerOp` in the order of its forward. The backward runs the same list from its
# end, as autograd does: an operator allocates the gradients of its inputs, then its saved tensors and
# the gradient of its output are freed.

INPUT = "x"
"""Name of a block's input."""
Saving = Literal["none", "all", "some"]
"""What a forward leaves: nothing but the block's input, all that the backward needs, or the outputs of the
operators that a selective policy keeps."""


class EagerOp(Struct, frozen=True):
    """One operator: it reads `inputs` and writes `output`; both are names of tensors of its block."""

    output: str
    inputs: tuple[str, ...]
    size_bytes: float
    """Bytes of the output; 0 for a view of the first input."""
    saves: tuple[str, ...] = ()
    """Tensors that the backward needs: inputs or the output."""
    gradients: tuple[tuple[str, float], ...] = ()
    """Inputs that get a gradient, with its bytes; 0 where the gradient of the output is passed on."""
    weights: tuple[float, ...] = ()
    """Bytes of the gradients of its weights."""
    kept: bool = False
    """Whether a policy that keeps outputs of single operators keeps this one."""
    extra_bytes: float = 0.0
    """A second output that only the backward needs, such as a log-sum-exp."""
    until: str = ""
    """Operator, named by its output, up to which a variable in Python holds this output; none: its last
    use."""
    unit: str = ""
    """Part of the block whose parameters are sharded on their own; none: those of the block."""


class Tensor(Struct):
    """A tensor in memory and the number of its holders."""

    number: int
    holders: int = 1


class Tape(Struct):
    """Collects the events of a process."""

    events: list[Event] = field(default_factory=list)
    count: int = 0

    def new(self, size_bytes: float, stream: int = 0) -> Tensor | None:
        """Allocate a tensor; None for no bytes."""
        if size_bytes <= 0:
            return None
        self.count += 1
        self.events.append(Event("allocate", self.count, int(size_bytes), stream))
        return Tensor(self.count)

    def hold(self, tensor: Tensor | None) -> Tensor | None:
        """Add a holder."""
        if tensor is not None:
            tensor.holders += 1
        return tensor

    def drop(self, tensor: Tensor | None) -> None:
        """Remove a holder, and the tensor with its last one."""
        if tensor is not None:
            tensor.holders -= 1
            if not tensor.holders:
                self.events.append(Event("free", tensor.number))

    def drop_all(self, tensors: list[Tensor | None]) -> None:
        """Remove one holder of each, and empty the list."""
        for tensor in tensors:
            self.drop(tensor)
        tensors.clear()


Held: TypeAlias = dict[int, list[Tensor | None]]
"""Tensors that the operators of a block hold, by the place of the operator."""
UnitHook: TypeAlias = Callable[[str, list[Tensor | None]], None]
"""Called with the name of a unit inside a block, such as its experts, where it begins or ends; at the end of
its backward with the gradients of its weights."""


class BlockFrame(Struct):
    """What one micro-batch of a block holds between its forward and its backward."""

    block_input: Tensor | None
    saved: Held
    kept: Held
    """Outputs that a selective policy keeps, each with a second output."""
    complete: bool


def run_forward(
    tape: Tape,
    ops: Sequence[EagerOp],
    x: Tensor | None,
    saving: Saving,
    enter: UnitHook,
    leave: UnitHook,
) -> tuple[Tensor | None, BlockFrame]:
    """Run a block forward: its output, held once, and its frame; the caller keeps its hold of `x`."""
    frame = BlockFrame(None if saving == "all" else tape.hold(x), {}, {}, saving == "all")
    output = _forward(tape, ops, x, saving, frame, (enter, leave))
    return output, frame


def _forward(
    tape: Tape,
    ops: Sequence[EagerOp],
    x: Tensor | None,
    saving: Saving,
    frame: BlockFrame,
    hooks: tuple[UnitHook, UnitHook],
    again: bool = False,
) -> Tensor | None:
    """Allocate and free what the operators do; `again` stops where the backward has all that it needs."""
    values: dict[str, Tensor | None] = {INPUT: tape.hold(x)}
    ends = _ends_of_variables(ops)
    stop = len(ops)
    if again:  # the last operator that saves anything
        stop = max(place for place, op in enumerate(ops) if op.saves or op.extra_bytes)
    unit = ""
    for place, op in enumerate(ops):
        if op.unit != unit:
            hooks[bool(unit)](unit or op.unit, [])
            unit = op.unit
        if place == stop and not op.extra_bytes and op.output not in op.saves:
            frame.saved[place] = [tape.hold(values[name]) for name in op.saves]
            break
        kept = frame.kept.pop(place, None) if again else None
        if kept is not None:
            out, extra = kept
        elif op.size_bytes <= 0:
            out, extra = tape.hold(values[op.inputs[0]]), None
        else:
            out, extra = tape.new(op.size_bytes), tape.new(op.extra_bytes)
        values[op.output] = out
        if saving == "all":
            frame.saved[place] = [*(tape.hold(values[name]) for name in op.saves), tape.hold(extra)]
        elif saving == "some" and op.kept:
            frame.kept[place] = [tape.hold(out), tape.hold(extra)]
        tape.drop(extra)
        for name in ends.get(place, ()):
            tape.drop(values.pop(name))
        if place == stop:
            break
    if unit:
        hooks[1](unit, [])
    output = None if again else values.pop(ops[-1].output)
    tape.drop_all(list(values.values()))
    return output


def run_backward(
    tape: Tape,
    ops: Sequence[EagerOp],
    frame: BlockFrame,
    gradient: Tensor | None,
    enter: UnitHook,
    leave: UnitHook,
    weights_later: bool = False,
) -> tuple[Tensor | None, list[Tensor | None], Held]:
    """Run a block backward: the gradient of its input, those of its own weights, and what waits for W.

    `gradient` is taken over. A frame that is not complete runs its forward again first. With `weights_later`
    all that was saved stays, with the gradients of the outputs of operators that have weights.
    """
    again = None if frame.complete else frame.block_input
    if not frame.complete:
        _forward(tape, ops, again, "all", frame, (enter, _nothing), again=True)
        if not weights_later:
            tape.drop(again)
    gradients: dict[str, Tensor | None] = {ops[-1].output: gradient}
    weights: list[Tensor | None] = []
    of_unit: list[Tensor | None] = []
    waiting: Held = {}
    unit = ""
    for place in range(len(ops) - 1, -1, -1):
        op = ops[place]
        if op.unit != unit:
            (leave if unit else enter)(unit or op.unit, of_unit)
            of_unit, unit = [], op.unit
        incoming = gradients.pop(op.output, None)
        saved = frame.saved.pop(place, [])
        if incoming is not None:
            for name, size in op.gradients:
                part = tape.new(size) if size else tape.hold(incoming)
                total = gradients.get(name)
                if (
                    total is not None and part is not None
                ):  # autograd adds into the one that nobody else holds
                    total, part = (part, total) if total.holders > 1 else (total, part)
                    tape.drop(part)
                gradients[name] = part if total is None else total
            if not weights_later:
                (of_unit if unit else weights).extend(tape.new(size) for size in op.weights)
        if weights_later:
            waiting[place] = [*(saved if again is None else ()), tape.hold(incoming) if op.weights else None]
        if not weights_later or again is not None:
            tape.drop_all(saved)
        tape.drop(incoming)
    for leftover in frame.kept.values():
        tape.drop_all(leftover)
    if weights_later and not frame.complete:
        waiting[-1] = [again]
    return gradients.pop(INPUT, None), weights, waiting


def run_weights(
    tape: Tape, ops: Sequence[EagerOp], waiting: Held
) -> tuple[list[Tensor | None], dict[str, list[Tensor | None]]]:
    """Compute the weight gradients that `run_backward` left for later: the block's own, and by unit.

    A block that is recomputed runs its forward once more, because W is another pass of autograd.
    """
    frame = BlockFrame(None, {}, {}, complete=True)
    for again in waiting.pop(-1, ()):
        _forward(tape, ops, again, "all", frame, (_nothing, _nothing), again=True)
        tape.drop(again)
    weights: list[Tensor | None] = []
    of_units: dict[str, list[Tensor | None]] = {}
    for place, tensors in waiting.items():
        unit = ops[place].unit
        target = of_units.setdefault(unit, []) if unit else weights
        target.extend(tape.new(size) for size in ops[place].weights)
        tape.drop_all(tensors)
        tape.drop_all(frame.saved.pop(place, []))
    return weights, of_units


def _nothing(unit: str, gradients: list[Tensor | None]) -> None:
    """Do nothing: a unit that runs again stays as it is."""


def _ends_of_variables(ops: Sequence[EagerOp]) -> dict[int, list[str]]:
    """Names of the tensors that no variable holds after an operator, by its place."""
    place_of = {op.output: place for place, op in enumerate(ops)}
    ends: dict[str, int] = {INPUT: 0}
    for place, op in enumerate(ops):
        ends[op.output] = max(place, place_of.get(op.until, place))
        for name in op.inputs:
            ends[name] = max(ends[name], place)
    del ends[ops[-1].output]
    names: dict[int, list[str]] = {}
    for name, place in ends.items():
        names.setdefault(place, []).append(name)
    return names


# -- eager blocks ------------------------------------------------------------------------------------
# Operators of PyTorch's eager mode in the blocks of a model, with the tensors that each allocates and
# saves.
#
# The order and the variables are those of torchtitan 0.2.2 (`models/llama3`, `models/deepseek_v3`,
# `models/moe`, `distributed/expert_parallel.py`); what an operator saves is what torch 2.11's
# `derivatives.yaml` says (docs/model.md, eq. M41).

NARROW, WIDE, INDEX = 2.0, 4.0, 8.0
"""Bytes of an element in BF16, in FP32, and of an index."""
EXPERTS = "experts"
"""Unit of the routed experts."""
PADDED_ROWS = 8
"""Rows by which the rows of an expert are padded at most (`TOKEN_GROUP_ALIGN_SIZE_M`)."""
STATE_BYTES = 512.0
"""A saved tensor of a few elements."""


class _BlockOps(Struct):
    """Collects the operators of a block and counts its GEMMs."""

    tokens: float
    hidden: int
    transfers_kept: bool = True
    ops: list[EagerOp] = field(default_factory=list)
    gemms: int = 0
    unit: str = ""

    def add(self, op: EagerOp) -> None:
        """Append an operator to the current unit."""
        self.ops.append(replace(op, unit=self.unit))

    def linear(
        self, output: str, source: str, columns_in: float, columns_out: float, counted: bool = True
    ) -> None:
        """Append a GEMM of all tokens; selective policies keep the first, third, ... of those counted."""
        self.gemms += counted
        self.add(
            EagerOp(
                output,
                (source,),
                NARROW * self.tokens * columns_out,
                saves=(source,),
                gradients=((source, NARROW * self.tokens * columns_in),),
                weights=(NARROW * columns_in * columns_out,),
                kept=counted and self.gemms % 2 == 1,
            )
        )

    def norm(self, output: str, source: str, rows: float, width: int) -> None:
        """Append a fused RMSNorm, which saves its input and one FP32 number a row."""
        size = NARROW * rows * width
        gradients = ((source, size),)
        weights = (NARROW * width,)
        self.add(EagerOp(output, (source,), size, (source,), gradients, weights, extra_bytes=WIDE * rows))

    def widen(self, output: str, source: str, elements: float, until: str = "") -> None:
        """Append a cast from BF16 to FP32."""
        gradients = ((source, NARROW * elements),)
        self.add(EagerOp(output, (source,), WIDE * elements, gradients=gradients, until=until))

    def narrow(self, output: str, source: str, elements: float) -> None:
        """Append a cast from FP32 to BF16."""
        self.add(EagerOp(output, (source,), NARROW * elements, gradients=((source, WIDE * elements),)))

    def turn(self, output: str, source: str, elements: float, until: str) -> None:
        """Append the complex product of a rotation, in FP32."""
        size = WIDE * elements
        self.add(EagerOp(output, (source,), size, gradients=((source, size),), until=until))

    def sum_of(self, output: str, first: str, second: str) -> None:
        """Append a sum of two tensors of hidden width, whose gradient is that of both."""
        size = NARROW * self.tokens * self.hidden
        self.add(EagerOp(output, (first, second), size, gradients=((first, 0.0), (second, 0.0))))


def eager_block(
    shape: ModelShape, block: BlockShape, tokens: float, ep: int, transfers_kept: bool = True
) -> tuple[EagerOp, ...] | None:
    """Operators of one block for a micro-batch of `tokens` tokens; None for blocks that are not described.

    Described are embedding, head, and layers of grouped-query or latent attention with a gated FFN or routed
    experts. Experts receive as many rows as are sent. `transfers_kept` says whether selective policies keep
    the results of dispatch and combine.
    """
    out = _BlockOps(tokens, shape.hidden, transfers_kept)
    if block.is_embedding:
        size, table = NARROW * tokens * shape.hidden, NARROW * shape.vocab * shape.hidden
        return (EagerOp("y", (INPUT,), size, weights=(table,), extra_bytes=STATE_BYTES),)
    if block.is_head:
        out.norm("normalised", INPUT, tokens, shape.hidden)
        out.linear("logits", "normalised", shape.hidden, shape.vocab)
        return tuple(out.ops)
    layer = block.layer
    if layer is None or block.is_mtp or layer.streams > 1 or layer.sandwich_norms or layer.halves < 2:
        return None
    out.norm("attention input", INPUT, tokens, shape.hidden)
    attention, feed_forward = layer.attention, layer.feed_forward
    if attention.features != {attention.kind}:
        return None
    if isinstance(attention, GroupedQueryAttention):
        _grouped_query(out, attention)
    elif isinstance(attention, MLA):
        _latent(out, attention)
    else:
        return None
    out.sum_of("h", INPUT, "attention output")
    out.norm("ffn input", "h", tokens, shape.hidden)
    if isinstance(feed_forward, DenseFFN) and feed_forward.gated:
        _ffn(out, "", feed_forward.width, "ffn output")
    elif isinstance(feed_forward, MoE) and feed_forward.expert_gated and feed_forward.latent is None:
        _moe(out, feed_forward, ep)
    else:
        return None
    out.sum_of("y", "h", "ffn output")
    return tuple(out.ops)


def eager_loss(vocabulary: int, tokens: float, compiled: bool = False) -> tuple[EagerOp, ...]:
    """Operators of the loss, which no module of the model contains: cross-entropy of logits cast to FP32.

    `compiled` by `torch.compile` it keeps the 16-bit logits alone and writes their gradient at once.
    """
    logits = tokens * vocabulary
    wide, gradient = WIDE * logits, ((INPUT, NARROW * logits),)
    if compiled:
        return (EagerOp("loss", (INPUT,), STATE_BYTES, (INPUT,), gradient, extra_bytes=2 * WIDE * tokens),)
    return (
        EagerOp("wide", (INPUT,), wide, gradients=gradient),
        EagerOp("log-softmax", ("wide",), wide, saves=("log-softmax",), gradients=(("wide", wide),)),
        EagerOp("loss", ("log-softmax",), STATE_BYTES, ("log-softmax",), (("log-softmax", wide),)),
    )


# -- attention ---------------------------------------------------------------------------------------------


def _core(out: _BlockOps, inputs: dict[str, float], heads: int, width: float) -> None:
    """Append the core attention, which saves its inputs, its output and a log-sum-exp.

    `inputs`: columns of the gradients of queries, keys and values.
    """
    t, names = out.tokens, tuple(inputs)
    out.add(
        EagerOp(
            "attended",
            names,
            NARROW * t * width,
            saves=(*names, "attended"),
            gradients=tuple((name, NARROW * t * columns) for name, columns in inputs.items()),
            kept=True,
            extra_bytes=WIDE * t * heads,
        )
    )
    out.linear("attention output", "attended", width, out.hidden)


def _grouped_query(out: _BlockOps, attention: GroupedQueryAttention) -> None:
    heads, kv_heads, qk, value = attention.sizes
    columns = {"q": heads * qk, "k": kv_heads * qk}
    for name in columns:
        out.linear(name, "attention input", out.hidden, columns[name])
    out.linear("v", "attention input", out.hidden, kv_heads * value)
    source = {name: name for name in columns}
    if attention.qk_norm:
        source = {name: f"{name} normalised" for name in columns}
        for name in columns:
            out.norm(source[name], name, out.tokens * columns[name] / qk, qk)
    for name in columns:
        out.widen(f"{name} wide", source[name], out.tokens * columns[name], "k rotated")
    for name in columns:
        out.turn(f"{name} turned", f"{name} wide", out.tokens * columns[name], "k rotated")
    for name in columns:
        out.narrow(f"{name} rotated", f"{name} turned", out.tokens * columns[name])
    inputs = {f"{name} rotated": float(n) for name, n in columns.items()} | {"v": float(kv_heads * value)}
    _core(out, inputs, heads, heads * value)


def _latent(out: _BlockOps, attention: MLA) -> None:
    t, heads, nope = out.tokens, attention.heads, attention.qk_nope_dim
    rope, value, latent = attention.qk_rope_dim, attention.v_dim, attention.kv_lora_rank
    queries, keys_values = heads * (nope + rope), heads * (nope + value)
    if attention.q_lora_rank:
        out.linear("q latent", "attention input", out.hidden, attention.q_lora_rank)
        out.norm("q latent normalised", "q latent", t, attention.q_lora_rank)
        out.linear("q", "q latent normalised", attention.q_lora_rank, queries)
    else:
        out.linear("q", "attention input", out.hidden, queries)
    out.widen("q wide", "q", t * heads * rope, "q rotated")
    out.turn("q turned", "q wide", t * heads * rope, "q rotated")
    out.narrow("q rotated", "q turned", t * heads * rope)
    size = NARROW * t * queries
    out.add(EagerOp("q joined", ("q", "q rotated"), size, gradients=(("q", size), ("q rotated", 0.0))))
    out.linear("kv latent", "attention input", out.hidden, latent + rope)
    out.widen("k wide", "kv latent", t * rope, "k rotated")
    out.turn("k turned", "k wide", t * rope, "k rotated")
    out.narrow("k rotated", "k turned", t * rope)
    out.norm("kv latent normalised", "kv latent", t, latent)
    out.linear("kv", "kv latent normalised", latent, keys_values)
    gradients = (("kv", NARROW * t * keys_values), ("k rotated", NARROW * t * rope))
    out.add(EagerOp("k joined", ("kv", "k rotated"), size, gradients=gradients))
    inputs = {"q joined": float(queries), "k joined": float(queries), "kv": float(heads * value)}
    _core(out, inputs, heads, heads * value)


# -- feed-forward ------------------------------------------------------------------------------------------


def _ffn(out: _BlockOps, name: str, width: int, output: str) -> None:
    out.linear(f"{name}gate", "ffn input", out.hidden, width)
    _activation(
        out, name, out.tokens * width, lambda: out.linear(f"{name}up", "ffn input", out.hidden, width)
    )
    out.linear(output, f"{name}product", width, out.hidden)


def _activation(out: _BlockOps, name: str, elements: float, up: Callable[[], None]) -> None:
    """Append the SiLU of the gate, the up projection, and their product."""
    size, gate = NARROW * elements, f"{name}gate"
    out.add(EagerOp(f"{name}silu", (gate,), size, saves=(gate,), gradients=((gate, size),)))
    up()
    inputs = (f"{name}silu", f"{name}up")
    gradients = tuple((source, size) for source in inputs)
    out.add(EagerOp(f"{name}product", inputs, size, saves=inputs, gradients=gradients))


def _moe(out: _BlockOps, moe: MoE, ep: int) -> None:
    t, h = out.tokens, out.hidden
    rows, scores = t * moe.top_k, t * moe.experts
    # torchtitan's default of `per_op_sac_force_recompute_mm_shapes_by_fqns` names the router.
    out.linear("router", "ffn input", h, moe.experts, counted=False)
    out.widen("router wide", "router", scores)
    size = WIDE * scores
    out.add(EagerOp("scores", ("router wide",), size, ("scores",), (("router wide", size),)))
    chosen = 2 * INDEX * rows
    out.add(EagerOp("weights", ("scores",), WIDE * rows, gradients=(("scores", size),), extra_bytes=chosen))
    out.add(EagerOp("order", ("weights",), INDEX * rows, until="unsorted"))
    gathered = (("ffn input", NARROW * t * h),)
    out.add(EagerOp("gathered", ("ffn input", "order"), NARROW * rows * h, ("order",), gathered))
    _experts(out, moe, rows, moe.experts // ep)
    if moe.shared_width:
        _ffn(out, "shared ", moe.shared_width, "shared output")
    sent = NARROW * rows * h
    out.add(EagerOp("unsorted", ("home", "order"), sent, gradients=(("home", sent),)))
    out.widen("unsorted wide", "unsorted", rows * h)
    inputs = ("weights", "unsorted wide")
    gradients = (("weights", WIDE * rows), ("unsorted wide", WIDE * rows * h))
    out.add(EagerOp("summed wide", inputs, WIDE * t * h, inputs, gradients))
    if moe.shared_width:
        out.narrow("summed", "summed wide", t * h)
        out.sum_of("ffn output", "shared output", "summed")
    else:
        out.narrow("ffn output", "summed wide", t * h)


def _experts(out: _BlockOps, moe: MoE, rows: float, here: int) -> None:
    """Append both exchanges, the grouping of rows by expert, and the grouped GEMMs of `here` experts."""
    h, width = out.hidden, moe.expert_ffn
    sent, longer = NARROW * rows * h, NARROW * (rows + 1) * h
    padded = rows + PADDED_ROWS * here
    grouped = NARROW * padded * h
    out.unit = EXPERTS
    out.add(
        EagerOp("received", ("gathered",), sent, gradients=(("gathered", sent),), kept=out.transfers_kept)
    )
    out.add(EagerOp("longer", ("received",), longer, gradients=(("received", 0.0),)))
    places = INDEX * padded
    out.add(EagerOp("grouped", ("longer",), grouped, gradients=(("longer", longer),), extra_bytes=places))
    wide = NARROW * padded * width
    weight = (NARROW * here * h * width,)
    gradients = (("grouped", grouped),)
    out.add(EagerOp("routed gate", ("grouped",), wide, ("grouped",), gradients, weight))
    up = EagerOp("routed up", ("grouped",), wide, ("grouped",), gradients, weight)
    _activation(out, "routed ", padded * width, lambda: out.add(up))
    source = ("routed product",)
    gradients = (("routed product", wide),)
    out.add(EagerOp("routed down", source, grouped, source, gradients, weight, until="home"))
    out.add(EagerOp("scattered", ("routed down",), longer, gradients=(("routed down", grouped),)))
    gradients = (("scattered", longer),)
    kept = out.transfers_kept
    out.add(EagerOp("home", ("scattered",), sent, gradients=gradients, kept=kept, until="ffn output"))
    out.unit = ""
