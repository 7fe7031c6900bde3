"""The FFN of a dense layer, which is SwiGLU or has two projections without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.feed_forward.cached import swiglu_outputs, swiglu_tensors
from moesim.simulator.model.feed_forward.swiglu import (
    recomputed_ffn_norm,
    swiglu_forward,
    swiglu_input_gradient_down,
    swiglu_input_gradient_up,
    swiglu_weight_gradient,
)
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.primitives import BF16, cast, move, recomputed
from moesim.simulator.model.recompute import Module
from moesim.simulator.model.work import Work


@dataclass(frozen=True, slots=True)
class DenseFFN:
    """A dense FFN of `width` columns with up and down projection, and a gate projection if `gated`."""

    width: int
    gated: bool
    bias: bool = False

    @property
    def empty(self) -> bool:
        """False."""
        return False

    @property
    def branches(self) -> int:
        """Number of projections into the width: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def routed(self) -> bool:
        """False, because every token passes the same FFN."""
        return False

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters of all projections and their biases; every token uses all of them."""
        biases = (self.branches * self.width + hidden) * self.bias
        return Parameters(dense_ffn=(self.branches + 1) * hidden * self.width + biases)

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Limit of the columns, which tensor parallelism splits evenly."""
        return ((self.width, f"dense_ffn={self.width}"),)

    def after_attention(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

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

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """No operators, because nothing is sent."""
        return {}

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterator[CachedTensor]:
        """Outputs of the branches and of the activation."""
        width, inside = self.width, self.modules
        return swiglu_tensors("FFN", 1.0, width, precision, "width", self.branches, modules=inside)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the branches, then of the down projection."""
        return swiglu_outputs(self.width, hidden, self.branches)

    def kept_by_op(self, hidden: int) -> tuple[CachedTensor, ...]:
        """No further tensors."""
        return ()

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """Elements of the SiLU of the gate, in BF16."""
        return 0 if "mlp" in repeated else self.width * self.gated, 0

    @property
    def modules(self) -> frozenset[Module]:
        """The FFN as a whole."""
        return frozenset({"mlp"})

    @property
    def collective_modules(self) -> frozenset[Module]:
        """The FFN as a whole."""
        return self.modules

    @property
    def transfer_modules(self) -> frozenset[Module]:
        """No modules."""
        return frozenset()
