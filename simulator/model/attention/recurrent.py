"""Base class of mixers whose state has a fixed size: linear attention, delta rules and state-space models.

Such a mixer projects its input, may convolve it over a few tokens, runs a scan over the sequence that reads
and updates one state per head, normalises and gates the result, and projects it back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

from moesim.simulator.model.attention.projections import (
    output_projection,
    output_projection_gradient,
    output_projection_weight_gradient,
    recomputed_attention_norm,
)
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.attention.scan import (
    Scan,
    convolution,
    convolution_backward,
    gated_norm,
    gated_norm_backward,
    scan_backward,
    scan_forward,
)
from moesim.simulator.model.cached import CachedTensor, GemmOutput, Sharding
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.primitives import (
    add,
    cast,
    linear_forward,
    linear_input_gradient,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import Module, Recompute
from moesim.simulator.model.work import Work


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
