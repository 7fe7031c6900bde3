"""Routed experts with their router, and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from msgspec.structs import replace
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from moesim.simulator.model.feed_forward.dense import swiglu_outputs, swiglu_tensors
from moesim.simulator.model.feed_forward.experts import (
    ExpertWork,
    experts_forward,
    experts_input_gradient,
    experts_weight_gradient,
)
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import Operator, Phase, Work
from moesim.simulator.model.parameters import ModelPart, Parameters
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.primitives import (
    FP32,
    add,
    cast,
    channel_casts,
    gemm,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module

# -- router, in the order of DeepSeek's published H800 training profile --------------------------------
# deepseek-ai/profile-data@449602428a1b, train.json.

GATE_FORWARD_LAUNCHES, GATE_BACKWARD_LAUNCHES = 37, 26
"""Numbers of small kernels of the gate in the published profile, forward and backward."""
GATE_FORWARD_PASSES, GATE_BACKWARD_PASSES = 12, 16
"""Reads and writes of a [tokens, experts] FP32 tensor by these kernels, counted in the same profile."""


def router_forward(w: Work, experts: int) -> list[Operator]:
    """GEMM of the router, then scores, group limit, top-k and balance loss as one chain of small kernels."""
    passes = GATE_FORWARD_PASSES * w.norm_tokens * experts * FP32 / 2
    return [
        gemm("gate", "F", w.norm_tokens, experts, w.hidden, "bf16", cls="gate_gemm"),
        move("gate.select", "topk", "F", passes, passes, variant="forward", launches=GATE_FORWARD_LAUNCHES),
    ]


def router_backward(w: Work, experts: int) -> list[Operator]:
    """Backward of the chain of small kernels, then input and weight gradient of the router."""
    h, t, launches = w.hidden, w.norm_tokens, GATE_BACKWARD_LAUNCHES
    passes = GATE_BACKWARD_PASSES * t * experts * FP32 / 2
    return [
        move("gate.select.backward", "topk", "I", passes, passes, variant="backward", launches=launches),
        gemm("gate.dgrad", "I", t, h, experts, "bf16", cls="gate_gemm"),
        gemm("gate.wgrad", "W", experts, h, t, "bf16", cls="gate_gemm"),
    ]


GroupScore = Literal["best", "top2-sum"]
"""How a group of experts is ranked: by its best score, or by the sum of its two best."""


class MoE(FeedForward, ModelPart):
    """The mixture-of-experts part: experts, gate and which layers stay dense."""

    routed: ClassVar[bool] = True

    experts: PositiveInt
    top_k: PositiveInt
    expert_ffn: PositiveInt
    shared_experts: NonNegativeInt = 0
    shared_ffn: NonNegativeInt = 0
    """Width of one shared expert."""
    shared_gate: bool = False
    """One extra score per token that scales the shared experts (Qwen2-MoE)."""
    groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1
    group_score: GroupScore | None = None
    """None where the gate is not limited to groups."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    score_bias: bool = False
    """One balance bias an expert, added to the score for the choice only (DeepSeek-V3 2.1.2)."""
    router_bias: bool = False
    """One bias an expert in the router's projection (gpt-oss)."""
    expert_gated: bool = True
    """Experts, shared ones too, of gate, up and down projection; false: up and down only (Nemotron 3)."""
    expert_bias: bool = False
    """Biases of the routed experts' projections (gpt-oss)."""
    latent: PositiveInt | None = None
    """Width into which routed rows are projected before they are sent, and back after they return; the
    experts then work on rows of this width (LatentMoE, Nemotron 3 Super); None: rows keep the hidden size."""
    latent_norm: bool = False
    """A norm of the latent rows behind the experts (Kimi K3)."""
    zero_experts: NonNegativeInt = 0
    """Experts that return their input and compute nothing (LongCat-Flash); the router scores them too."""
    extra_norms: NonNegativeInt = 0
    """Further norms of hidden width inside the layer (Gemma 4 norms shared and routed experts apart)."""
    dense_layers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    """Indices of the layers that have a dense FFN instead of experts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts % self.groups:
            raise ValueError(f"groups={self.groups} does not divide experts={self.experts}")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} is above groups={self.groups}")
        reachable = self.experts // self.groups * self.groups_per_token
        if self.top_k > reachable:
            raise ValueError(f"top_k={self.top_k} is above the {reachable} experts that a token can reach")
        if self.group_limited and self.group_score is None:
            raise ValueError("group_score is missing: say how groups are ranked, best or top2-sum")
        if self.group_score == "top2-sum" and self.experts // self.groups < 2:
            raise ValueError("group_score=top2-sum needs at least two experts a group")
        if bool(self.shared_experts) != bool(self.shared_ffn):
            raise ValueError("shared_experts and shared_ffn go together: give both or neither")
        if self.latent_norm and self.latent is None:
            raise ValueError("latent_norm is given without latent: there are no latent rows to norm")
        if self.zero_experts and self.group_limited:
            raise ValueError(
                f"zero_experts={self.zero_experts} with groups_per_token={self.groups_per_token} of "
                f"{self.groups} groups is not known: no published gate limits groups that hold such experts"
            )
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise ValueError("dense_layers must be increasing layer indices without repeats")
        return self

    @property
    def group_limited(self) -> bool:
        """Whether a token may reach only some of the groups."""
        return self.groups_per_token < self.groups

    @property
    def features(self) -> frozenset[str]:
        """Names of what the experts have beyond plain gated ones, which a trainer must know of."""
        own = {
            "router-bias": self.router_bias,
            "ungated-experts": not self.expert_gated,
            "expert-biases": self.expert_bias,
            "latent-experts": self.latent is not None,
            "zero-experts": self.zero_experts > 0,
            "further-expert-norms": self.extra_norms > 0,
        }
        return frozenset(name for name, is_so in own.items() if is_so)

    @property
    def shared_width(self) -> int:
        """Columns of all shared experts together."""
        return self.shared_experts * self.shared_ffn

    # -- counts --------------------------------------------------------------------------------------

    def row_width(self, hidden: int) -> int:
        """Elements of one routed row, which dispatch and combine send and the experts read and write."""
        return self.latent or hidden

    @property
    def branches(self) -> int:
        """Number of projections into an expert's width: gate and up, or up alone."""
        return 2 if self.expert_gated else 1

    def expert_parameters(self, hidden: int) -> int:
        """Parameters of one routed expert's projections, biases included."""
        row, width = self.row_width(hidden), self.branches * self.expert_ffn
        biases = (width + row) * self.expert_bias
        return row * (width + self.expert_ffn) + biases

    def latent_parameters(self, hidden: int) -> int:
        """Parameters of the projections into and out of the latent rows, which all experts share."""
        return 2 * hidden * (self.latent or 0)

    @property
    def scored(self) -> int:
        """Experts that the router scores: routed ones, and those that compute nothing."""
        return self.experts + self.zero_experts

    @property
    def routed_rows(self) -> float:
        """Expected rows per token that experts compute if choices are even; zero-computation experts take the
        rest."""
        return self.top_k * self.experts / self.scored

    def parameters(self, hidden: int, activated: bool) -> Parameters:
        """Parameters of routed and shared experts, of latent projections, and of the router with its biases.

        With `activated` the experts count that compute a token on average.
        """
        count = round(self.routed_rows) if activated else self.experts
        shared = (self.branches + 1) * hidden * self.shared_width + hidden * self.shared_gate
        return Parameters(
            routed_experts=count * self.expert_parameters(hidden),
            shared_experts=shared + self.latent_parameters(hidden),
            router=self.scored * (hidden + self.score_bias + self.router_bias),
            norms=self.extra_norms * hidden + (self.latent or 0) * self.latent_norm,
        )

    # -- operators of one GPU ------------------------------------------------------------------------

    def after_attention(self, w: Work) -> list[Operator]:
        """The router, any projection into latent rows and, in FP8, the casts of what is sent."""
        send = [cast("ffn_norm.cast", "F", w.tokens, w.hidden, "token")] if w.fp8 else []
        out = [*router_forward(w, self.scored), *send]
        if self.latent:
            m = w.norm_tokens
            out += linear_forward(w, "latent_down", m, self.latent, w.hidden, cast_input=False)
            out += [cast("latent.cast", "F", m, self.latent, "token")] if w.fp8 else []
        return out

    def before_attention_gradient(self, w: Work) -> list[Operator]:
        """Backward of the router, and of any projection into latent rows."""
        return [*self._latent_gradient(w, "latent_down"), *router_backward(w, self.scored)]

    def _latent_gradient(self, w: Work, name: str) -> list[Operator]:
        """Input gradient of the projection into latent rows (`latent_down`) or out of them (`latent_up`).

        Every rank projects its own tokens before the dispatch and after the combine, so that both transfers
        and the experts work on latent rows; router and shared experts see the hidden state (Megatron-LM
        core_v0.16, `--moe-latent-size`).
        """
        if not self.latent:
            return []
        n, k = (self.latent, w.hidden) if name == "latent_down" else (w.hidden, self.latent)
        gradient = linear_input_gradient(w, name, w.norm_tokens, n, k)
        return [*gradient, *channel_casts(w, name, w.norm_tokens, n, k)]

    def forward(self, w: Work) -> list[Operator]:
        """Operators of shared and routed experts, between dispatch and combine.

        What follows the combine is listed here too: the way out of latent rows, the tokens that experts
        without computation return, and further norms.
        """
        h, m, latent = w.hidden, w.norm_tokens, self.latent
        return [
            *experts_forward(self._on_gpu(w)),
            *([norm("latent_norm", "F", m, latent)] if latent and self.latent_norm else []),
            *(linear_forward(w, "latent_up", m, h, latent) if latent else []),
            *([add("experts.unchanged", "F", m, h)] if self.zero_experts else []),
            *(norm(f"experts.norm_{n}", "F", m, h) for n in range(self.extra_norms)),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of shared and routed experts, between the two transfers of the backward.

        Modules that the recompute names run again before.
        """
        h, m, latent = w.hidden, w.norm_tokens, self.latent
        again: list[Operator] = []
        if w.repeats("moe"):
            prepared = self._dispatch_layout(w) if w.ep > 1 else []
            again = recomputed([*self.after_attention(w), *prepared, *self.forward(w)])
        return [
            *again,
            *(norm_backward(f"experts.norm_{n}.backward", m, h) for n in range(self.extra_norms)),
            *([add("experts.unchanged.backward", "I", m, h)] if self.zero_experts else []),
            *self._latent_gradient(w, "latent_up"),
            *([norm_backward("latent_norm.backward", m, latent)] if latent and self.latent_norm else []),
            *experts_input_gradient(self._on_gpu(w)),
        ]

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of shared and routed experts, and of the projections of latent rows."""
        out, m, h = experts_weight_gradient(self._on_gpu(w)), w.norm_tokens, w.hidden
        if self.latent:
            out.append(weight_gradient(w, "latent_up", m, h, self.latent))
            out.append(weight_gradient(w, "latent_down", m, self.latent, h))
        return out

    def communication(self, w: Work, precision: Precision) -> dict[Phase, list[Operator]]:
        """Small operators before dispatch and combine; there are none without expert parallelism."""
        if w.ep == 1:
            return {}
        gradient = cast("combine.cast_gradient", "I", w.tokens, self.row_width(w.hidden), "token")
        gradient = replace(gradient, variant="token_on_communication_stream")
        return {
            "dispatch F": self._dispatch_layout(w),
            "combine F": [],
            "combine B": [gradient] if precision.dispatch == "fp8" else [],
            "dispatch B": [],
        }

    def _dispatch_layout(self, w: Work) -> list[Operator]:
        read, written = 8.0 * self.top_k * w.tokens, w.tokens * self.experts / 8
        return [move("dispatch.layout", "permute", "F", read, written, variant="layout")]

    def _on_gpu(self, w: Work) -> ExpertWork:
        return ExpertWork(
            work=w,
            top_k=self.top_k,
            expert_ffn=self.expert_ffn,
            local_experts=max(1, (self.experts + w.redundant_experts) // w.ep),
            shared_width=self.shared_width // w.tp,
            row=self.row_width(w.hidden),
            branches=self.branches,
            bias=self.expert_bias,
        )

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(self, hidden: int, precision: Precision) -> Iterator[CachedTensor]:
        """Tensors of router and experts; routed experts keep their expected rows per token.

        Tensor parallelism of the experts gathers rows and splits widths by the same factor, so per GPU these
        tensors shrink with the tokens only.
        """
        fp32, cache = BYTES_PER_ELEMENT["fp32"], precision.activation_cache
        layer: frozenset[Module] = frozenset({"moe"})
        yield CachedTensor("gate scores", self.scored * fp32, "kept", "tokens", modules=layer)
        chosen = self.top_k * 2 * fp32
        yield CachedTensor("chosen experts and weights", chosen, "kept", "tokens", modules=layer)
        rows = self.routed_rows * row_bytes(self.row_width(hidden), cache)
        yield CachedTensor("dispatched rows", rows, "linear input", "tokens", modules=layer, routed=True)
        yield from swiglu_tensors(
            "experts", self.routed_rows, self.expert_ffn, precision, "tokens", self.branches,
            modules=layer, activation=frozenset({"moe_act"}), routed=True,
        )  # fmt: skip
        if self.latent:
            returned = row_bytes(self.latent, cache) * (2 if self.latent_norm else 1)
            yield CachedTensor("combined latent rows", returned, "linear input", "tokens", modules=layer)
        if self.extra_norms:
            inputs = self.extra_norms * row_bytes(hidden, "bf16")
            yield CachedTensor("inputs of further norms", inputs, "kept", "tokens", modules=layer)
        if self.shared_experts:
            inside: frozenset[Module] = layer | {"shared_experts"}
            yield from swiglu_tensors(
                "shared experts", 1.0, self.shared_width, precision, "width", self.branches, modules=inside
            )

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of latent projections and shared experts; router and grouped GEMMs do not count."""
        if self.latent:
            yield GemmOutput("latent_down", self.latent, "tokens")
        if self.shared_experts:
            yield from swiglu_outputs(self.shared_width, hidden, self.branches)
        if self.latent:
            yield GemmOutput("latent_up", hidden, "tokens")

    def kept_by_op(self, hidden: int) -> tuple[CachedTensor, ...]:
        """Rows that came through both all-to-alls."""
        rows = 2 * self.routed_rows * row_bytes(self.row_width(hidden), "bf16")
        return (CachedTensor("rows after dispatch and combine", rows, "kept", "tokens"),)

    def eager_elements(self, hidden: int, repeated: frozenset[Module] = frozenset()) -> tuple[int, int]:
        """Elements of the SiLU of the gates in BF16, and of the rows that the weighted sum reads in FP32."""
        if "moe" in repeated:
            return 0, 0
        routed = 0 if "moe_act" in repeated else round(self.routed_rows * self.expert_ffn)
        shared = 0 if "shared_experts" in repeated else self.shared_width
        summed = round(self.routed_rows * self.row_width(hidden))
        return (routed + shared) * self.expert_gated, summed

    # -- recompute -----------------------------------------------------------------------------------

    @property
    def modules(self) -> frozenset[Module]:
        """The whole layer, the activation of the routed experts, and any shared experts."""
        shared: frozenset[Module] = frozenset({"shared_experts"} if self.shared_experts else ())
        return shared | {"moe", "moe_act"}

    @property
    def collective_modules(self) -> frozenset[Module]:
        """The whole layer and the shared experts, which tensor parallelism splits."""
        return self.modules - {"moe_act"}

    @property
    def transfer_modules(self) -> frozenset[Module]:
        """The whole layer."""
        return frozenset({"moe"})
