"""Choices of recompute: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import Struct
from pydantic import BeforeValidator

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest

RecomputePolicy = Literal["none", "attention", "selective", "op", "full", "deepseek-v3"]
"""Tensors that the backward pass computes again.

- none: it computes nothing again.
- attention: it repeats the core attention where the scores go through memory (arXiv 2205.05198, section 5);
  the backward of flash attention computes its scores again under every policy.
- selective: it repeats norms, MLA up-projections and SwiGLU outputs.
- op: it repeats everything but the core attention, the first, third, ... dense GEMM of a layer and the
  all-to-alls (torchtitan's "op"; eq. M7).
- full: it repeats every layer from its input.
- deepseek-v3: as selective, with the attention output kept in the 12-bit format E5M6 (DeepSeek-V3 report,
  sections 3.2.3 and 3.3.3).
"""

Module = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]
"""Part of a layer that the backward pass computes again, by Megatron-Core's names (`recompute_modules` in
NVIDIA/Megatron-LM, `megatron/core/transformer/transformer_config.py`).

- core_attn: the core attention, also where it is one flash kernel.
- layernorm: the norms before the attention and before the FFN.
- mla_up_proj: the norms of the latents of MLA, its up-projections, rotation and packing.
- moe_act: the activation between both grouped GEMMs of the routed experts.
- mlp: the FFN of a dense layer.
- moe: the whole MoE layer: router, shared and routed experts, dispatch and combine.
- shared_experts: the shared experts of a MoE layer.
"""

POLICIES: tuple[RecomputePolicy, ...] = get_args(RecomputePolicy)
MODULES: tuple[Module, ...] = get_args(Module)

Recompute: TypeAlias = RecomputePolicy | tuple[Module, ...]
"""A policy, or a list of modules in the order of `MODULES` without repeats."""

_POLICY_MODULES: dict[str, frozenset[Module]] = {"selective": frozenset({"layernorm", "mla_up_proj"})}
"""Modules whose operators a policy repeats, whatever the kind of kernels."""


def modules_of(recompute: str | tuple[Module, ...]) -> frozenset[Module]:
    """Modules whose operators the backward pass repeats one by one.

    `full` and `op` repeat layers as a whole and have none; `attention` has none where the core attention is
    fused.
    """
    if isinstance(recompute, str):
        return _POLICY_MODULES.get(recompute, frozenset())
    return frozenset(recompute)


def recompute_label(recompute: Recompute) -> str:
    """Name of a choice: that of the policy, or its modules joined by `+`."""
    return recompute if isinstance(recompute, str) else "+".join(recompute)


def parse_recompute(value: Any) -> Recompute:
    """Read a policy, a list of modules, or a label such as `layernorm+moe_act`.

    Modules come back in the order of `MODULES` without repeats. Raises InputError for an unknown name and for
    an empty list.
    """
    if isinstance(value, str):
        if value in POLICIES:
            return value
        names: list[Any] = value.split("+")
        if len(names) == 1 and value not in MODULES:
            known: list[str] = [*POLICIES, *MODULES]
            raise InputError(
                f"{value[:60]!r} is not one of {', '.join(POLICIES)}, nor a list of {', '.join(MODULES)}"
                f"{nearest(value, known)}"
            )
    elif isinstance(value, list | tuple):
        names = list(value)
    else:
        raise InputError(
            f"{str(value)[:60]!r} is neither a policy ({', '.join(POLICIES)}) nor a list of modules"
        )
    if not names:
        raise InputError("an empty list of modules recomputes nothing: write none")
    for name in names:
        if name not in MODULES:
            hint = nearest(str(name), list(MODULES))
            raise InputError(f"the module {str(name)[:60]!r} is not one of {', '.join(MODULES)}{hint}")
    return tuple(module for module in MODULES if module in names)


def _parsed(value: Any) -> Recompute:
    try:
        return parse_recompute(value)
    except InputError as error:
        raise ValueError(str(error)) from None


RecomputeKey = Annotated[RecomputePolicy | tuple[Module, ...], BeforeValidator(_parsed)]
"""A choice of recompute as a key of a scenario, written as a name or as a list of modules."""


# -- tensors that a block may keep from its forward to its backward pass (plain data) ------------------

Role = Literal[
    "residual", "norm output", "latent", "expanded", "kept", "linear input", "swiglu output", "scores"
]  # fmt: skip
"""Role of a tensor in its block, by which a recompute policy decides whether to keep it."""

Sharding = Literal["tokens", "width", "none"]
"""How tensor parallelism shards a tensor: by tokens (with sequence parallelism only), by width or not."""


class CachedTensor(Struct, frozen=True):
    """One tensor of a block, with its bytes per token of the micro-batch and its sharding."""

    name: str
    bytes_per_token: float
    role: Role
    sharding: Sharding
    kept_by_op: bool = False
    """Whether the recompute policy `op` keeps the tensor although it is not the output of a counted GEMM."""
    modules: frozenset[Module] = frozenset()
    """Modules of which the recompute of any one frees the tensor."""
    routed: bool = False
    """Whether its rows are those that routed experts receive."""
    whole_in_dtensor: bool = False
    """Whether every tensor-parallel rank holds all tokens of it under PyTorch's DTensor (eq. M46)."""


class GemmOutput(Struct, frozen=True):
    """Output of a dense GEMM of a layer, with its elements per token and its sharding."""

    name: str
    width: float
    sharding: Sharding
    row_parallel: bool = False
    """Whether every tensor-parallel rank computes a part of the sum over all columns, for all tokens."""
