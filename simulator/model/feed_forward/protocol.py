"""Interface of the feed-forward half of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from moesim.simulator.model.operator import Operator, Phase, Work
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module


class FeedForward(Protocol):
    """The feed-forward half of one layer, from the FFN norm's output to the residual stream (pure)."""

    @property
    def empty(self) -> bool:
        """Whether the layer has no feed-forward half, and so no norm before it."""

    @property
    def routed(self) -> bool:
        """Whether it has routed experts."""

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters without norms; with `activated` only the experts that one token uses count."""

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Numbers that a tensor-parallel degree must divide, each with its name for the error message."""

    def after_attention(self, w: Work) -> list[Operator]:
        """Operators right after the attention half: the router, and the cast of the rows that are sent."""

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """Backward of `after_attention`, right before the backward of the attention half."""

    def forward(self, w: Work) -> list[Operator]:
        """Operators from the FFN norm's output (with routed experts: from received rows) to the output."""

    def input_gradient(self, w: Work) -> list[Operator]:
        """Operators from the gradient of the output to that of the FFN norm's output."""

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections."""

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """Small operators on the communication stream before each transfer; empty where nothing is sent."""

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterable[CachedTensor]:
        """Tensors kept for the backward, without the FFN norm's input and output."""

    def gemm_outputs(self, hidden: int) -> Iterable[GemmOutput]:
        """Outputs of the dense GEMMs in the order of their calls; the policy `op` keeps every second one."""

    def kept_by_op(self, hidden: int) -> Iterable[CachedTensor]:
        """Tensors that the policy `op` keeps besides these outputs."""

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """Further elements per token that eager operators keep, in BF16 and in FP32 (eq. M8).

        Those inside `repeated` modules, which the backward computes again, do not count.
        """

    @property
    def modules(self) -> frozenset[Module]:
        """Modules of this half that the backward can compute again.

        `cached_tensors` marks what each of them frees, `input_gradient` runs it where `Work.repeats` says so.
        """

    @property
    def collective_modules(self) -> frozenset[Module]:
        """Modules with the tensor-parallel collectives of this half inside them."""

    @property
    def transfer_modules(self) -> frozenset[Module]:
        """Modules with the expert-parallel transfers inside them."""


# -- none --------------------------------------------------------------------------------------------
# The empty feed-forward half of a layer that has a mixer or attention only, as in hybrid models.


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
