"""The space of a plan search: values to try for each key, and the default values."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.common.lists import parse_integers
from moesim.simulator.layout.activations import RECOMPUTED
from moesim.simulator.layout.stages import MOST_WITHOUT_LAYERS
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.recompute import MODULES, Recompute, RecomputeKey
from moesim.simulator.model.repeated import check_recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.kernel_sms import published_sms
from moesim.simulator.planner.placements import Placement, default_placements, parse_placement
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.routing import Eplb
from moesim.simulator.schedules import SCHEDULES


def _expanded(value: Any, info: ValidationInfo) -> Any:
    """Turn an expression or a single integer into a list of integers; leave a list as it is."""
    if isinstance(value, str):
        try:
            return parse_integers(value, str(info.field_name))
        except InputError as error:
            raise ValueError(str(error)) from None
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | dict | Precision | Eplb) else value


def _choices(value: Any) -> Any:
    """A list of policies and lists of modules; modules that stand in it on their own are refused."""
    listed = _listed(value)
    for name in listed if isinstance(listed, list | tuple) else ():
        if isinstance(name, str) and name in MODULES:
            raise ValueError(
                f"{name} is a module, not a policy: write every choice as a list of modules, such as "
                f"[[{name}]], or join them as in layernorm+moe_act"
            )
    return listed


Count = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Counts = Annotated[tuple[Count, ...] | None, BeforeValidator(_expanded)]
Names = Annotated[tuple[str, ...] | None, BeforeValidator(_listed)]


class PlanSpace(BaseModel):
    """Values to try by key; a key that is left out takes its default (docs/planner.md lists them).

    Integers may be written as expressions ("1..16:2x"). `variants` crosses all of it with other scenario
    keys by dotted path (cluster.nodes, routing.expert_load_cv, ...), each with a list of values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: Counts = None
    pp: Counts = None
    ep: Counts = None
    cp: Counts = None
    vpp: Counts = None
    expert_tp: Counts = None
    microbatch: Counts = None
    zero_stage: Annotated[
        tuple[Annotated[int, Field(ge=0, le=3, strict=True)], ...] | None, BeforeValidator(_expanded)
    ] = None
    schedule: Names = None
    recompute: Annotated[tuple[RecomputeKey, ...] | None, BeforeValidator(_choices)] = None
    precision: Annotated[tuple[str | Precision, ...] | None, BeforeValidator(_listed)] = None
    sms: Annotated[
        tuple[Annotated[int, Field(ge=0, le=1_000_000, strict=True)], ...] | None, BeforeValidator(_expanded)
    ] = None
    placement: Annotated[tuple[str | Eplb, ...] | None, BeforeValidator(_listed)] = None
    """Placements of experts: in order, hierarchical or global; the latter two may add redundant experts, as
    in global+64."""
    layout: Literal["balanced", "scenario"] = "balanced"
    """`balanced` balances the stages; `scenario` keeps the scenario's stages.layers, which fixes their
    number."""
    headroom: float | None = Field(None, ge=0.0, lt=1.0, allow_inf_nan=False)
    """None: no plan at risk, so that what framework and allocator may reserve fits too (eq. M10); else the
    share of the memory that the bytes in use leave free."""
    variants: dict[str, tuple[Any, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _nothing_empty(self) -> PlanSpace:
        for key, values in [*((k, getattr(self, k)) for k in LISTS), *self.variants.items()]:
            if values is not None and not values:
                raise ValueError(f"{key} is an empty list: no plan is left; give a value or leave it out")
        for name in self.schedule or ():
            if name not in SCHEDULES:
                raise ValueError(f"schedule {name!r} is not known{nearest(name, list(SCHEDULES))}")
        for placement in self.placement or ():
            parse_placement(placement)
        for recipe in self.precision or ():
            if isinstance(recipe, str) and recipe not in PRECISIONS:
                raise ValueError(f"precision {recipe!r} is not known{nearest(recipe, list(PRECISIONS))}")
        return self


LISTS = (
    "tp", "pp", "ep", "cp", "vpp", "expert_tp", "microbatch", "zero_stage", "schedule", "recompute",
    "precision", "sms", "placement",
)  # fmt: skip
"""Keys of a space that hold lists of values."""


def load_space(source: PlanSpace | str | Path | None) -> PlanSpace:
    """Load a space from a YAML or JSON file; a PlanSpace is returned as it is, None is the default space.

    Raises InputError for a file that is missing or malformed.
    """
    if isinstance(source, PlanSpace):
        return source
    if source is None:
        return PlanSpace()
    return validate_model(PlanSpace, load_mapping(Path(source)), str(source))


@dataclass(frozen=True, slots=True)
class Space:
    """A space in which every key has a list of values."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    ep: tuple[int, ...]
    cp: tuple[int, ...]
    vpp: tuple[int, ...]
    expert_tp: tuple[int, ...]
    microbatch: tuple[int, ...]
    zero_stage: tuple[int, ...]
    schedule: tuple[str, ...]
    recompute: tuple[Recompute, ...]
    precision: tuple[str | Precision, ...]
    sms: tuple[int, ...]
    placement: tuple[Placement, ...]
    headroom: float | None

    @property
    def recipes(self) -> tuple[Precision, ...]:
        """The recipe of each precision."""
        return tuple(PRECISIONS[p] if isinstance(p, str) else p for p in self.precision)

    @property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        """Schedules with their values of vpp; a schedule that fixes vpp itself appears once."""
        free = [v for v in self.vpp if v > 1]
        return tuple((s, v) for s in self.schedule for v in (free if SCHEDULES[s].free_vpp else [1]))

    @property
    def inner(self) -> int:
        """Number of combinations of precision, recompute, SMs and ZeRO stage in each frame."""
        return prod(map(len, (self.precision, self.recompute, self.sms, self.zero_stage)))

    @property
    def per_frame(self) -> int:
        """Number of plans of each frame: `inner` combinations, each with every placement of the experts."""
        return self.inner * len(self.placement)

    @property
    def size(self) -> int:
        """Number of plans before any is refused."""
        outer = (self.tp, self.pp, self.ep, self.cp, self.expert_tp, self.microbatch, self.schedules)
        return self.per_frame * prod(map(len, outer))


def with_defaults(space: PlanSpace, scenario: Scenario, shape: ModelShape, cluster: Cluster) -> Space:
    """Fill in the defaults for a model on a cluster (docs/planner.md lists them).

    tp: powers of two inside a node. pp: divisors of the number of GPUs, at most two more than the layers. ep:
    divisors of the number of experts. cp: 1, 2, 4 and 8. vpp and microbatch: 1, 2 and 4. schedule and
    zero_stage: all. recompute: every policy that changes compute or memory, and the scenario's modules.
    precision: the scenario's, bf16, and fp8 if the accelerator has it. sms: the scenario's, and
    for a MoE those with which its communication kernels were published; 0 if a dedicated engine moves them.
    placement: see `default_placements`.
    Raises InputError if communication would take every SM, or any SM beside a dedicated engine, and for a
    module to recompute that the model does not have.
    """
    n = cluster.n_gpus
    own = scenario.precision
    in_memory = scenario.software.attention == "unfused"  # the policy attention recomputes the scores
    hardware: list[str | Precision] = ["bf16"]
    if "fp8" in cluster.accelerator.peak:
        hardware.insert(0, "fp8")
    most_stages = shape.n_layers + MOST_WITHOUT_LAYERS
    moe, engine = shape.moe, cluster.accelerator.communication_engine
    published = published_sms(scenario.communication.kernels) if moe else None
    sms = {scenario.communication.sms, *(published.tried if published else ())}
    if engine is None:
        most = cluster.accelerator.n_sms
        sms = {s for s in sms if 0 < s < most} or {scenario.communication.sms}
    else:
        sms = {0}
    defaults: dict[str, tuple[Any, ...]] = {
        "tp": _powers(cluster.node.n_gpus),
        "pp": tuple(d for d in range(1, min(n, most_stages) + 1) if n % d == 0),
        "ep": _divisors(moe.experts) if moe else (1,),
        "cp": _powers(8),
        "vpp": (1, 2, 4),
        "expert_tp": (1,),
        "microbatch": (1, 2, 4),
        "zero_stage": (0, 1, 2, 3),
        "schedule": tuple(SCHEDULES),
        "recompute": (
            *(p for p in RECOMPUTED if p != "attention" or in_memory),
            *(() if isinstance(scenario.recompute, str) else (scenario.recompute,)),
        ),
        "precision": (own, *(p for p in hardware if p != own and PRECISIONS[str(p)] != scenario.recipe)),
        "placement": default_placements(scenario, shape),
        "sms": tuple(sorted(sms)),
    }
    wanted = {key: getattr(space, key) for key in LISTS}
    if space.placement:
        wanted["placement"] = tuple(map(parse_placement, space.placement))
    chosen = {key: tuple(dict.fromkeys(wanted[key] or defaults[key])) for key in LISTS}
    for choice in chosen["recompute"]:
        check_recompute(shape, choice)
    _check_sms(max(chosen["sms"]), cluster)
    return Space(**chosen, headroom=space.headroom)


def _check_sms(taken: int, cluster: Cluster) -> None:
    """Raise InputError if communication takes every SM, or any SM beside a dedicated engine."""
    engine = cluster.accelerator.communication_engine
    if engine is None and taken and taken >= cluster.accelerator.n_sms:
        most = cluster.accelerator.n_sms
        raise InputError(
            f"sms={taken} leaves no SM for compute: {cluster.accelerator.name} has {most}; "
            f"use at most {most - 1}"
        )
    if engine is not None and taken:
        raise InputError(
            f"sms={taken}: on {cluster.accelerator.name} a dedicated engine ({engine.name}) moves "
            "collectives; use sms: 0, or leave it out"
        )


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << k for k in range(most.bit_length()) if 1 << k <= most)


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
