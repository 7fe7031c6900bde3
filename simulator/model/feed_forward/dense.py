"""The FFN of a dense layer: SwiGLU, or two projections without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.feed_forward.cached import swiglu_outputs, swiglu_tensors
from moesim.simulator.model.feed_forward.swiglu import (
    ffn_norm_again,
    swiglu_forward,
    swiglu_input_gradient_down,
    swiglu_input_gradient_up,
    swiglu_weight_gradient,
)
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.primitives import cast
from moesim.simulator.model.work import Work


@dataclass(frozen=True, slots=True)
class DenseFFN:
    """A dense FFN of `width` columns; `gated`: gate, up and down projection, otherwise up and down."""

    width: int
    gated: bool

    @property
    def branches(self) -> int:
        """Projections into the width: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def routed(self) -> bool:
        """Every token takes the same way."""
        return False

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """All of them are used by every token."""
        return Parameters(dense_ffn=(self.branches + 1) * hidden * self.width)

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Columns are cut evenly."""
        return ((self.width, f"dense_ffn={self.width}"),)

    def after_attention(self, w: Work) -> list[Operator]:
        """Nothing."""
        return []

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """Nothing."""
        return []

    def forward(self, w: Work) -> list[Operator]:
        """In FP8 the SwiGLU input is cached in FP8."""
        width = self.width // w.tp
        up, down = swiglu_forward(w, "ffn", width, cast_input=True, branches=self.branches)
        cache = [cast("ffn.cache", "F", w.tokens, self.branches * width, "token")] if w.fp8 else []
        return [*up, *down, *cache]

    def input_gradient(self, w: Work) -> list[Operator]:
        """With the norm and its cast formed again where the policy says so."""
        width = self.width // w.tp
        return [
            *swiglu_input_gradient_down(w, "ffn", width, self.branches),
            *ffn_norm_again(w),
            *swiglu_input_gradient_up(w, "ffn", width, self.branches),
        ]

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Down, then gate and up."""
        return list(swiglu_weight_gradient(w, "ffn", self.width // w.tp, self.branches))

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """Nothing is sent."""
        return {}

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterator[CachedTensor]:
        """Outputs of the branches and of the activation."""
        return swiglu_tensors("FFN", 1.0, self.width, precision, "width", self.branches)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Branches, then the output."""
        return swiglu_outputs(self.width, hidden, self.branches)

    def kept_by_op(self, hidden: int) -> tuple[CachedTensor, ...]:
        """Nothing else."""
        return ()

    def eager_elements(self, hidden: int) -> tuple[int, int]:
        """SiLU of the gate."""
        return self.width * self.gated, 0
