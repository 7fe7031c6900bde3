"""The empty feed-forward half of a layer that has a mixer or attention only, as in hybrid models."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Module
from moesim.simulator.model.work import Work


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """No feed-forward work, no norm before it: model files write `none` in `ffn_layers`."""

    @property
    def empty(self) -> bool:
        """True."""
        return True

    @property
    def routed(self) -> bool:
        """False."""
        return False

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """0."""
        return Parameters()

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """No limits."""
        return ()

    def after_attention(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def forward(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def input_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def weight_gradient(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """No operators."""
        return {}

    def cached_tensors(self, hidden: int, precision: Precision) -> tuple[CachedTensor, ...]:
        """No tensors."""
        return ()

    def gemm_outputs(self, hidden: int) -> tuple[GemmOutput, ...]:
        """No GEMMs."""
        return ()

    def kept_by_op(self, hidden: int) -> tuple[CachedTensor, ...]:
        """No tensors."""
        return ()

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """0 and 0."""
        return 0, 0

    @property
    def modules(self) -> frozenset[Module]:
        """No modules."""
        return frozenset()

    @property
    def collective_modules(self) -> frozenset[Module]:
        """No modules."""
        return frozenset()

    @property
    def transfer_modules(self) -> frozenset[Module]:
        """No modules."""
        return frozenset()
