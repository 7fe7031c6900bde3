"""The space of a plan search: values to try for each key, and the default values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.common.texts import key_and_text, parse_integers, parse_values, value_of
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.registry import NONE
from moesim.simulator.layout.stages import MOST_WITHOUT_LAYERS
from moesim.simulator.memory.activations import RECOMPUTED
from moesim.simulator.memory.gpu import FRAMEWORK_BYTES, allocator_slack, highest
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.recompute import MODULES, Recompute, RecomputeKey
from moesim.simulator.model.repeated import check_recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.placements import Placement, default_placements, parse_placement
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.framework import FRAMEWORK, HOST, format_of, runs
from moesim.simulator.scenario.sections import Eplb
from moesim.simulator.scenario.stated import is_stated
from moesim.simulator.schedules import SCHEDULES


def _expanded(value: Any, info: ValidationInfo) -> Any:
    """Turn an expression or a single integer into a list of integers; leave a list as it is."""
    if isinstance(value, str):
        try:
            return parse_integers(value, str(info.field_name))
        except InputError as error:
            raise ValueError(str(error)) from None
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _values(value: Any) -> Any:
    """The values of each variant, of which an expression such as "64..1024:x2" stands for a list."""
    if not isinstance(value, dict):
        return value
    try:
        return {key: parse_values(v, str(key)) if isinstance(v, str) else v for key, v in value.items()}
    except InputError as error:
        raise ValueError(str(error)) from None


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


class PlanSpace(Frozen):
    """Values to try by key; a key that is left out takes its default (docs/planner.md lists them).

    Integers may be written as expressions ("1..16:2x"). `variants` crosses all of it with other scenario
    keys by dotted path (cluster.nodes, routing.expert_load_cv, ...), each with a list of values.
    """

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
    variants: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(_values)] = Field(default_factory=dict)

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


def varied(space: PlanSpace, texts: Sequence[str]) -> PlanSpace:
    """The space with further values to try, each a text KEY=VALUES such as precision=bf16,fp8.

    Raises InputError for an unknown key, one that the space already has, and malformed values.
    """
    known: dict[str, Any] = {key: getattr(space, key) for key in space.model_fields_set - {"variants"}}
    variants = dict(space.variants)
    for text in texts:
        key, values = key_and_text(text, "--vary", "KEY=VALUES, for example precision=bf16,fp8")
        if key not in LISTS and "." not in key:
            raise InputError(
                f"--vary {key}: no key of a space{nearest(key, list(LISTS))}; other scenario keys have a "
                "dotted path, such as cluster.nodes"
            )
        if key in known or key in variants:
            raise InputError(
                f"--vary {key} is given twice, or beside the same key of --space; give one of them"
            )
        if key not in LISTS:
            variants[key] = parse_values(values, f"--vary {key}")
            continue
        as_yaml = values.lstrip().startswith("[")
        names = tuple(name.strip() for name in values.split(","))
        whole = key in ("schedule", "recompute", "precision", "placement")
        known[key] = value_of(text, "--vary") if as_yaml else names if whole else values
    return validate_model(PlanSpace, {**known, "variants": variants}, "--vary") if texts else space


def with_headroom(space: PlanSpace, headroom: float | None) -> PlanSpace:
    """The space with another head-room. Raises InputError for one out of range, or unlike the space's own."""
    if headroom is None:
        return space
    if isinstance(headroom, bool) or not 0.0 <= headroom < 1.0:
        raise InputError(f"headroom={headroom} must be a share of the memory, at least 0 and below 1")
    if space.headroom not in (None, headroom):
        raise InputError(f"headroom={headroom}, but the space states {space.headroom}: give one of them")
    return space.model_copy(update={"headroom": float(headroom)})


def headroom_sentence(space: PlanSpace, scenario: Scenario) -> str:
    """What memory a search keeps free, and how to change it (docs/model.md, eq. M10)."""
    if space.headroom is not None:
        risk = "plans at risk are admitted" if space.headroom == 0.0 else "plans may still be at risk"
        return f"head-room: the bytes in use leave {space.headroom:.0%} of the memory free; {risk}"
    own, sharded = (highest(allocator_slack(scenario.software, stage)) for stage in (0, 3))
    return (
        f"head-room: no plan is at risk; an allocator may reserve up to {own:.0%} beyond the tensors (with "
        f"zero_stage 3 or FSDP, {sharded:.0%} of the optimizer states), "
        f"a framework {highest(FRAMEWORK_BYTES) / 1e9:.0f} GB; --headroom 0 admits plans at risk"
    )


class Space(Struct, frozen=True):
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
    sequence_parallel: bool = True
    """Whether plans with tensor parallelism cut sequences too; models with experts need it."""

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
    divisors of the number of experts. cp: 1, 2, 4 and 8. vpp and microbatch: 1, 2 and 4. Each of these has
    the scenario's own value too, and so has expert_tp, otherwise 1. schedule and zero_stage: all. recompute:
    every policy that changes compute or memory, and the scenario's modules. precision: see
    `default_precisions`. sms: the scenario's, and for a MoE those with which its communication kernels were
    published; 0 if a dedicated engine moves them. placement: see `default_placements`.
    Raises InputError if communication would take every SM, or any SM beside a dedicated engine, and for a
    module to recompute that the model does not have.
    """
    n = cluster.n_gpus
    own = scenario.parallel
    in_memory = scenario.software.attention == "unfused"  # the policy attention recomputes the scores
    most_stages = shape.n_layers + MOST_WITHOUT_LAYERS
    moe, engine = shape.moe, cluster.accelerator.communication_engine
    published = dispatcher(scenario.communication.kernels).sms if moe else None
    sms = {scenario.communication.sms, *(published.tried if published else ())}
    if engine is None:
        most = cluster.accelerator.n_sms
        sms = {s for s in sms if 0 < s < most} or {scenario.communication.sms}
    else:
        sms = {0}
    defaults: dict[str, tuple[Any, ...]] = {
        "tp": _powers(cluster.node.n_gpus),
        "pp": tuple(d for d in range(1, min(n, most_stages) + 1) if n % d == 0),
        "ep": tuple(d for d in range(1, moe.experts + 1) if moe.experts % d == 0) if moe else (1,),
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
        "precision": default_precisions(scenario, cluster),
        "placement": default_placements(scenario, shape),
        "sms": tuple(sorted(sms)),
    }
    experts = ("ep", "expert_tp") if moe else ()
    for key in ("tp", "pp", "cp", "vpp", "microbatch", *experts):
        defaults[key] = tuple(sorted({*defaults[key], getattr(own, key)}))
    wanted = {key: getattr(space, key) for key in LISTS}
    if space.placement:
        wanted["placement"] = tuple(map(parse_placement, space.placement))
    defaults = {
        key: tuple(v for v in values if is_run(scenario.software.framework, key, v)) or values
        for key, values in defaults.items()
    }
    chosen = {key: tuple(dict.fromkeys(wanted[key] or defaults[key])) for key in LISTS}
    for choice in chosen["recompute"]:
        check_recompute(shape, choice)
    _check_sms(max(chosen["sms"]), cluster)
    return Space(**chosen, headroom=space.headroom, sequence_parallel=cuts_sequences(scenario))


def is_run(framework: str, key: str, value: Any) -> bool:
    """Whether a trainer's release runs a value of a key of a space."""
    if key == "precision":
        value = format_of(PRECISIONS[value] if isinstance(value, str) else value)
    return runs(framework, key, value)


def with_trainer(
    scenario: Scenario, wanted: PlanSpace, release: str | None = None
) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario whose trainer a search holds for all its plans, with a sentence on a trainer by rule.

    It is the scenario's own, or else the `release` of the trainer that is asked for; a trainer by rule gives
    way to none where the space names what it cannot run.
    Raises InputError where a stated trainer cannot run a value that the space names.
    """
    if release is not None and not is_stated(scenario, FRAMEWORK):
        scenario = scenario.replace(**{FRAMEWORK: release})
    name = scenario.software.framework
    foreign = [
        f"{key}={value}"
        for key in ("schedule", "zero_stage", "recompute", "precision")
        for value in getattr(wanted, key) or ()
        if not is_run(name, key, value)
    ]
    if foreign and is_stated(scenario, FRAMEWORK):
        raise InputError(
            f"{FRAMEWORK}={name} cannot run {foreign[0]} of the space; leave it out, or state "
            f"{FRAMEWORK}={NONE}",
            key=FRAMEWORK,
        )
    if foreign:
        why = f"{FRAMEWORK}={NONE}: {name}, the trainer by rule, cannot run {foreign[0]} of the space"
        return scenario.replace(**{FRAMEWORK: NONE}), (why,)
    if is_stated(scenario, FRAMEWORK):
        return scenario, ()
    software = scenario.software.model_copy()
    software.model_fields_set.update(("framework", "host"))
    said = f"{FRAMEWORK}={name} and {HOST}={software.host or NONE}, by rule, are held for all plans"
    return scenario.model_copy(update={"software": software}), (said,)


def default_precisions(scenario: Scenario, cluster: Cluster) -> tuple[str | Precision, ...]:
    """Precisions that a search tries by default: the scenario's, and all others if nobody stated that.

    A stated precision decides accuracy as well as time, so that it stays unless the space varies it.
    """
    return (scenario.precision,) if is_stated(scenario, "precision") else all_precisions(scenario, cluster)


def all_precisions(scenario: Scenario, cluster: Cluster) -> tuple[str | Precision, ...]:
    """The scenario's precision, fp8 where the accelerator has it, and bf16."""
    own, hardware = scenario.precision, ["bf16"]
    if "fp8" in cluster.accelerator.peak:
        hardware.insert(0, "fp8")
    return (own, *(p for p in hardware if p != own and PRECISIONS[p] != scenario.recipe))


def cuts_sequences(scenario: Scenario) -> bool:
    """Whether plans with tensor parallelism cut sequences too.

    They do not where a scenario without experts states so beside a degree of its own.
    """
    own = scenario.parallel
    stated = own.tp > 1 and is_stated(scenario, "parallel.sequence_parallel")
    return own.sequence_parallel or not stated or scenario.shape.moe is not None


def kept_as_stated(wanted: PlanSpace, scenario: Scenario) -> tuple[str, ...]:
    """Sentences on what a search keeps because the scenario states it, and on what it does not use of it."""
    said = []
    varies = wanted.precision is not None or "precision" in wanted.variants
    if not varies and scenario.fleet is None and is_stated(scenario, "precision"):
        own = scenario.precision if isinstance(scenario.precision, str) else scenario.recipe.linear
        others = [str(p) for p in all_precisions(scenario, scenario.machine)[1:]]
        if others:
            vary = ",".join([own, *others])
            said.append(
                f"precision={own} is kept, as the scenario states it; to vary it: --vary precision={vary}, "
                "or precision in a space"
            )
    if not cuts_sequences(scenario):
        said.append("parallel.sequence_parallel=false is kept, as the scenario states it beside its tp")
    if scenario.parallel.shard_group is not None:
        said.append(
            f"parallel.shard_group={scenario.parallel.shard_group} is not used: the search shards over all "
            "ranks that hold a parameter"
        )
    if scenario.stages.mtp is not None:
        said.append("stages.mtp is not used: the search keeps MTP modules on the last stage")
    if scenario.stages.layers is not None and wanted.layout == "balanced" and scenario.fleet is None:
        said.append(
            "stages.layers is not used: the search balances the stages; layout=scenario in a space keeps it"
        )
    return tuple(said)


def _check_sms(sms: int, cluster: Cluster) -> None:
    """Raise InputError if communication takes every SM, or any SM beside a dedicated engine."""
    engine = cluster.accelerator.communication_engine
    if engine is None and sms and sms >= cluster.accelerator.n_sms:
        most = cluster.accelerator.n_sms
        raise InputError(
            f"sms={sms} leaves no SM for compute: {cluster.accelerator.name} has {most}; "
            f"use at most {most - 1}"
        )
    if engine is not None and sms:
        raise InputError(
            f"sms={sms}: on {cluster.accelerator.name} a dedicated engine ({engine.name}) moves "
            "collectives; use sms: 0, or leave it out"
        )


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << k for k in range(most.bit_length()) if 1 << k <= most)
