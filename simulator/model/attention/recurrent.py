"""Base class of mixers whose state has a fixed size: linear attention, delta rules and state-space models.

Such a mixer projects its input, may convolve it over a few tokens, runs a scan over the sequence that reads
and updates one state per head, normalises and gates the result, and projects it back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import PositiveInt

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.attention.softmax import (
    output_projection,
    output_projection_gradient,
    output_projection_weight_gradient,
    recomputed_attention_norm,
)
from moesim.simulator.model.operator import GemmShape, Operator, Work
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    add,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute, Sharding

# -- scan --------------------------------------------------------------------------------------------
# Operators of recurrent mixers: the scan over the sequence, the short convolution and the gated norm.


class Scan(NamedTuple):
    """A scan over all heads of a layer, per token; chunked algorithms turn most of it into GEMMs."""

    variant: str
    """Name of the kernels in calibration profiles, which is the kind of mixer."""
    heads: int
    """Heads that the kernels run side by side."""
    flop: float
    """FLOPs of the forward."""
    repeated_flop: float
    """FLOPs of the forward that the backward computes again instead of reading."""
    inputs: float
    """Elements in 16 bits that the forward reads."""
    outputs: float
    """Elements in 16 bits that it writes."""
    state_elements: int
    """Elements of the state, over all heads."""
    chunk: int
    """Tokens of a chunk; 1 for a scan by token."""
    transition_elements: int = 0
    """Elements of the matrices that take the state of the tokens before to that behind them; 0 for decays."""

    @property
    def read_bytes(self) -> float:
        """Bytes that the forward reads per token, with the state of every chunk that it writes and reads."""
        return self.inputs * BF16 + self._state_bytes

    @property
    def written_bytes(self) -> float:
        """Bytes that the forward writes per token."""
        return self.outputs * BF16 + self._state_bytes

    @property
    def carried_elements(self) -> int:
        """Elements that a context-parallel rank hands on for one sequence."""
        return self.state_elements + self.transition_elements

    @property
    def _state_bytes(self) -> float:
        return self.state_elements / self.chunk * BF16 if self.chunk > 1 else 0.0


def _streams(w: Work, scan: Scan) -> int:
    """Heads of all sequences on this GPU, which the kernels run side by side."""
    return max(1, round(max(1.0, w.tokens / w.sequence) * scan.heads / w.tp))


def scan_forward(w: Work, scan: Scan) -> Operator:
    """The scan of one micro-batch (eq. C21); its rate depends on the heads side by side (eq. C24)."""
    tokens = w.tokens / w.tp
    return Operator(
        "scan",
        "scan_forward",
        "F",
        "bf16",
        flop=tokens * scan.flop,
        bytes_read=tokens * scan.read_bytes,
        bytes_written=tokens * scan.written_bytes,
        gemm=GemmShape(w.tokens, scan.chunk, scan.chunk, _streams(w, scan)),
        variant=scan.variant,
    )


def scan_backward(w: Work, scan: Scan) -> Operator:
    """Input gradients of the scan: twice its FLOPs, and what it computes again.

    It reads inputs, output gradients and states, and writes a gradient for every input.
    """
    tokens = w.tokens / w.tp
    gradients = scan.inputs * BF16
    return Operator(
        "scan.backward",
        "scan_backward",
        "I",
        "bf16",
        flop=tokens * (2.0 * scan.flop + scan.repeated_flop),
        uncounted_flop=tokens * scan.repeated_flop,
        bytes_read=tokens * (2.0 * scan.read_bytes + scan.outputs * BF16),
        bytes_written=tokens * (gradients + scan.written_bytes),
        gemm=GemmShape(w.tokens, scan.chunk, scan.chunk, _streams(w, scan)),
        variant=scan.variant,
    )


def convolution(w: Work, channels: float) -> Operator:
    """Short causal convolution over each channel with its activation, which reads and writes BF16 once."""
    size = w.tokens * channels * BF16
    return move("short_conv", "conv", "F", size, size, variant="forward")


def convolution_backward(w: Work, channels: float) -> Operator:
    """Gradients of input, weight and bias from the input and the output's gradient."""
    size = w.tokens * channels * BF16
    return move("short_conv.backward", "conv", "I", 2.0 * size, size, variant="backward", launches=2)


def gated_norm(w: Work, width: float, gate: float) -> Operator:
    """Norm of the scan's output times its activated gate, in one kernel."""
    size = w.tokens * width * BF16
    return move("gated_norm", "norm", "F", size + w.tokens * gate * BF16, size, variant="gated_forward")


def gated_norm_backward(w: Work, width: float, gate: float) -> Operator:
    """Gradients of the scan's output, the gate and the norm's weight."""
    size, gates = w.tokens * width * BF16, w.tokens * gate * BF16
    read, written = 2.0 * size + gates, size + gates
    return move("gated_norm.backward", "norm", "I", read, written, variant="gated_backward", launches=2)


class Projection(NamedTuple):
    """A linear layer of a mixer; `width` and `inputs` are elements over all tensor-parallel ranks."""

    name: str
    width: int
    inputs: int | None = None
    """Elements that it reads; None for the layer's hidden state."""
    sharding: Literal["width", "none", "inputs"] = "width"
    """Side that tensor parallelism splits: the output, neither (every rank computes all), or the input."""
    bias: bool = False

    def shape(self, w: Work) -> tuple[int, int]:
        """Elements that one rank writes and reads per token."""
        width, inputs = self.width, self.inputs or w.hidden
        if self.sharding == "width":
            width //= w.tp
        elif self.sharding == "inputs":
            inputs //= w.tp
        return width, inputs

    def parameters(self, hidden: int) -> int:
        """Weights, with one bias per output element where it has biases."""
        return (self.inputs or hidden) * self.width + self.width * self.bias


class Saved(NamedTuple):
    """A tensor that a mixer keeps for its backward, in bytes per token over all tensor-parallel ranks."""

    name: str
    bytes_per_token: float
    inside_scan: bool = False
    """Whether the recompute of the core attention frees it."""


class RecurrentMixer(Attention):
    """A mixer with a state of fixed size; a subclass defines its projections, its scan and its vectors."""

    @property
    @abstractmethod
    def projections(self) -> tuple[Projection, ...]:
        """Linear layers before the scan, in the order of their calls."""

    @property
    @abstractmethod
    def scan(self) -> Scan:
        """Sizes and costs of the scan."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements that the scan writes per token, over all heads; the output projection reads them."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """Parameters that are no matrices: decays, step biases, skips and weights of norms."""

    @property
    def convolved(self) -> int:
        """Channels of the short causal convolution; 0 without one."""
        return 0

    @property
    def convolution_width(self) -> int:
        """Tokens that the short convolution reads for one output, which is also its weights per channel."""
        return 0

    @property
    def convolution_bias(self) -> bool:
        """Whether the short convolution has a bias per channel."""
        return False

    @property
    def convolution_again(self) -> bool:
        """Whether the backward runs the short convolution again instead of keeping its output."""
        return False

    @property
    def normalised(self) -> bool:
        """Whether a norm and its gate are a kernel behind the scan, or the scan applies any gate itself."""
        return True

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return False

    @property
    def gate_width(self) -> int:
        """Elements of the gate beside the scan's output; 0 where nothing gates it."""
        return self.width

    @property
    @abstractmethod
    def tp_heads(self) -> tuple[tuple[int, str], ...]:
        """Numbers of heads and groups that tensor parallelism splits, with their names."""

    @abstractmethod
    def saved_by_scan(self) -> tuple[Saved, ...]:
        """Tensors that the scan's kernels keep for their backward, its inputs first."""

    def preparation(self, w: Work) -> list[Operator]:
        """Operators between the projections and the scan, besides the short convolution."""
        return []

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of `preparation`."""
        return []

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the projections, of the short convolution and of the output projection."""
        matrices = sum(projection.parameters(hidden) for projection in self.projections)
        output = self.width * hidden + hidden * self.output_bias
        return matrices + output + self._convolution_parameters

    @property
    def _convolution_parameters(self) -> int:
        return self.convolved * (self.convolution_width + self.convolution_bias)

    def norm_parameters(self) -> int:
        """Parameters of norms, and the vectors of decays, step biases and skips."""
        return self.vectors

    def uncounted_parameters(self, hidden: int) -> int:
        """Weights of the short convolution, which is no GEMM."""
        return self._convolution_parameters

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of the scan; the backward takes twice the forward (eq. F21).

        They do not depend on the sequence, and no mask halves them.
        """
        return 3.0 * self.scan.flop

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of the recurrent state in FP32 and of the convolution's last inputs, for any `tokens`."""
        window = self.convolved * max(0, self.convolution_width - 1)
        return self.scan.state_elements * BYTES_PER_ELEMENT["fp32"] + window * element_bytes

    # -- operators -----------------------------------------------------------------------------------

    def forward(self, w: Work) -> list[Operator]:
        """Projections, short convolution, scan, gated norm and output projection."""
        out: list[Operator] = []
        for index, projection in enumerate(self.projections):
            n, k = projection.shape(w)
            shared = index > 0 and projection.inputs is None
            out += linear_forward(w, projection.name, w.tokens, n, k, cast_input=not shared)
        if self.convolved:
            out.append(convolution(w, self.convolved // w.tp))
        out += [*self.preparation(w), scan_forward(w, self.scan)]
        if self.normalised:
            out.append(gated_norm(w, self.width // w.tp, self.gate_width // w.tp))
        return [*out, *output_projection(w, self.width // w.tp)]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the same operators in reverse order; the scan may be run again first."""
        out = output_projection_gradient(w, self.width // w.tp)
        if self.normalised:
            out.append(gated_norm_backward(w, self.width // w.tp, self.gate_width // w.tp))
        if self.convolution_again:
            out += recomputed([convolution(w, self.convolved // w.tp)])
        if "core_attn" in self.modules and w.repeats("core_attn"):
            out += recomputed([scan_forward(w, self.scan)])
        out += [scan_backward(w, self.scan), *self.preparation_gradient(w)]
        if self.convolved:
            out.append(convolution_backward(w, self.convolved // w.tp))
        return [*out, *recomputed_attention_norm(w), *self._projection_gradients(w)]

    def _projection_gradients(self, w: Work) -> list[Operator]:
        """Input gradients of the projections; those of the hidden state are added up."""
        out: list[Operator] = []
        first = True
        for projection in reversed(self.projections):
            n, k = projection.shape(w)
            out += linear_input_gradient(w, projection.name, w.tokens, n, k)
            if w.fp8:
                if projection.inputs is not None or projection is self.projections[0]:
                    out.append(cast(f"{projection.name}.input_cast_channel", "I", w.tokens, k, "channel"))
                out.append(cast(f"{projection.name}.gradient_cast_channel", "I", w.tokens, n, "channel"))
            if projection.sharding == "inputs" or (projection.inputs is None and not first):
                out.append(add(f"{projection.name}.add_gradient", "I", w.tokens, k))
            first = first and projection.inputs is not None
        return out

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the output projection, then of the other projections.

        That of the short convolution is part of its backward kernel.
        """
        out = [output_projection_weight_gradient(w, self.width // w.tp)]
        for projection in reversed(self.projections):
            n, k = projection.shape(w)
            out.append(weight_gradient(w, projection.name, w.tokens, n, k))
        return out

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Inputs of narrow projections, convolution, scan, norm and output projection (eq. M21)."""
        cache = precision.activation_cache
        for projection in self.projections:
            if projection.inputs is not None and projection.sharding != "inputs":
                size = row_bytes(projection.inputs, cache)
                yield CachedTensor(f"input of {projection.name}", size, "kept", "none")
        if self.convolved:
            size = row_bytes(self.convolved, "bf16")
            yield CachedTensor("convolution input", size, "kept", "width")
        inside: frozenset[Module] = frozenset({"core_attn"})
        for saved in self.saved_by_scan():
            modules = inside if saved.inside_scan else frozenset[Module]()
            yield CachedTensor(saved.name, saved.bytes_per_token, "kept", "width", modules=modules)
        if self.gate_width:
            yield CachedTensor("output gate", row_bytes(self.gate_width, "bf16"), "kept", "width")
        if self.normalised:
            yield CachedTensor("scan output", row_bytes(self.width, "bf16"), "kept", "width")
        yield CachedTensor("gated output", row_bytes(self.width, cache), "linear input", "width")

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the projections, then of the output projection."""
        sharding: dict[str, Sharding] = {"width": "width", "none": "none", "inputs": "none"}
        for projection in self.projections:
            yield GemmOutput(projection.name, projection.width, sharding[projection.sharding])
        yield GemmOutput("o_proj", hidden, "tokens")

    # -- recompute -----------------------------------------------------------------------------------

    @property
    def modules(self) -> frozenset[Module]:
        """The core attention, which is the scan, where its recompute frees anything."""
        inside = any(saved.inside_scan for saved in self.saved_by_scan())
        return frozenset({"core_attn"}) if inside else frozenset()

    @property
    def context_modules(self) -> frozenset[Module]:
        """The scan, which starts from the state of the ranks before."""
        return self.modules

    # -- parallelism ---------------------------------------------------------------------------------

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limits of heads and groups, each of which stays on one rank."""
        return self.tp_heads

    def context_elements(self, sequence: int) -> float:
        """0: nothing travels for each token."""
        return 0.0

    @property
    def context_state_bytes(self) -> float:
        """States in FP32, and the inputs of the convolution that lie on the rank before (eq. X21)."""
        window = self.convolved * max(0, self.convolution_width - 1)
        return self.scan.carried_elements * BYTES_PER_ELEMENT["fp32"] + window * BYTES_PER_ELEMENT["bf16"]


# -- convolved ---------------------------------------------------------------------------------------
# Base classes of recurrent mixers that convolve their inputs over a few tokens before the scan.


class ConvolvedMixer(RecurrentMixer):
    """A mixer with a short causal convolution; a subclass defines the channels in `convolved`."""

    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""

    @property
    def convolution_width(self) -> int:
        """`conv`."""
        return self.conv


class StateSpaceMixer(ConvolvedMixer):
    """What Mamba and Mamba-2 share: biases of the convolution and of the projections."""

    conv_bias: bool = True
    proj_bias: bool = False
    """Biases of the input and the output projection."""

    @property
    def convolution_bias(self) -> bool:
        """`conv_bias`."""
        return self.conv_bias

    @property
    def output_bias(self) -> bool:
        """`proj_bias`."""
        return self.proj_bias


# -- delta rule --------------------------------------------------------------------------------------
# Cost of the chunked gated delta rule, which the gated delta net and Kimi delta attention share.

CHUNK = 64
"""Tokens of a chunk in the kernels of flash-linear-attention (`chunk_size` of fla-core 0.6.0)."""


def delta_rule_scan(
    variant: str, *, heads: int, key_heads: int, key_dim: int, value_dim: int, gates: int
) -> Scan:
    """Scan of a gated delta rule (eq. C22): the WY form of arXiv 2412.06464, section 3.3, in chunks of 64.

    Per token and head, with C tokens a chunk: scores of keys with keys and of queries with keys, C d_k each;
    the inverse of a unit triangle, C^2 / 6; the two products with it, C (d_k + d_v); the scores times the new
    values, C d_v; the state read twice and updated once, d_k d_v each: all times 2. The backward computes the
    products with the inverse and the states again. `gates` counts the decays of one token.
    """
    square, state = CHUNK * CHUNK / 6.0, key_dim * value_dim
    inverse = CHUNK * (key_dim + value_dim)
    products = CHUNK * (2 * key_dim + value_dim) + inverse + square + 3 * state
    return Scan(
        variant=variant,
        heads=heads,
        flop=2.0 * heads * products,
        repeated_flop=2.0 * heads * (inverse + 2 * state),
        inputs=2 * key_heads * key_dim + heads * value_dim + gates + heads,
        outputs=heads * value_dim,
        state_elements=heads * state,
        chunk=CHUNK,
        transition_elements=heads * key_dim * key_dim,
    )
