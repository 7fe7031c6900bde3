"""How a model is split over ranks, the rows of a step, and linear layers by format of weights."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.model.operator import Dtype, Operator, OperatorClass
from moesim.simulator.model.primitives import BF16, gemm, move
from moesim.simulator.scenario.serving import Format
from moesim.simulator.serving.scheduler import StepBatch

ELEMENT_BYTES: dict[Format, float] = {
    "bf16": 2.0, "fp8": 1.0 + 4.0 / 128.0 / 128.0, "nvfp4": 0.5 + 1.0 / 16.0, "mxfp4": 0.5 + 1.0 / 32.0,
}  # fmt: skip
"""Bytes of a weight with its share of the scales: one FP32 for 128 x 128 in FP8 (DeepSeek-V3 report, 3.3.2),
one byte for 16 in NVFP4 and for 32 in MXFP4 (OCP Microscaling specification 1.0)."""
COMPUTE: dict[Format, Dtype] = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
"""Format of the product; `prices` takes a wider one where a card lacks it."""
ACTIVATION_BYTES: dict[Format, float] = {"bf16": 2.0, "fp8": 1.03125, "nvfp4": 0.5625, "mxfp4": 2.0}
"""Bytes of an element of the input. MXFP4 takes BF16 inputs on cards without FP4."""


class Split(Struct, frozen=True):
    """How a model is spread over the ranks of a replica, and in which formats.

    `tp`: ranks that split attention, dense FFNs and shared experts; `expert_tp`, `ep`: that split and share
    out the routed experts. `shared_tp`: ranks that split shared experts, where not `tp` (1: every rank has
    all of them for its own tokens). `weights`, `experts`, `cache`: formats of linear layers, of routed
    experts, of keys and values. `redundant_experts`: replicas over all ranks of a group. `kernels`: family of
    the experts' kernels, `deepgemm` (masked in decodes, contiguous in prefills), `fused` (vLLM's and
    SGLang's Triton kernels), or for MXFP4 `marlin` (vLLM's) and `triton` (OpenAI's). `attention`: those of
    decode attention with sinks, where measured: `fa3` (vLLM's on Hopper). `engine`: whose modules have a
    fixed time of their own (`vllm`, `sglang`, `trtllm`).
    """

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    weights: Format = "bf16"
    experts: Format = "bf16"
    cache: Format = "bf16"
    redundant_experts: int = 0
    shared_tp: int | None = None
    kernels: str = "fused"
    engine: str = ""
    attention: str = ""


class StepRows(NamedTuple):
    """Token rows of one rank's step.

    `tokens`: all, of which `decodes` (with drafts that are checked) and `prefills`; `sequences`: whose logits
    are needed; `context`: keys that decodes see in all, `per_sequence` of them a sequence; `pairs`: keys that
    prefills see in all, of `cached` keys in `prompts` prompts.
    """

    tokens: float
    decodes: float
    prefills: float
    sequences: float
    context: float
    pairs: float
    per_sequence: float = 1.0
    prompts: float = 1.0
    cached: float = 0.0

    def decode_keys(self, cap: float = inf, ratio: float = 1.0) -> float:
        """Keys that decodes see in all where a query sees at most `cap` of every `ratio`-th one."""
        return self.decodes * min(self.context / self.decodes / ratio, cap) if self.decodes else 0.0

    def prefill_keys(self, cap: float = inf, ratio: float = 1.0) -> float:
        """The same of prefills, of prompts of equal length (eq. Q4)."""
        if not self.prefills:
            return 0.0
        each = self.prefills / self.prompts
        end = max(self.keys_formed / self.prompts, each)
        limit = cap * ratio

        def up_to(x: float) -> float:
            return x * x / 2.0 if x <= limit else limit * limit / 2.0 + (x - limit) * limit

        return min(self.prompts * (up_to(end) - up_to(end - each)), self.pairs) / ratio

    @property
    def keys_formed(self) -> float:
        """Keys of the prompts of prefills, earlier chunks included."""
        if self.cached or not self.prefills:
            return self.cached
        return self.prompts * (self.pairs / self.prefills + (self.prefills / self.prompts - 1.0) / 2.0)

    @classmethod
    def of(cls, batch: StepBatch, per_step: int = 1) -> StepRows:
        """Rows of a batch whose decodes bring `per_step` tokens each (1 and the drafts that are checked)."""
        decodes, tokens = float(batch.decodes * per_step), float(batch.prefill_tokens)
        seen = batch.prefill_pairs / tokens if tokens else 0.0
        each = tokens / batch.prefills if batch.prefills else 0.0
        cached = batch.prefills * (seen + (each - 1.0) / 2.0)  # a prompt's last token sees all of its keys
        return cls(
            decodes + tokens, decodes, tokens, decodes + batch.prefills, float(batch.context * per_step),
            float(batch.prefill_pairs), float(per_step), float(batch.prefills), cached,
        )  # fmt: skip


def element_bytes(fmt: Format) -> float:
    """Bytes of an element of weights or cache with its share of the scales."""
    return ELEMENT_BYTES[fmt]


def product(
    name: str, m: float, n: float, k: float, fmt: Format, *, cls: OperatorClass = "gemm", groups: int = 1,
    variant: str = "",
) -> Operator:  # fmt: skip
    """A GEMM [m, k] x [k, n] with weights of a format (eq. Q1); `groups` of them in a grouped one."""
    op = gemm(name, "F", m, round(n), k, COMPUTE[fmt], cls=cls, groups=groups, variant=variant or fmt)
    return replace(op, bytes_read=m * k * ACTIVATION_BYTES[fmt] + groups * n * k * ELEMENT_BYTES[fmt])


def linear(name: str, m: float, n: float, k: float, fmt: Format, *, cast: bool = True) -> list[Operator]:
    """A linear layer; FP8 and NVFP4 quantise the input first, in one kernel, unless the one before did."""
    if not m:
        return []
    gemm_op = product(name, m, n, k, fmt)
    if fmt in ("bf16", "mxfp4") or not cast:
        return [gemm_op]
    written = m * k * ACTIVATION_BYTES[fmt]
    return [move(f"{name}.cast", "cast", "F", m * k * BF16, written, variant="token", dtype="fp8"), gemm_op]
