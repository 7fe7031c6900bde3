"""Loads the kernels that frameworks run between GEMMs and at the end of a step, and applies them (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import Source
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.frameworks.eager import Operators, each
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.softmax import SoftmaxAttention
from moesim.simulator.model.block import Layer
from moesim.simulator.model.operator import Operator, OperatorClass, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import move

FILE = "framework_kernels.yaml"
PLAIN = "plain"
"""Name of the list of layers that changes nothing, and of that of steps which only clears gradients."""

Elements = Literal["hidden", "heads", "qkv", "scores"]
Feature = Literal["dropout", "attention-bias", "rotary", "unfused"]
Tensor = Literal["gradient", "parameter", "master", "moment", "single", "half", "byte"]


class LayerKernel(Frozen):
    """One kernel of a framework's layer; `read` and `written` are bytes for one of its elements."""

    at: str
    name: str
    cls: OperatorClass
    variant: str
    elements: Elements
    read: float = Field(ge=0)
    written: float = Field(ge=0)
    launches: int = Field(default=1, ge=1)
    only: Feature | None = None
    fused: bool = False
    """Whether the bytes belong to the kernel before, so that it launches nothing of its own."""
    source: Source


class LayerList(Frozen):
    """Kernels of a framework's layer, and the names of the operators that they stand for."""

    title: str
    instead_of: tuple[str, ...]
    includes: str | None = None
    kernels: tuple[LayerKernel, ...]


class StepKernel(Frozen):
    """One kernel at the end of a step over the local parameters, or over those that the GPU owns."""

    name: str
    of: Literal["local", "owned"]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    source: Source


class StepList(Frozen):
    """Kernels at the end of a framework's step, and the names of the operators that they stand for."""

    title: str
    instead_of: tuple[str, ...] = ()
    kernels: tuple[StepKernel, ...]


class FrameworkKernels(Frozen):
    """All lists (`data/framework_kernels.yaml`)."""

    layers: dict[str, LayerList]
    steps: dict[str, StepList]


class LayerSizes(Struct, frozen=True):
    """Elements of a layer's tensors on one rank, and the features that kernels may ask for."""

    elements: Mapping[Elements, float]
    features: frozenset[Feature]
    whole: bool
    """Whether recompute repeats the whole layer; else a repeated norm repeats itself alone."""


@lru_cache(maxsize=1)
def framework_kernels() -> FrameworkKernels:
    """Every shipped list. Raises InputError for a malformed file."""
    text = resources.files("moesim.simulator").joinpath("data", FILE).read_text("utf-8")
    return validate_model(FrameworkKernels, parse_mapping(text, FILE), FILE)


List = TypeVar("List")


def _named(lists: Mapping[str, List], name: str, key: str) -> List:
    if name not in lists:
        known = [PLAIN, *lists]
        raise InputError(
            f"software.{key}={name!r} is not known{nearest(name, known)}; known: {', '.join(known)}",
            key=f"software.{key}",
            nearest=tuple(known),
        )
    return lists[name]


def layer_sizes(
    layer: Layer,
    hidden: int,
    tokens: float,
    sequence: int,
    features: Iterable[Feature],
    whole: bool,
    tp: int = 1,
    split_tokens: bool = False,
) -> LayerSizes:
    """Sizes of a layer for `tokens` rows on a rank; attention without a softmax has hidden states only.

    `features`: what the framework adds to those of the model. `whole`: see `LayerSizes`. `split_tokens`:
    whether tensor-parallel ranks split element-wise work.
    """
    rows = tokens / tp if split_tokens else tokens
    elements: dict[Elements, float] = {"hidden": rows * hidden}
    found: set[Feature] = set(features)
    attention = layer.attention
    if isinstance(attention, SoftmaxAttention):
        heads, kv_heads, qk, v = attention.sizes
        elements["heads"] = tokens * heads * v / tp
        elements["qkv"] = tokens * (heads * qk + kv_heads * (qk + v)) / tp
        elements["scores"] = tokens * heads * sequence / tp
    if isinstance(attention, GroupedQueryAttention):
        found |= {"rotary"} if attention.rotary else set()
        found |= {"attention-bias"} if attention.qkv_bias else set()
    return LayerSizes(elements, frozenset(found), whole)


# -- layers ----------------------------------------------------------------------------------------------


def with_layer_kernels(
    operators: Operators, name: str, sizes: LayerSizes
) -> dict[Phase, tuple[Operator, ...]]:
    """Operators of a layer with the kernels of the framework's list `name` (docs/model.md, eq. O30).

    Raises InputError for an unknown list.
    """
    lists = framework_kernels().layers
    chosen = _named(lists, name, "layer_kernels")
    included = () if chosen.includes is None else lists[chosen.includes].kernels
    by_place: dict[str, list[LayerKernel]] = {}
    for kernel in (*chosen.kernels, *included):
        by_place.setdefault(kernel.at, []).append(kernel)

    def at(op: Operator) -> Iterable[Operator]:
        base = op.name.removesuffix(".recompute")
        if base not in chosen.instead_of:
            yield op
        norm_alone = op.recompute and op.cls == "norm" and not sizes.whole
        for kernel in by_place.get(base, ()):
            elements = sizes.elements.get(kernel.elements, 0.0)
            asked = kernel.only is None or kernel.only in sizes.features
            if elements > 0.0 and asked and (kernel.cls == "norm" or not norm_alone):
                made = move(
                    f"{kernel.name}.recompute" if op.recompute else kernel.name,
                    kernel.cls,
                    op.direction,
                    elements * kernel.read,
                    elements * kernel.written,
                    variant=kernel.variant,
                    launches=0 if kernel.fused else kernel.launches,
                )
                yield replace(made, recompute=op.recompute)

    return each(operators, at)


# -- end of the step -------------------------------------------------------------------------------------


def with_step_kernels(
    operators: Iterable[Operator], name: str, owned: float, local: float, recipe: Precision, accumulated: bool
) -> tuple[Operator, ...]:
    """Operators of the optimizer with the kernels of the framework's list `name` (docs/model.md, eq. C50).

    `owned` and `local` count parameters. `accumulated`: GEMMs add into buffers, which are cleared once a step
    (eq. C13); a framework's list holds that itself. Raises InputError for an unknown list.
    """
    size: dict[Tensor, float] = {
        "gradient": BYTES_PER_ELEMENT[recipe.gradients],
        "parameter": BYTES_PER_ELEMENT[recipe.parameters],
        "master": BYTES_PER_ELEMENT[recipe.master_weights],
        "moment": BYTES_PER_ELEMENT[recipe.moments],
        "single": 4.0,
        "half": 2.0,
        "byte": 1.0,
    }
    if name == PLAIN:
        cleared = move("gradients.zero", "optimizer", "W", 0.0, local * size["gradient"], variant="update")
        return (*operators, cleared) if accumulated else tuple(operators)
    chosen = _named(framework_kernels().steps, name, "step_kernels")
    kept = tuple(op for op in operators if op.name not in chosen.instead_of)
    added = []
    for kernel in chosen.kernels:
        n = local if kernel.of == "local" else owned
        read, written = (n * sum(size[t] for t in tensors) for tensors in (kernel.read, kernel.written))
        added.append(move(kernel.name, "optimizer", "W", read, written, variant="update"))
    return (*kept, *added)
