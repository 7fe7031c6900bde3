"""Base class of mixers whose state has a fixed size: linear attention, delta rules and state-space models.

Such a mixer projects its input, may convolve it over a few tokens, runs a scan over the sequence that reads
and updates one state per head, normalises and gates the result, and projects it back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

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
    def _state_bytes(self) -> float:
        return self.state_elements / self.chunk * BF16 if self.chunk > 1 else 0.0


def _scan_shape(w: Work, scan: Scan) -> GemmShape:
    """Tokens, chunk, and the heads of all sequences on this GPU, which the kernels run side by side."""
    streams = max(1, round(max(1.0, w.tokens / w.sequence) * scan.heads / w.tp))
    return GemmShape(w.tokens, scan.chunk, scan.chunk, streams)


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
        gemm=_scan_shape(w, scan),
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
        gemm=_scan_shape(w, scan),
        variant=scan.variant,
    )


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


class Convolution(NamedTuple):
    """A short causal convolution over each channel with its activation, before the scan."""

    channels: int
    width: int
    """Tokens that it reads for one output, which is also its weights per channel."""
    bias: bool = False
    again: bool = False
    """Whether the backward runs it again instead of keeping its output."""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.channels * (self.width + self.bias)

    @property
    def window(self) -> int:
        """Inputs that it keeps for the next token."""
        return self.channels * max(0, self.width - 1)

    def forward(self, w: Work) -> Operator:
        """The kernel, which reads and writes BF16 once."""
        size = w.tokens * (self.channels // w.tp) * BF16
        return move("short_conv", "conv", "F", size, size, variant="forward")

    def backward(self, w: Work) -> Operator:
        """Gradients of input, weight and bias from the input and the output's gradient."""
        size = w.tokens * (self.channels // w.tp) * BF16
        return move("short_conv.backward", "conv", "I", 2.0 * size, size, variant="backward", launches=2)


class MixerParts(NamedTuple):
    """What a mixer has around its scan; elements are those over all tensor-parallel ranks."""

    projections: tuple[Projection, ...]
    """Linear layers before the scan, in the order of their calls."""
    width: int
    """Elements that the scan writes per token, over all heads; the output projection reads them."""
    gate_width: int
    """Elements of the gate beside the scan's output; 0 where nothing gates it."""
    vectors: int
    """Parameters that are no matrices: decays, step biases, skips and weights of norms."""
    heads: tuple[tuple[int, str], ...]
    """Numbers of heads and groups that tensor parallelism splits, with their names."""
    saved: tuple[Saved, ...]
    """Tensors that the scan's kernels keep for their backward, its inputs first."""
    convolution: Convolution = Convolution(0, 0)
    """The short convolution; without channels there is none."""
    normalised: bool = True
    """Whether a norm and its gate are a kernel behind the scan, or the scan applies any gate itself."""
    output_bias: bool = False
    """Whether the output projection has a bias."""


class RecurrentMixer(Attention):
    """A mixer with a state of fixed size; a subclass defines its scan and the parts around it."""

    @property
    @abstractmethod
    def scan(self) -> Scan:
        """Sizes and costs of the scan."""

    @property
    @abstractmethod
    def parts(self) -> MixerParts:
        """Projections, convolution, norm and what the scan keeps."""

    def preparation(self, w: Work) -> list[Operator]:
        """Operators between the projections and the scan, besides the short convolution."""
        return []

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of `preparation`."""
        return []

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the projections, of the short convolution and of the output projection."""
        parts = self.parts
        matrices = sum(projection.parameters(hidden) for projection in parts.projections)
        return matrices + parts.width * hidden + hidden * parts.output_bias + parts.convolution.parameters

    def norm_parameters(self) -> int:
        """Parameters of norms, and the vectors of decays, step biases and skips."""
        return self.parts.vectors

    def uncounted_parameters(self, hidden: int) -> int:
        """Weights of the short convolution, which is no GEMM."""
        return self.parts.convolution.parameters

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of the scan; the backward takes twice the forward (eq. F21).

        They do not depend on the sequence, and no mask halves them.
        """
        return 3.0 * self.scan.flop

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of the recurrent state in FP32 and of the convolution's last inputs, for any `tokens`."""
        window = self.parts.convolution.window * element_bytes
        return self.scan.state_elements * BYTES_PER_ELEMENT["fp32"] + window

    # -- operators -----------------------------------------------------------------------------------

    def forward(self, w: Work) -> list[Operator]:
        """Projections, short convolution, scan, gated norm and output projection."""
        parts, out = self.parts, list[Operator]()
        for index, projection in enumerate(parts.projections):
            n, k = projection.shape(w)
            shared = index > 0 and projection.inputs is None
            out += linear_forward(w, projection.name, w.tokens, n, k, cast_input=not shared)
        if parts.convolution.channels:
            out.append(parts.convolution.forward(w))
        out += [*self.preparation(w), scan_forward(w, self.scan)]
        if parts.normalised:  # the norm of the scan's output times its activated gate, in one kernel
            size, gate = w.tokens * (parts.width // w.tp) * BF16, w.tokens * (parts.gate_width // w.tp) * BF16
            out.append(move("gated_norm", "norm", "F", size + gate, size, variant="gated_forward"))
        return [*out, *output_projection(w, parts.width // w.tp)]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the same operators in reverse order; the scan may be run again first."""
        parts = self.parts
        out = output_projection_gradient(w, parts.width // w.tp)
        if parts.normalised:  # gradients of the scan's output, the gate and the norm's weight
            size, gate = w.tokens * (parts.width // w.tp) * BF16, w.tokens * (parts.gate_width // w.tp) * BF16
            read, written = 2.0 * size + gate, size + gate
            out.append(
                move("gated_norm.backward", "norm", "I", read, written, variant="gated_backward", launches=2)
            )
        if parts.convolution.again:
            out += recomputed([parts.convolution.forward(w)])
        if "core_attn" in self.modules and w.repeats("core_attn"):
            out += recomputed([scan_forward(w, self.scan)])
        out += [scan_backward(w, self.scan), *self.preparation_gradient(w)]
        if parts.convolution.channels:
            out.append(parts.convolution.backward(w))
        return [*out, *recomputed_attention_norm(w), *self._projection_gradients(w, parts.projections)]

    def _projection_gradients(self, w: Work, projections: tuple[Projection, ...]) -> list[Operator]:
        """Input gradients of the projections; those of the hidden state are added up."""
        out: list[Operator] = []
        first = True
        for projection in reversed(projections):
            n, k = projection.shape(w)
            out += linear_input_gradient(w, projection.name, w.tokens, n, k)
            if w.fp8:
                if projection.inputs is not None:
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
        parts = self.parts
        others = ((p.name, *p.shape(w)) for p in reversed(parts.projections))
        return [
            output_projection_weight_gradient(w, parts.width // w.tp),
            *(weight_gradient(w, name, w.tokens, n, k) for name, n, k in others),
        ]

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Inputs of narrow projections, convolution, scan, norm and output projection (eq. M21)."""
        parts, cache = self.parts, precision.activation_cache
        for projection in parts.projections:
            if projection.inputs is not None and projection.sharding != "inputs":
                size = row_bytes(projection.inputs, cache)
                yield CachedTensor(f"input of {projection.name}", size, "kept", "none")
        if parts.convolution.channels:
            size = row_bytes(parts.convolution.channels, "bf16")
            yield CachedTensor("convolution input", size, "kept", "width")
        inside: frozenset[Module] = frozenset({"core_attn"})
        for saved in parts.saved:
            modules = inside if saved.inside_scan else frozenset[Module]()
            yield CachedTensor(saved.name, saved.bytes_per_token, "kept", "width", modules=modules)
        if parts.gate_width:
            yield CachedTensor("output gate", row_bytes(parts.gate_width, "bf16"), "kept", "width")
        if parts.normalised:
            yield CachedTensor("scan output", row_bytes(parts.width, "bf16"), "kept", "width")
        yield CachedTensor("gated output", row_bytes(parts.width, cache), "linear input", "width")

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the projections, then of the output projection."""
        sharding: dict[str, Sharding] = {"width": "width", "none": "none", "inputs": "none"}
        for projection in self.parts.projections:
            yield GemmOutput(projection.name, projection.width, sharding[projection.sharding])
        yield GemmOutput("o_proj", hidden, "tokens")

    # -- recompute and parallelism -------------------------------------------------------------------

    @property
    def modules(self) -> frozenset[Module]:
        """The core attention, which is the scan, where its recompute frees anything."""
        inside = any(saved.inside_scan for saved in self.parts.saved)
        return frozenset({"core_attn"}) if inside else frozenset()

    @property
    def context_modules(self) -> frozenset[Module]:
        """The scan, which starts from the state of the ranks before."""
        return self.modules

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limits of heads and groups, each of which stays on one rank."""
        return self.parts.heads

    def context_elements(self, sequence: int) -> float:
        """0: nothing travels for each token."""
        return 0.0

    @property
    def context_state_bytes(self) -> float:
        """States in FP32, and the inputs of the convolution that lie on the rank before (eq. X21)."""
        elements = self.scan.state_elements + self.scan.transition_elements
        window = self.parts.convolution.window * BYTES_PER_ELEMENT["bf16"]
        return elements * BYTES_PER_ELEMENT["fp32"] + window
