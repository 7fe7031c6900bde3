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

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.inference import (
    AttentionCall,
    core,
    index_operators,
    padded_heads,
    pointwise,
    projection,
)
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.softmax import (
    copy,
    gate_backward,
    gate_forward,
    output_projection,
    output_projection_gradient,
    rope,
)
from moesim.simulator.model.attention.sparse_core import (
    Indexer,
    SparseCore,
    mean_keys,
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

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of scores and values over the keys that are read, in the form that is not absorbed.

        They are those of latent attention with `mean_keys` in place of all keys (eq. A1), so that a share
        of the peak means the same as for dense models. Neither the indexer nor what absorbing adds counts.
        """
        top_k = self.indexer.top_k
        keys = mean_keys(sequence, top_k) if causal else float(min(sequence, top_k))
        return 6.0 * self.heads * keys * (self.sizes.qk_head_dim + self.v_dim)

    # -- operators -----------------------------------------------------------------------------------

    def sparse(self, sequence: int) -> bool:
        """Whether a sequence is longer than the choice, so that the core attention leaves keys out."""
        return sequence > self.indexer.top_k

    def core(self, sequence: int) -> SparseCore:
        """Sizes of the absorbed core attention."""
        latent = self.kv_lora_rank + self.qk_rope_dim
        return SparseCore(
            self.heads,
            latent,
            self.kv_lora_rank,
            latent,
            mean_keys(sequence, self.indexer.top_k),
            self.sizes.qk_head_dim + self.v_dim,
        )

    def forward(self, w: Work) -> list[Operator]:
        """Latents, the indexer's choice, core attention over the chosen keys, output projection."""
        index = self.indexer.forward(w, self.q_lora_rank or w.hidden, self.qk_rope_dim)
        if not self.sparse(w.sequence):
            return [*index, *super().forward(w)]
        return [
            *self.inputs_forward(w),
            *index,
            *self._core_forward(w),
            *gate_forward(w, self.gates // w.tp, self._width(w)),
            *output_projection(w, self._width(w)),
        ]

    def _core_forward(self, w: Work) -> list[Operator]:
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
        if not self.sparse(w.sequence):
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
        if not self.sparse(w.sequence):
            return [*self._loss(w), *self.indexer.backward(w), *super().input_gradient(w)]
        return [
            *output_projection_gradient(w, self._width(w)),
            *gate_backward(w, self.gates // w.tp, self._width(w)),
            *self.recomputed_inputs(w),
            *(recomputed(self._core_forward(w)) if w.repeats("core_attn") else []),
            self._absorbed(w, "absorb_values", "I"),
            *self._loss(w),
            *self.indexer.backward(w),
            *sparse_backward(w, self.core(w.sequence)),
            *self.inputs_gradient(w),
        ]

    def _loss(self, w: Work) -> list[Operator]:
        """The attention's probabilities of the chosen keys, summed over heads: the indexer's target.

        The kernel computes all scores again; model FLOPs leave it out.
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
        return [target]

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the absorbed products, of the query's projection and of the latents."""
        if not self.sparse(w.sequence):
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
        if not self.sparse(w.sequence):
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
        return 0.0 if self.sparse(sequence) else super().unfused_scores(sequence)

    def context_elements(self, sequence: int) -> float:
        """Elements of the latent, the rotated key and the indexer's key of a token, for all heads."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_dim + index


# -- dsa inference -----------------------------------------------------------------------------------
# One call of DeepSeek sparse attention in inference (arXiv 2512.02556, section 2.1).

FP8_KEY_BYTES = 656.0
"""Bytes of one cached key in FlashMLA's FP8 format: 512 in FP8, 4 FP32 scales, 64 rotated ones in BF16."""


DENSE = "sglang-fa3-dense-prefill"
"""Kernel that reads all keys of sequences of at most `top_k` tokens."""


def runs_dense(attention: DSA, call: AttentionCall) -> bool:
    """Whether the framework computes dense attention, because no query has more keys than the choice."""
    return call.stack == "sglang" and call.phase == "prefill" and call.length <= attention.indexer.top_k


def dsa_kernel(attention: DSA, call: AttentionCall) -> str:
    """Kernel of the core attention, by the rules of both frameworks.

    SGLang runs dense FlashAttention 3 while a prefill's sequences have at most `top_k` tokens, FlashMLA's
    sparse kernels in BF16 or FP8 behind that, and FlashAttention 3 with pages of one token in BF16 decode.
    vLLM always runs FlashMLA's sparse kernels.
    """
    if call.stack == "vllm":
        return "vllm-flashmla-sparse" + ("-prefill" if call.phase == "prefill" else f"-{call.kv}-decode")
    if call.phase == "decode":
        return f"sglang-{'flashmla-kv' if call.kv == 'fp8' else 'fa3'}-decode"
    if runs_dense(attention, call):
        return DENSE
    shared = "-shared" if attention.indexer.shared else ""
    return f"sglang-{'flashmla-kv' if call.kv == 'fp8' else 'flashmla-sparse'}{shared}-prefill"


def visited_keys(top_k: int, call: AttentionCall) -> float:
    """Mean keys that the sparse kernel visits for one new token.

    FlashMLA's FP8 kernel goes through the whole list of `top_k` entries, also where fewer keys exist and the
    rest is marked as invalid; the BF16 kernels skip blocks without keys. vLLM's prefill turns the FP8 cache
    into BF16 first.
    """
    whole_list = call.kv == "fp8" and (call.stack == "sglang" or call.phase == "decode")
    return float(top_k) if whole_list else call.mean_keys(most=top_k)


def dsa_operators(attention: DSA, hidden: int, call: AttentionCall) -> list[Operator]:
    """Operators of one call; raises InputError where tensor parallelism does not divide the heads."""
    a, i = attention, attention.indexer
    if a.heads % call.tp:
        raise InputError(f"attention call: tp={call.tp} does not divide heads={a.heads}")
    heads, kernel = a.heads // call.tp, dsa_kernel(attention, call)
    qk_dim = a.qk_nope_dim + a.qk_rope_dim
    q_in = a.q_lora_rank or hidden
    out = [
        projection("down", call, (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_rope_dim, hidden),
        projection("q_up", call, heads * qk_dim, q_in),
    ]
    if not i.shared:
        out.append(projection("indexer.key", call, i.head_dim, hidden))
    if not i.shared and kernel != DENSE:
        out += [
            projection("indexer.q_up", call, i.width, q_in),
            projection("indexer.weights", call, i.heads, hidden, "bf16"),
            *index_operators(call, f"{call.stack}-{call.phase}", heads=i.heads, dim=i.head_dim),
        ]
    elements = 2.0 * heads * qk_dim
    if kernel == DENSE:
        rows = call.batch * call.length / call.tokens
        out += [
            projection("kv_up", call, heads * (a.qk_nope_dim + a.v_dim) * rows, a.kv_lora_rank),
            core(
                call, kernel, heads=heads, dims=qk_dim + a.v_dim, keys=call.mean_keys(), q_dim=qk_dim,
                kv_bytes=2.0 * heads * (qk_dim + a.v_dim), v_dim=a.v_dim, cls="attention_forward",
            ),
        ]  # fmt: skip
        elements += rows * heads * qk_dim
    else:
        latent = a.kv_lora_rank + a.qk_rope_dim
        out += [
            projection("absorb_keys", call, a.kv_lora_rank, a.qk_nope_dim, "bf16", heads),
            core(
                call, kernel, heads=padded_heads(heads), dims=latent + a.kv_lora_rank, q_dim=latent,
                keys=visited_keys(i.top_k, call), v_dim=a.kv_lora_rank,
                kv_bytes=FP8_KEY_BYTES if call.kv == "fp8" else 2.0 * latent,
            ),
            projection("absorb_values", call, a.v_dim, a.kv_lora_rank, "bf16", heads),
        ]  # fmt: skip
    return [*out, pointwise(call, elements), projection("o_proj", call, hidden, heads * a.v_dim)]
