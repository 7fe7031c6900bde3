"""Counts the framework calls that the host makes for an operator, by kind of call.

The counts are not fitted. PyTorch's calls were counted in torchtitan 0.2.2 (`models/llama3`, `deepseek_v3`,
`moe`). A module library (Transformer Engine) makes one call for each kernel of the operator list, a module
call for linear layers and attention, and in a grouped layer one more for every expert. Megatron core adds its
own Python: of a layer, its router and its dispatcher, of a micro-batch, and a hook for every parameter whose
gradient it takes (the weights of each expert are parameters of their own).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesim.hwmodels.host import CallKind
from moesim.simulator.model.operator import CORE_ATTENTION, GEMM_CLASSES, SCAN_CLASSES, Operator
from moesim.simulator.model.primitives import AMAX_LAUNCHES

Modules = Literal["torch", "transformer-engine", "megatron-core"]
"""What the host calls: PyTorch's own operators, modules of Transformer Engine, or these in Megatron core."""


SCAN_KERNELS = 7.0
"""Kernels that the host launches for a scan beyond the first: gated delta rule of fla-core 0.6.0, forward."""


class Calls(NamedTuple):
    """Calls of one kind that the forward makes (`forward` true), or that autograd makes in the backward."""

    kind: CallKind
    times: float
    forward: bool


def calls_of(op: Operator, modules: Modules) -> tuple[Calls, ...]:
    """Count the calls of one operator; each of the two backward GEMMs of a layer is half a backward call."""
    forward = op.direction == "F" or op.recompute
    own = _megatron(op, forward) if modules == "megatron-core" else ()
    if op.gemm is not None and op.cls in GEMM_CLASSES:
        return own + _gemm(op, op.gemm.groups, modules, forward)
    calls = _torch(op) if modules == "torch" else _module(op)
    return own + tuple(Calls(kind, count, forward) for kind, count in calls)


MEGATRON: dict[str, CallKind] = {
    "attn_norm": "megatron layer",
    "attn_norm.backward": "megatron layer",
    "kv_norm": "megatron latent attention",
    "kv_norm.backward": "megatron latent attention",
    "shared.swiglu": "megatron shared expert",
    "shared.swiglu.backward": "megatron shared expert",
    "gate": "megatron router",
    "gate.dgrad": "megatron router",
    "experts.expand": "megatron dispatcher",
    "experts.expand_gradient": "megatron dispatcher",
    "loss": "megatron micro-batch",
    "loss.backward": "megatron micro-batch",
}
"""Operators at which Megatron core's own Python is counted, once in the forward and once in the backward."""


def _megatron(op: Operator, forward: bool) -> tuple[Calls, ...]:
    """Megatron core's own Python at an operator, and the hooks of the gradients that it completes."""
    kind = MEGATRON.get(op.name.removesuffix(".recompute"))
    own = (Calls(kind, 1.0, forward),) if kind else ()
    weights = int(op.cls == "norm" and not forward)
    if op.direction == "W" and op.gemm is not None:
        weights = op.gemm.groups
    return own + ((Calls("megatron parameter", float(weights), False),) if weights else ())


def parameters_of(op: Operator) -> int:
    """Parameters of PyTorch's modules whose gradients an operator of the backward completes."""
    if op.cls == "norm":
        return int(op.direction != "F" and not op.recompute)
    if op.direction != "W" or op.gemm is None:
        return 0
    return next((n for name, n in SEPARATE.items() if name in op.name.split(".")), 1)


SEPARATE = {"qkv_proj": 3, "gate_up": 2}
"""Numbers of GEMMs that PyTorch code runs in place of one in the operator list, by name of the operator."""


def _gemm(op: Operator, groups: int, modules: Modules, forward: bool) -> tuple[Calls, ...]:
    share, grouped = 1.0 if forward else 0.5, op.cls == "grouped_gemm" or groups > 1
    if modules == "torch":
        count = next((n for name, n in SEPARATE.items() if name in op.name.split(".")), 1)
        return (Calls("grouped product" if grouped else "product", share * count, forward),)
    if op.cls == "gate_gemm":
        return (Calls("product", share, forward),)
    own = Calls("module product", share, forward)
    return (own, Calls("module expert", share * groups, forward)) if grouped else (own,)


def _torch(op: Operator) -> tuple[tuple[CallKind, float], ...]:
    base = op.name.removesuffix(".recompute")
    if op.cls == "permute":
        out: tuple[tuple[CallKind, float], ...] = (("index", 2), ("copy", 1))
        back: tuple[tuple[CallKind, float], ...] = (("put", 2), ("pointwise", 2), ("product", 1))
        if base in ("experts.expand", "experts.reduce_gradient"):
            return out
        return back if base in ("experts.reduce", "experts.expand_gradient") else ()
    if op.variant.startswith("eager_halves"):  # rotary embedding in single operators
        return (("pointwise", float(op.launches)),)
    if op.cls == "elementwise":
        counted = op.variant in ("add", "reduce", "join", "index_add")
        return (("pointwise", float(op.launches)),) if counted else ()
    if op.cls in CORE_ATTENTION:
        return (("attention", 1.0),)
    if op.cls in SCAN_CLASSES:
        return (("attention", 1.0), ("pointwise", SCAN_KERNELS))
    return {
        "indexer": (("attention", 1.0),),
        "indexer_topk": (("pointwise", 1.0),),
        "conv": (("norm", 1.0),),  # a kernel behind an autograd function, like a norm
        "norm": (("norm", 1.0), ("pointwise", float(op.variant.endswith("forward_add")))),
        "swiglu": (("pointwise", float(op.launches) if op.launches > 1 else 2.0),),
        "rope": (("rope", 1.0),),
        "topk": (("gate", float(op.launches)),),
        "copy": (("copy", 1.0),),
        "cast": (("pointwise", 4.0),),
        "transpose": (("pointwise", 1.0),),
        "embedding": (("index", 1.0),),
        "loss": (("pointwise", 2.0),),
    }.get(op.cls, ())  # type: ignore[return-value]


def _module(op: Operator) -> tuple[tuple[CallKind, float], ...]:
    if op.cls in CORE_ATTENTION or op.cls == "indexer":
        return (("module attention", 1.0),)
    if op.cls in SCAN_CLASSES:
        return (("module attention", 1.0), ("pointwise", SCAN_KERNELS))
    if op.cls in ("attention_pre_post", "optimizer"):
        return ()
    if op.cls == "norm":
        return (("norm", 1.0), ("pointwise", float(op.variant.endswith("forward_add"))))
    if op.cls == "permute":
        return (("norm", 1.0),)  # a kernel of its own behind an autograd function, like a norm
    if op.variant == "amax" and op.per_received_row:
        return (("module cast", op.launches / AMAX_LAUNCHES),)
    if op.variant == "tensor" and op.per_received_row and op.launches > 1:
        return ()  # of experts, counted with their largest elements
    return (("pointwise", float(op.launches)),)
