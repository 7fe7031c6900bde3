"""Interface of a kind of attention; one file per kind implements everything that the simulator needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal

from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.parameters import ModelPart
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute


class Attention(ModelPart, ABC):
    """The attention of one layer, from the norm's output to the residual stream. Subclasses add its sizes.

    All methods are pure. Sizes are those of the whole layer; only the operators are those of one GPU, with
    its share in `Work`.
    """

    kind: str
    """Name in model files and in `ATTENTION_KINDS`; a subclass states it as a literal with a default."""

    empty: ClassVar[bool] = False
    """Whether the layer has no attention half, and so no norm before it; true for `NoAttention` only."""

    @property
    def features(self) -> frozenset[str]:
        """What other programs must know besides `kind` and sizes, by name (`docs/trainers.md`)."""
        return frozenset({self.kind})

    # -- counts --------------------------------------------------------------------------------------

    @abstractmethod
    def parameters(self, hidden: int) -> int:
        """Parameters of the projections, biases included, for hidden states of this width."""

    def norm_parameters(self) -> int:
        """Parameters of norms inside the attention, without the two norms of the layer."""
        return 0

    def uncounted_parameters(self, hidden: int) -> int:
        """Part of `parameters` that published FLOP counts leave out."""
        return 0

    @abstractmethod
    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of one token without the projections, forward and backward.

        With `causal` only the scores below the causal mask count; published figures use either convention.
        """

    @abstractmethod
    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes that decoding keeps per layer for a sequence of `tokens`, in a cache or a recurrent state."""

    # -- operators of one GPU ------------------------------------------------------------------------

    @abstractmethod
    def forward(self, w: Work) -> list[Operator]:
        """Operators from the normalised input to the output of the output projection."""

    @abstractmethod
    def input_gradient(self, w: Work) -> list[Operator]:
        """Operators from the gradient of the output projection's output to that of the normalised input.

        They include those that the policy `selective` runs again.
        """

    @abstractmethod
    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections."""

    # -- memory --------------------------------------------------------------------------------------

    @abstractmethod
    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterable[CachedTensor]:
        """Tensors kept for the backward, from behind the attention's input to its output.

        `unfused` says that the scores go through memory; `unfused_scores` counts the scores themselves.
        """

    @abstractmethod
    def gemm_outputs(self, hidden: int) -> Iterable[GemmOutput]:
        """Outputs of the dense GEMMs in the order of their calls; the policy `op` keeps every second one."""

    def unfused_scores(self, sequence: int) -> float:
        """Scores that unfused kernels write for one query token, over all heads; 0 without scores."""
        return 0.0

    # -- recompute -----------------------------------------------------------------------------------

    @property
    def modules(self) -> frozenset[Module]:
        """Modules of the attention that the backward can compute again.

        `cached_tensors` marks what each of them frees, `input_gradient` runs it where `Work.repeats` says so.
        """
        return frozenset()

    @property
    def context_modules(self) -> frozenset[Module]:
        """Modules that exchange keys and values between context-parallel ranks."""
        return frozenset()

    # -- parallelism ---------------------------------------------------------------------------------

    @abstractmethod
    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Numbers that a tensor-parallel degree must divide, each with its name for the error message."""

    @abstractmethod
    def context_elements(self, sequence: int) -> float:
        """Elements per token, over all heads, that travel around the context-parallel group."""

    @property
    def context_state_bytes(self) -> float:
        """Bytes per sequence that every context-parallel rank sends to all others: recurrent states."""
        return 0.0

    @property
    def gathered_latents(self) -> tuple[int, ...]:
        """Columns of latents that sequence-parallel ranks may gather in the place of the layer's input."""
        return ()

    # -- names in other projects ---------------------------------------------------------------------

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Megatron-LM's arguments by flag (None for a flag without a value); None if it lacks the kind."""
        return None


class NoAttention(Attention):
    """No attention, no norm before it: model files write `none` in `attention_layers`."""

    kind: Literal["none"] = "none"

    empty: ClassVar[bool] = True

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
