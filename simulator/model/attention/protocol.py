"""What a kind of attention answers: one file a kind holds everything that the simulator asks about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from moesim.simulator.model.cached import CachedTensor, GemmOutput
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.part import ModelPart
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.work import Work


class Attention(ModelPart, ABC):
    """The attention of one layer: between its norm and the residual stream. Subclasses add its sizes.

    All methods are pure. Sizes are those of the whole layer; only the operators are those of one GPU, whose
    share the `Work` says.
    """

    kind: str
    """Name in model files and in `ATTENTION_KINDS`; a subclass states it as a literal with a default."""

    # -- counts --------------------------------------------------------------------------------------

    @abstractmethod
    def parameters(self, hidden: int) -> int:
        """Parameters of the projections, biases included, for hidden states of this width."""

    def norm_parameters(self) -> int:
        """Parameters of norms inside the attention; the two norms of the layer are not among them."""
        return 0

    def uncounted_parameters(self, hidden: int) -> int:
        """Those of `parameters` that published FLOP counts leave out."""
        return 0

    @abstractmethod
    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of one token beyond its projections, forward and backward.

        `causal`: count only what a causal mask leaves; published figures do either.
        """

    @abstractmethod
    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of one layer that decoding keeps for a sequence of `tokens`: a cache or a recurrent state."""

    # -- operators of one GPU ------------------------------------------------------------------------

    @abstractmethod
    def forward(self, w: Work) -> list[Operator]:
        """From the normalised input to the output of the output projection."""

    @abstractmethod
    def input_gradient(self, w: Work) -> list[Operator]:
        """From the gradient of the output projection's output to that of the normalised input.

        What the policy `selective` computes again is in it.
        """

    @abstractmethod
    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections."""

    # -- memory --------------------------------------------------------------------------------------

    @abstractmethod
    def cached_tensors(
        self, precision: Precision, policy: RecomputePolicy, unfused: bool
    ) -> Iterable[CachedTensor]:
        """What stays for the backward, from after the attention's input to its output.

        `unfused`: the scores go through memory; they themselves are in `unfused_scores`.
        """

    @abstractmethod
    def gemm_outputs(self, hidden: int) -> Iterable[GemmOutput]:
        """Outputs of the dense GEMMs in the order of their calls, of which `op` keeps every second."""

    def unfused_scores(self, sequence: int) -> float:
        """Scores of one query token over all heads that kernels without fusion write; 0 without scores."""
        return 0.0

    def eager_elements(self) -> int:
        """Elements a token in BF16 that PyTorch's eager operators keep on top."""
        return 0

    # -- parallelism ---------------------------------------------------------------------------------

    @abstractmethod
    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Numbers that a tensor-parallel degree must divide, each with its name for a message."""

    @abstractmethod
    def context_elements(self, sequence: int) -> float:
        """Elements a token of a sequence that travel around its context-parallel group, all heads."""

    # -- names in other projects ---------------------------------------------------------------------

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Arguments of Megatron-LM by flag (None: a bare flag); None where it has no words for the kind."""
        return None
