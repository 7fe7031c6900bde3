"""DeepSeek sparse attention: latent attention over the keys that an indexer chooses (arXiv 2512.02556).

Operators are those of the sparse training stage (section 2.1.1): the indexer scores all causal keys, the core
attention reads the chosen ones in the absorbed form (all heads share one latent key), and the indexer learns
the attention's distribution over the chosen keys by a KL loss of its own, with detached inputs. The dense
warm-up, which trains the indexer alone for 1,000 steps, is not priced. Sequences of at most `top_k` tokens
run dense, in the form of latent attention, beside the indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.softmax import (
    Reach,
    copy,
    rope,
)
from moesim.simulator.model.attention.sparse_core import (
    Indexer,
    SparseCore,
    sparse_backward,
    sparse_forward,
)
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    FP32,
    channel_casts,
    gemm,
    linear_forward,
    linear_input_gradient,
    recomputed,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute


class DSA(MLA):
    """Multi-head latent attention in which every query reads `indexer.top_k` keys (DeepSeek-V3.2, GLM-5)."""

    kind: Literal["dsa"] = "dsa"  # type: ignore[assignment]
    indexer: Indexer

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the latent attention and of the indexer."""
        return super().parameters(hidden) + self.uncounted_parameters(hidden)

    def uncounted_parameters(self, hidden: int) -> int:
        """Parameters of the indexer, whose work model FLOPs leave out."""
        return self.indexer.parameters(hidden, self.q_lora_rank or hidden)

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of every token's latent, rotated key and indexer key."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return super().state_bytes(tokens, element_bytes) + index * tokens * element_bytes

    @property
    def reach(self) -> Reach:
        """The chosen keys (eq. A1), in the form that is not absorbed.

        So a share of the peak means the same as for dense models; neither the indexer nor what absorbing adds
        counts.
        """
        return Reach("chosen", self.indexer.top_k)

    # -- operators -----------------------------------------------------------------------------------

    def core(self, sequence: int) -> SparseCore:
        """Sizes of the absorbed core attention."""
        latent = self.kv_lora_rank + self.qk_rope_dim
        return SparseCore(
            self.heads,
            latent,
            self.kv_lora_rank,
            latent,
            self.reach.mean_keys(sequence),
            self.sizes.qk_head_dim + self.v_dim,
        )

    def forward(self, w: Work) -> list[Operator]:
        """Latents, the indexer's choice, core attention over the chosen keys, output projection."""
        return super().forward(w) if self.reach.limits(w.sequence) else [*self._index(w), *super().forward(w)]

    def _index(self, w: Work) -> list[Operator]:
        return self.indexer.forward(w, self.q_lora_rank or w.hidden, self.qk_rope_dim)

    def core_forward(self, w: Work) -> list[Operator]:
        """The indexer's choice and the core attention over it in the absorbed form, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_forward(w)
        return [*self._index(w), *self._absorbed_core(w)]

    def _absorbed_core(self, w: Work) -> list[Operator]:
        return [*sparse_forward(w, self.core(w.sequence)), self._absorbed(w, "absorb_values", "F")]

    def _absorbed(self, w: Work, name: str, d: Literal["F", "I"]) -> Operator:
        """One GEMM a head between the latent and the head's keys or values, in BF16."""
        own = self.qk_nope_dim if name == "absorb_keys" else self.v_dim
        heads, latent = self.heads // w.tp, self.kv_lora_rank
        widens = (name == "absorb_keys") == (d == "F")
        n, k = (latent, own) if widens else (own, latent)
        suffix = "" if d == "F" else ".dgrad"
        return gemm(f"{name}{suffix}", d, w.tokens * heads, n, k, "bf16", groups=heads)

    def _up(self, w: Work) -> list[Operator]:
        if not self.reach.limits(w.sequence):
            return super()._up(w)
        t, heads, name, q_in = w.tokens, self.heads // w.tp, *self._query(w)
        return [
            *linear_forward(w, name, t, heads * self.sizes.qk_head_dim, q_in),
            *([rope("rope_k", "F", t * self.qk_rope_dim)] if self.rotary else []),
            *([rope("rope_q", "F", t * heads * self.qk_rope_dim)] if self.rotary else []),
            self._absorbed(w, "absorb_keys", "F"),
            copy("latent_pack", "F", t * (heads + 1) * self.qk_rope_dim, "pack"),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients, and the indexer's loss; the indexer passes no gradient on."""
        gradient = super().input_gradient(w)
        return gradient if self.reach.limits(w.sequence) else [*self._loss(w), *gradient]

    def core_again(self, w: Work) -> list[Operator]:
        """The core attention over the chosen keys run again, without the choice, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_again(w)
        return recomputed(self._absorbed_core(w)) if w.repeats("core_attn") else []

    def core_backward(self, w: Work) -> list[Operator]:
        """Input gradients of the core attention over the chosen keys with the indexer's loss, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_backward(w)
        values = self._absorbed(w, "absorb_values", "I")
        return [values, *self._loss(w), *sparse_backward(w, self.core(w.sequence))]

    def _loss(self, w: Work) -> list[Operator]:
        """The attention's probabilities of the chosen keys, summed over heads, then the indexer's gradient.

        They are the indexer's target. The kernel computes all scores again; model FLOPs leave it out.
        """
        if self.indexer.shared:
            return []
        core = self.core(w.sequence)
        (forward,) = sparse_forward(w, core)
        flop = 2.0 * w.tokens * (self.heads // w.tp) * core.keys * core.qk_dim
        target = replace(
            forward,
            name="indexer.target",
            direction="I",
            flop=flop,
            uncounted_flop=flop,
            bytes_written=w.tokens * core.keys * FP32,
        )
        return [target, *self.indexer.backward(w)]

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the absorbed products, of the query's projection and of the latents."""
        if not self.reach.limits(w.sequence):
            return super().inputs_gradient(w)
        t, heads, name, q_in = w.tokens, self.heads // w.tp, *self._query(w)
        width = heads * self.sizes.qk_head_dim
        out = [
            self._absorbed(w, "absorb_keys", "I"),
            *([rope("rope_q.backward", "I", t * heads * self.qk_rope_dim)] if self.rotary else []),
            *linear_input_gradient(w, name, t, width, q_in),
            *([rope("rope_k.backward", "I", t * self.qk_rope_dim)] if self.rotary else []),
        ]
        return [*out, *channel_casts(w, name, t, width, q_in), *self._latent_gradient(w)]

    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections, in the absorbed form head by head, and of the indexer."""
        index = self.indexer.weight_gradient(w, self.q_lora_rank or w.hidden)
        up, *rest = super().inputs_weight_gradient(w)
        if not self.reach.limits(w.sequence):
            return [up, *rest, *index]
        heads, latent = self.heads // w.tp, self.kv_lora_rank
        absorbed = [
            gemm(f"{name}.wgrad", "W", own, latent, w.tokens * heads, "bf16", cls="wgrad_gemm", groups=heads)
            for name, own in (("absorb_keys", self.qk_nope_dim), ("absorb_values", self.v_dim))
        ]
        return [*absorbed, *rest, *index]

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Tensors of latent attention, the absorbed queries and outputs, and those of the indexer.

        Keys and values are kept as latents; the absorbed form is taken at any length.
        """
        latent = self.heads * self.kv_lora_rank
        up: frozenset[Module] = frozenset({"mla_up_proj"})
        core: frozenset[Module] = frozenset({"core_attn"})
        for tensor in super().cached_tensors(precision, policy, False):
            if tensor.name == "q, k, v":
                queries = self.heads * self.sizes.qk_head_dim + latent + self.heads * self.qk_rope_dim
                size = row_bytes(queries, "bf16")
                yield CachedTensor("queries, absorbed queries", size, "expanded", "width", modules=up)
            else:
                yield tensor
        output = row_bytes(latent, "bf16")
        yield CachedTensor("latent output", output, "kept", "width", kept_by_op=True, modules=core)
        yield from self.indexer.cached()

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the projections; the products of single heads do not count as dense GEMMs."""
        yield from (out for out in super().inputs_gemm_outputs() if out.name != "kv_up")
        if not self.indexer.shared:
            yield GemmOutput("indexer.q_up", self.indexer.width, "none")
            yield GemmOutput("indexer.key", self.indexer.head_dim, "none")

    def unfused_scores(self, sequence: int) -> float:
        """0 where keys are left out: the sparse kernels are fused."""
        return 0.0 if self.reach.limits(sequence) else super().unfused_scores(sequence)

    def context_elements(self, sequence: int) -> float:
        """Elements of the latent, the rotated key and the indexer's key of a token, for all heads."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_dim + index
