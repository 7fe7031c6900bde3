"""Interface of the feed-forward half of a layer; without routed experts it sends nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from moesim.simulator.model.operator import Operator, Phase, Work
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module


class FeedForward(ABC):
    """The feed-forward half of one layer, from the FFN norm's output to the residual stream (pure)."""

    __slots__ = ()

    empty: ClassVar[bool] = False
    """Whether the layer has no feed-forward half, and so no norm before it."""
    routed: ClassVar[bool] = False
    """Whether it has routed experts."""

    @abstractmethod
    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters without norms; with `activated` only the experts that one token uses count."""

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Numbers that a tensor-parallel degree must divide, each with its name for the error message."""
        return ()

    def after_attention(self, w: Work) -> list[Operator]:
        """Operators right after the attention half: the router, and the cast of the rows that are sent."""
        return []

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """Backward of `after_attention`, right before the backward of the attention half."""
        return []

    @abstractmethod
    def forward(self, w: Work) -> list[Operator]:
        """Operators from the FFN norm's output (with routed experts: from received rows) to the output."""

    @abstractmethod
    def input_gradient(self, w: Work) -> list[Operator]:
        """Operators from the gradient of the output to that of the FFN norm's output."""

    @abstractmethod
    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections."""

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """Small operators on the communication stream before each transfer; empty where nothing is sent."""
        return {}

    @abstractmethod
    def cached_tensors(self, hidden: int, precision: Precision) -> Iterable[CachedTensor]:
        """Tensors kept for the backward, without the FFN norm's input and output."""

    @abstractmethod
    def gemm_outputs(self, hidden: int) -> Iterable[GemmOutput]:
        """Outputs of the dense GEMMs in the order of their calls; the policy `op` keeps every second one."""

    def kept_by_op(self, hidden: int) -> Iterable[CachedTensor]:
        """Tensors that the policy `op` keeps besides these outputs."""
        return ()

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """Further elements per token that eager operators keep, in BF16 and in FP32 (eq. M8).

        Those inside `repeated` modules, which the backward computes again, do not count.
        """
        return 0, 0

    @property
    def modules(self) -> frozenset[Module]:
        """Modules of this half that the backward can compute again.

        `cached_tensors` marks what each of them frees, `input_gradient` runs it where `Work.repeats` says so.
        """
        return frozenset()

    @property
    def collective_modules(self) -> frozenset[Module]:
        """Modules with the tensor-parallel collectives of this half inside them."""
        return self.modules

    @property
    def transfer_modules(self) -> frozenset[Module]:
        """Modules with the expert-parallel transfers inside them."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class NoFeedForward(FeedForward):
    """No feed-forward work, no norm before it: model files write `none` in `ffn_layers`."""

    empty: ClassVar[bool] = True

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """0."""
        return Parameters()

    def forward(self, w: Work) -> list[Operator]:
        """No operators."""
        return []

    input_gradient = weight_gradient = forward

    def gemm_outputs(self, hidden: int) -> tuple[GemmOutput, ...]:
        """No GEMMs."""
        return ()

    def cached_tensors(self, hidden: int, precision: Precision) -> tuple[CachedTensor, ...]:
        """No tensors."""
        return ()
