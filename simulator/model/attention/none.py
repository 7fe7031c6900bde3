"""The empty attention half of a layer that has feed-forward work only, as in hybrid models."""

from __future__ import annotations

from typing import Literal

from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.work import Work


class NoAttention(Attention):
    """No attention, no norm before it: model files write `none` in `attention_layers`."""

    kind: Literal["none"] = "none"

    @property
    def empty(self) -> bool:
        """True."""
        return True

    def parameters(self, hidden: int) -> int:
        """0."""
        return 0

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """0."""
        return 0.0

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """0."""
        return 0.0

    def forward(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def input_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def weight_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> tuple[CachedTensor, ...]:
        """No tensors."""
        return ()

    def gemm_outputs(self, hidden: int) -> tuple[GemmOutput, ...]:
        """No GEMMs."""
        return ()

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """No limits."""
        return ()

    def context_elements(self, sequence: int) -> float:
        """0."""
        return 0.0
