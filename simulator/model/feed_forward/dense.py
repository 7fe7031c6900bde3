"""The FFN of a dense layer, which is SwiGLU or has two projections without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    cast,
    channel_casts,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    per_row_bytes,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Sharding

# -- SwiGLU, for the FFN of a dense layer and for shared experts ---------------------------------------
# The order is that of the kernels in DeepSeek's published H800 training profile
# (deepseek-ai/profile-data@449602428a1b, train.json); without FP8 there are no casts and transposes.


def swiglu_forward(
    w: Work, name: str, width: int, *, cast_input: bool, branches: int = 2
) -> tuple[list[Operator], list[Operator]]:
    """Forward as (gate-up GEMM, the rest); in the published trace the routed experts run between the two.

    `branches` is 2 for gate and up, and 1 for an FFN without a gate.
    """
    h, t = w.hidden, w.tokens
    up = linear_forward(w, f"{name}.gate_up", t, branches * width, h, cast_input=cast_input)
    down = [swiglu_kernel(f"{name}.swiglu", t, width, w.fp8, per_row=False, branches=branches)]
    down += linear_forward(w, f"{name}.down", t, h, width, cast_input=False)
    return up, down


def swiglu_kernel(name: str, m: float, width: int, fp8: bool, per_row: bool, branches: int = 2) -> Operator:
    """Kernel that reads gate and up and writes SiLU(gate) * up, in FP8 if `fp8`."""
    return move(
        name, "swiglu", "F", branches * m * width * BF16, m * per_row_bytes(width, fp8),
        variant="forward", per_received_row=per_row,
    )  # fmt: skip


def swiglu_input_gradient_down(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Input gradient of the down projection, and backward of SwiGLU."""
    h, t = w.hidden, w.tokens
    out = [cast(f"{name}.restore", "I", t, branches * width, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.down", t, h, width, cast_gradient=False)
    if w.fp8:
        out.append(cast(f"{name}.down.gradient_cast_channel", "I", t, h, "channel_fp8"))
        read, written = branches * t * width * BF16, t * per_row_bytes(width, True)
        out.append(move(f"{name}.swiglu.recompute", "swiglu", "I", read, written, variant="cast_channel"))
    read, written = (branches + 1) * t * width * BF16, branches * t * width * BF16
    return [*out, move(f"{name}.swiglu.backward", "swiglu", "I", read, written, variant="backward")]


def swiglu_input_gradient_up(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Input gradient of the gate-up projection and, in FP8, casts of the operands of its weight gradient."""
    h, t = w.hidden, w.tokens
    out = [cast(f"{name}.input_restore", "I", t, h, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.gate_up", t, branches * width, h)
    return [*out, *channel_casts(w, f"{name}.gate_up", t, branches * width, h)]


def swiglu_weight_gradient(w: Work, name: str, width: int, branches: int = 2) -> tuple[Operator, Operator]:
    """Weight gradients of the (down, gate-up) projections."""
    h, t = w.hidden, w.tokens
    up = weight_gradient(w, f"{name}.gate_up", t, branches * width, h)
    return weight_gradient(w, f"{name}.down", t, h, width), up


def recomputed_ffn_norm(w: Work) -> list[Operator]:
    """Recompute the FFN norm and its cast, where the policy does not keep their outputs."""
    if not w.repeats("layernorm"):
        return []
    forward = [norm("ffn_norm", "F", w.norm_tokens, w.hidden, residual=True)]
    if w.fp8:
        forward.append(cast("ffn_norm.cast", "F", w.tokens, w.hidden, "token"))
    return recomputed(forward)


def swiglu_tensors(
    name: str,
    rows: float,
    width: int,
    precision: Precision,
    sharding: Sharding,
    branches: int = 2,
    *,
    modules: frozenset[Module],
    activation: frozenset[Module] = frozenset(),
    routed: bool = False,
) -> Iterator[CachedTensor]:
    """What SwiGLU keeps: outputs of the branches and of the activation, for `rows` rows per token.

    The recompute of any of `modules` frees both outputs, that of `activation` frees the second only.
    """
    up = rows * row_bytes(branches * width, precision.activation_cache)
    out = rows * row_bytes(width, precision.activation_cache)
    inner = modules | activation
    yield CachedTensor(f"{name} gate and up", up, "kept", sharding, modules=modules, routed=routed)
    yield CachedTensor(f"{name} SwiGLU output", out, "swiglu output", sharding, modules=inner, routed=routed)


def swiglu_outputs(width: int, hidden: int, branches: int = 2) -> Iterator[GemmOutput]:
    """Outputs of the dense GEMMs in the order of their calls."""
    for n in range(branches):
        yield GemmOutput(f"FFN branch {n}", width, "width")
    yield GemmOutput("FFN output", hidden, "tokens", row_parallel=True)


@dataclass(frozen=True, slots=True)
class DenseFFN(FeedForward):
    """A dense FFN of `width` columns with up and down projection, and a gate projection if `gated`."""

    width: int
    gated: bool
    bias: bool = False

    @property
    def branches(self) -> int:
        """Number of projections into the width: gate and up, or up alone."""
        return 2 if self.gated else 1

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters of all projections and their biases; every token uses all of them."""
        biases = (self.branches * self.width + hidden) * self.bias
        return Parameters(dense_ffn=(self.branches + 1) * hidden * self.width + biases)

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Limit of the columns, which tensor parallelism splits evenly."""
        return ((self.width, f"dense_ffn={self.width}"),)

    def forward(self, w: Work) -> list[Operator]:
        """Projections and activation; in FP8 the input of the activation is cached in FP8."""
        width = self.width // w.tp
        up, down = swiglu_forward(w, "ffn", width, cast_input=True, branches=self.branches)
        cache = [cast("ffn.cache", "F", w.tokens, self.branches * width, "token")] if w.fp8 else []
        return [*up, *down, *cache]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the projections; norm and FFN run again where the recompute says so."""
        width = self.width // w.tp
        return [
            *(recomputed(self.forward(w)) if w.repeats("mlp") else []),
            *swiglu_input_gradient_down(w, "ffn", width, self.branches),
            *recomputed_ffn_norm(w),
            *swiglu_input_gradient_up(w, "ffn", width, self.branches),
        ]

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the down projection, then of gate and up, and sums over tokens for biases."""
        width = self.width // w.tp
        out = list(swiglu_weight_gradient(w, "ffn", width, self.branches))
        if self.bias:  # the forward adds them inside the GEMMs and the activation
            read = w.tokens * (self.branches * width + w.hidden) * BF16
            out.append(move("ffn.bias.wgrad", "elementwise", "W", read, 0.0, variant="reduce"))
        return out

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterator[CachedTensor]:
        """Outputs of the branches and of the activation."""
        width, inside = self.width, self.modules
        return swiglu_tensors("FFN", 1.0, width, precision, "width", self.branches, modules=inside)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the branches, then of the down projection."""
        return swiglu_outputs(self.width, hidden, self.branches)

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """Elements of the SiLU of the gate, in BF16."""
        return 0 if "mlp" in repeated else self.width * self.gated, 0

    @property
    def modules(self) -> frozenset[Module]:
        """The FFN as a whole."""
        return frozenset({"mlp"})
