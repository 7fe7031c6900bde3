"""Loads the kernels that frameworks run between GEMMs and at the end of a step, and applies them (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Literal, Protocol, TypeVar

from pydantic import Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import Source
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
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


class Split(Protocol):
    """The degrees of parallelism that cut a layer's tensors."""

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks split element-wise work."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
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
    plan: Split,
    features: Iterable[Feature],
    whole: bool,
) -> LayerSizes:
    """Sizes of a layer for `tokens` rows on a rank; attention without a softmax has hidden states only.

    `features`: what the framework adds to those of the model. `whole`: see `LayerSizes`.
    """
    rows = tokens / plan.tp if plan.sequence_parallel else tokens
    elements: dict[Elements, float] = {"hidden": rows * hidden}
    found: set[Feature] = set(features)
    attention = layer.attention
    if isinstance(attention, SoftmaxAttention):
        heads, kv_heads, qk, v = attention.sizes
        elements["heads"] = tokens * heads * v / plan.tp
        elements["qkv"] = tokens * (heads * qk + kv_heads * (qk + v)) / plan.tp
        elements["scores"] = tokens * heads * sequence / plan.tp
    if isinstance(attention, GroupedQueryAttention):
        found |= {"rotary"} if attention.rotary else set()
        found |= {"attention-bias"} if attention.qkv_bias else set()
    return LayerSizes(elements, frozenset(found), whole)


# -- layers ----------------------------------------------------------------------------------------------


def with_layer_kernels(
    operators: Mapping[Phase, tuple[Operator, ...]], name: str, sizes: LayerSizes
) -> dict[Phase, tuple[Operator, ...]]:
    """Operators of a layer with the kernels of the framework's list `name` (docs/model.md, eq. O30).

    Raises InputError for an unknown list.
    """
    chosen = _named(framework_kernels().layers, name, "layer_kernels")
    by_place = _by_place(chosen)
    return {
        phase: tuple(new for op in ops for new in _at(op, chosen.instead_of, by_place, sizes))
        for phase, ops in operators.items()
    }


def _by_place(chosen: LayerList) -> dict[str, list[LayerKernel]]:
    kernels = list(chosen.kernels)
    if chosen.includes is not None:
        kernels += framework_kernels().layers[chosen.includes].kernels
    places: dict[str, list[LayerKernel]] = {}
    for kernel in kernels:
        places.setdefault(kernel.at, []).append(kernel)
    return places


def _at(
    op: Operator, instead_of: Sequence[str], by_place: Mapping[str, Sequence[LayerKernel]], sizes: LayerSizes
) -> Iterable[Operator]:
    base = op.name.removesuffix(".recompute")
    own = [] if base in instead_of else [op]
    if op.recompute and op.cls == "norm" and not sizes.whole:
        kernels: Sequence[LayerKernel] = [k for k in by_place.get(base, ()) if k.cls == "norm"]
    else:
        kernels = by_place.get(base, ())
    return [*own, *(new for kernel in kernels for new in _operator(kernel, op, sizes))]


def _operator(kernel: LayerKernel, op: Operator, sizes: LayerSizes) -> Iterable[Operator]:
    elements = sizes.elements.get(kernel.elements, 0.0)
    if elements <= 0.0 or (kernel.only is not None and kernel.only not in sizes.features):
        return
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


# -- end of the step -------------------------------------------------------------------------------------


def with_step_kernels(
    operators: Iterable[Operator], name: str, owned: float, local: float, recipe: Precision, accumulated: bool
) -> tuple[Operator, ...]:
    """Operators of the optimizer with the kernels of the framework's list `name` (docs/model.md, eq. C50).

    `owned` and `local` count parameters. `accumulated`: GEMMs add into buffers, which are cleared once a step
    (eq. C13); a framework's list holds that itself. Raises InputError for an unknown list.
    """
    size = _tensor_bytes(recipe)
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


def _tensor_bytes(recipe: Precision) -> dict[Tensor, float]:
    return {
        "gradient": BYTES_PER_ELEMENT[recipe.gradients],
        "parameter": BYTES_PER_ELEMENT[recipe.parameters],
        "master": BYTES_PER_ELEMENT[recipe.master_weights],
        "moment": BYTES_PER_ELEMENT[recipe.moments],
        "single": 4.0,
        "half": 2.0,
        "byte": 1.0,
    }
