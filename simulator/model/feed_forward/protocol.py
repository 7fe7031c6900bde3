"""What the feed-forward half of a layer answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.parameters import Parameters
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.work import Work


class FeedForward(Protocol):
    """The feed-forward half of one layer, from the FFN norm's output to the residual stream. Pure."""

    @property
    def routed(self) -> bool:
        """Whether tokens choose experts in it."""

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters without norms; `activated` counts only the experts that one token uses."""

    def tp_limits(self) -> tuple[tuple[int, str], ...]:
        """Numbers that a tensor-parallel degree must divide, each with its name for a message."""

    def after_attention(self, w: Work) -> list[Operator]:
        """What runs right after the attention half: the router, and the cast of what is sent."""

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """The same backwards."""

    def forward(self, w: Work) -> list[Operator]:
        """From the FFN norm's output (routed: from received rows) to the output."""

    def input_gradient(self, w: Work) -> list[Operator]:
        """From the gradient of the output to that of the FFN norm's output."""

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections."""

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """Small operators of the communication stream before each transfer; empty where nothing is sent."""

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterable[CachedTensor]:
        """What stays for the backward, without the FFN norm's input and output."""

    def gemm_outputs(self, hidden: int) -> Iterable[GemmOutput]:
        """Outputs of the dense GEMMs in the order of their calls, of which `op` keeps every second."""

    def kept_by_op(self, hidden: int) -> Iterable[CachedTensor]:
        """What the policy `op` keeps beside these outputs."""

    def eager_elements(self, hidden: int) -> tuple[int, int]:
        """Elements a token that eager operators keep on top, in BF16 and in FP32 (eq. M8)."""
