"""Multi-head latent attention, which forms keys and values from a narrow latent (DeepSeek-V2 report, 2.1).

The operators are in the order of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 there are no casts and transposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.softmax import (
    HeadSizes,
    OutputGate,
    SoftmaxAttention,
    copy,
    gate_columns,
    recomputed_attention_norm,
    rope,
)
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    channel_casts,
    linear_backward,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module


class MLA(SoftmaxAttention):
    """Multi-head latent attention (DeepSeek-V2 report, section 2.1)."""

    kind: Literal["mla"] = "mla"
    heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    """Width of the compressed query; None = one full query projection."""
    kv_lora_rank: PositiveInt
    qk_nope_dim: PositiveInt
    qk_rope_dim: PositiveInt
    v_dim: PositiveInt
    rotary: bool = True
    """Rotation of the last `qk_rope_dim` elements; false keeps these elements unrotated (Kimi Linear)."""
    output_gate: OutputGate = "none"
    """Sigmoid gates of the output before its projection, one an `element` or one a `head`."""

    @property
    def sizes(self) -> HeadSizes:
        """Head sizes after the up-projections, which give every head its own keys and values."""
        return HeadSizes(self.heads, self.heads, self.qk_nope_dim + self.qk_rope_dim, self.v_dim)

    @property
    def modules(self) -> frozenset[Module]:
        """The core attention and the up-projections."""
        return super().modules | {"mla_up_proj"}

    @property
    def _kv_width(self) -> int:
        """Columns of the up-projection into keys without rotation and values."""
        return self.heads * (self.qk_nope_dim + self.v_dim)

    @property
    def features(self) -> frozenset[str]:
        """The kind, and what its fields ask for beyond DeepSeek-V3's attention."""
        asked = {
            "attention-output-gate": self.output_gate != "none",
            "mla-without-rotation": not self.rotary,
        }
        return super().features.union(name for name, is_so in asked.items() if is_so)

    @property
    def gates(self) -> int:
        """Columns of the gates, by `output_gate`."""
        return gate_columns(self.output_gate, self.heads, self.v_dim)

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the down- and up-projections, of gates and of the output projection."""
        q_width = self.heads * self.sizes.qk_head_dim
        query = hidden * q_width if self.q_lora_rank is None else (hidden + q_width) * self.q_lora_rank
        kv_down = hidden * (self.kv_lora_rank + self.qk_rope_dim)
        kv_up = self.kv_lora_rank * self._kv_width
        output = (self.gates + self.heads * self.v_dim) * hidden
        return query + kv_down + kv_up + output

    def norm_parameters(self) -> int:
        """Parameters of the norms of both latents."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of every token's latent and rotated key, which all heads share."""
        return (self.kv_lora_rank + self.qk_rope_dim) * tokens * element_bytes

    @property
    def gathered_latents(self) -> tuple[int, ...]:
        """Columns of the latents of queries and of keys and values, and of the rotated key."""
        if type(self) is not MLA or self.q_lora_rank is None:
            return ()
        return self.q_lora_rank, self.kv_lora_rank, self.qk_rope_dim

    # -- operators -----------------------------------------------------------------------------------

    def inputs_forward(self, w: Work) -> list[Operator]:
        """Down-projections, norms of the latents, up-projections, rotary embedding and packing."""
        h, t = w.hidden, w.latent_tokens
        out: list[Operator] = []
        if self.q_lora_rank is not None:
            out += linear_forward(w, "q_down", t, self.q_lora_rank, h)
        out += linear_forward(w, "kv_down", t, self.kv_lora_rank + self.qk_rope_dim, h)
        if self.gates:
            out += linear_forward(w, "gate_proj", w.tokens, self.gates // w.tp, h)
        if self.rotary:
            out.append(
                move(
                    "rope_positions", "elementwise", "F", 0.0, 16.0 * w.sequence, variant="positions",
                    launches=2,
                )
            )  # fmt: skip
        return [*out, *self._latents(w), *self._up(w)]

    def recomputed_inputs(self, w: Work) -> list[Operator]:
        """Norms of the latents, and up-projections."""
        if not w.repeats("mla_up_proj"):
            return []
        return recomputed([*self._latents(w, with_key_slice=False), *self._up(w)])

    def _latents(self, w: Work, with_key_slice: bool = True) -> list[Operator]:
        t = w.latent_tokens
        out: list[Operator] = []
        if self.q_lora_rank is not None:
            out.append(norm("q_norm", "F", t, self.q_lora_rank))
        out.append(copy("kv_latent_slice", "F", t * self.kv_lora_rank, "slice"))
        out.append(norm("kv_norm", "F", t, self.kv_lora_rank))
        if with_key_slice:
            out.append(copy("k_rope_slice", "F", t * self.qk_rope_dim, "slice"))
        return out

    def _up(self, w: Work) -> list[Operator]:
        t, heads = w.tokens, self.heads // w.tp
        name, q_in = self._query(w)
        rotated = [rope("rope_q", "F", t * heads * self.qk_rope_dim)] if self.rotary else []
        return [
            *linear_forward(w, name, t, heads * self.sizes.qk_head_dim, q_in),
            *linear_forward(w, "kv_up", t, self._kv_width // w.tp, self.kv_lora_rank),
            *([rope("rope_k", "F", t * self.qk_rope_dim)] if self.rotary else []),
            copy("k_nope_pack", "F", t * heads * self.qk_nope_dim, "pack"),
            move(
                "k_rope_broadcast", "copy", "F", t * self.qk_rope_dim * BF16,
                t * heads * self.qk_rope_dim * BF16, variant="broadcast",
            ),
            *rotated,
        ]  # fmt: skip

    def _query(self, w: Work) -> tuple[str, int]:
        """Name and input columns of the projection into queries."""
        return ("q_proj", w.hidden) if self.q_lora_rank is None else ("q_up", self.q_lora_rank)

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the up-projections, then of norms and down-projections of the latents."""
        t, heads, q_name, q_in = w.tokens, self.heads // w.tp, *self._query(w)
        q_width = heads * self.sizes.qk_head_dim
        out = [rope("rope_q.backward", "I", t * heads * self.qk_rope_dim)] if self.rotary else []
        out += linear_input_gradient(w, q_name, t, q_width, q_in)
        out += [
            move(
                "k_rope.sum_heads", "elementwise", "I", t * heads * self.qk_rope_dim * BF16,
                t * self.qk_rope_dim * BF16, variant="reduce",
            ),
            *([rope("rope_k.backward", "I", t * self.qk_rope_dim)] if self.rotary else []),
            copy("k_nope_unpack", "I", t * heads * self.qk_nope_dim, "pack"),
            copy("v_unpack", "I", t * heads * self.v_dim, "pack"),
        ]  # fmt: skip
        kv_width = self._kv_width // w.tp
        out += linear_input_gradient(w, "kv_up", t, kv_width, self.kv_lora_rank)
        out += channel_casts(w, "kv_up", t, kv_width, self.kv_lora_rank)
        return [*out, *channel_casts(w, q_name, t, q_width, q_in), *self._latent_gradient(w)]

    def _latent_gradient(self, w: Work) -> list[Operator]:
        t, h = w.latent_tokens, w.hidden
        kv_width = self.kv_lora_rank + self.qk_rope_dim
        out = [norm_backward("kv_norm.backward", t, self.kv_lora_rank)]
        if self.q_lora_rank is not None:
            out.append(norm_backward("q_norm.backward", t, self.q_lora_rank))
        size = t * kv_width * BF16
        out.append(move("kv_latent.join", "elementwise", "I", 3 * size, 4 * size, variant="join", launches=5))
        out += recomputed_attention_norm(w)
        out += linear_backward(w, "kv_down", t, kv_width, h, cast_first=True)
        if self.q_lora_rank is not None:
            out += linear_backward(w, "q_down", t, self.q_lora_rank, h, cast_first=True)
        if self.gates:
            out += linear_backward(w, "gate_proj", w.tokens, self.gates // w.tp, h, cast_first=True)
        return out

    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the up-projections, then of the down-projections."""
        h, t, latent = w.hidden, w.tokens, w.latent_tokens
        name, q_in = self._query(w)
        out = [
            weight_gradient(w, "kv_up", t, self._kv_width // w.tp, self.kv_lora_rank),
            weight_gradient(w, name, t, self.heads * self.sizes.qk_head_dim // w.tp, q_in),
            weight_gradient(w, "kv_down", latent, self.kv_lora_rank + self.qk_rope_dim, h),
        ]
        if self.q_lora_rank is not None:
            out.append(weight_gradient(w, "q_down", latent, self.q_lora_rank, h))
        if self.gates:
            out.append(weight_gradient(w, "gate_proj", t, self.gates // w.tp, h))
        return out

    # -- memory --------------------------------------------------------------------------------------

    def inputs_cached(self, precision: Precision) -> Iterator[CachedTensor]:
        """Latents, the outputs of their norms, and the expanded queries, keys and values."""
        heads, _, qk_head_dim, v_head_dim = self.sizes
        latents = (self.q_lora_rank or 0) + self.kv_lora_rank
        cache = precision.activation_cache
        yield CachedTensor("latents", row_bytes(latents + self.qk_rope_dim, "bf16"), "latent", "none")
        inside: frozenset[Module] = frozenset({"mla_up_proj"})
        normalised = row_bytes(latents, cache)
        yield CachedTensor("normalised latents", normalised, "norm output", "none", modules=inside)
        expanded = precision.kept_operand_bytes(heads * (2 * qk_head_dim + v_head_dim))
        yield CachedTensor("q, k, v", expanded, "expanded", "width", modules=inside)

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the down- and up-projections."""
        if self.q_lora_rank is not None:
            yield GemmOutput("q_down", self.q_lora_rank, "none")
        yield GemmOutput("q_up", self.heads * self.sizes.qk_head_dim, "width")
        yield GemmOutput("kv_down", self.kv_lora_rank + self.qk_rope_dim, "none")
        yield GemmOutput("kv_up", self._kv_width, "width")
        if self.gates:
            yield GemmOutput("gate_proj", self.gates, "width")

    # -- names in other projects ---------------------------------------------------------------------

    def megatron_arguments(self) -> dict[str, str | None] | None:
        """Megatron-LM's flags for multi-latent attention; None for a subclass, which is another attention.

        Megatron-LM's variant of DeepSeek sparse attention is experimental and is not written.
        """
        if type(self) is not MLA:
            return None
        query = {"--q-lora-rank": str(self.q_lora_rank)} if self.q_lora_rank else {}
        return {
            "--num-attention-heads": str(self.heads),
            "--multi-latent-attention": None,
            **query,
            "--kv-lora-rank": str(self.kv_lora_rank),
            "--qk-head-dim": str(self.qk_nope_dim),
            "--qk-pos-emb-head-dim": str(self.qk_rope_dim),
            "--v-head-dim": str(self.v_dim),
            "--qk-layernorm": None,
            "--rope-type": "rope",
            "--no-rope-fusion": None,  # the fused kernel knows YaRN's rotation only
        }
