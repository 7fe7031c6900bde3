"""Scenarios, which hold all inputs of a prediction, read from YAML, validated and with units parsed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializationInfo,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails

from moesim.hwmodels.calibration import (
    CalibrationProfile,
    load_profile,
    with_includes_merged,
    without_entries,
)
from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.provenance import OWN, STATED_IN, Sourced
from moesim.hwmodels.summary_text import count, titled
from moesim.hwmodels.topologies import Spreading
from moesim.hwmodels.validation import nearest, validate_model
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.precision import PRECISIONS, Precision, in_fp32_loss
from moesim.simulator.model.recompute import RecomputeKey
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.machine import left_to_rules, may_change_machine
from moesim.simulator.scenario.origin import Change, ScenarioOrigin, changes_of, text_of
from moesim.simulator.scenario.outline import AnyCluster, ClusterOutline
from moesim.simulator.scenario.overrides import plain, put, without_key
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.run_plan import RunPlan, RunPlanRef
from moesim.simulator.scenario.sections import (
    Batch,
    Communication,
    Fault,
    Fleet,
    Pool,
    Routing,
    Stages,
    Variation,
)
from moesim.simulator.scenario.serving import Serving
from moesim.simulator.scenario.stated import as_stated, fill_defaults, is_stated, list_defaults, without_nulls

# -- scenario text -----------------------------------------------------------------------------------
# The text with which a scenario prints itself (pure; loads nothing).


def scenario_text(
    name: str,
    *,
    model: object,
    machines: Sequence[object],
    parallel: ParallelPlan,
    order: str,
    batch: Batch,
    rates: tuple[object, object],
    communication: Communication,
    mode: str,
    chosen: int,
) -> str:
    """The main keys of a scenario, in about ten lines; an inline description is named, not printed.

    `rates`: profile and precision. `chosen`: number of keys that rules chose.
    """
    degrees = [(key, getattr(parallel, key)) for key in ("tp", "cp", "pp", "vpp", "ep", "expert_tp")]
    shown = " ".join(f"{key}={degree}" for key, degree in degrees if degree > 1) or "no parallelism"
    joined = ", ".join(map(_name, machines))
    return titled(
        f"Scenario {name}",
        {
            "model": _name(model),
            "machines": joined if len(machines) == 1 else f"fleet of {joined}",
            "plan": f"{shown} microbatch={parallel.microbatch} zero_stage={parallel.zero_stage}",
            "schedule": order,
            "batch": f"{count(batch.sequences, 'sequence')} of {batch.sequence_length:,} tokens",
            "profile": f"{_name(rates[0])}, precision {_name(rates[1])}",
            "kernels": f"{communication.kernels}, {count(communication.sms, 'SM')}",
            "resolution": mode.removesuffix(", 0 faults"),
            "defaults": f"{count(chosen, 'key')} chosen by rule: .defaults" if chosen else "",
            "more": ".to_dict(), .resolved(), .replace(...)",
        },
    )


def _name(value: object) -> str:
    """A name as stated, or that of an inline description, or its accelerator or node with the count."""
    if isinstance(value, str):
        return value or "chosen by rule"
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    node = getattr(value, "node", None)
    machine = getattr(value, "accelerator", None) or (None if node is None else _name(node))
    nodes = getattr(value, "nodes", None)
    return f"{count(nodes, 'node')} of {machine}" if isinstance(nodes, int) else "stated inline"


# -- credit ------------------------------------------------------------------------------------------
# Credits numbers that an override sets to the user, instead of to the scenario file.

ModelT = TypeVar("ModelT", bound=BaseModel)


def _below(value: ModelT, parts: list[str], source: str) -> ModelT:
    """Credit the figures at and below a dotted path of `value`; an unknown path changes nothing."""
    if not parts:
        return cast(ModelT, _own(value, source))
    child = getattr(value, parts[0], None)
    if isinstance(child, BaseModel):
        changed: object = _below(child, parts[1:], source)
    elif isinstance(child, tuple | Mapping):
        changed = _own(child, source)
    else:
        return value
    # An unchanged value is not set again, because a key that a rule chose would then count as stated.
    return value if changed == child else value.model_copy(update={parts[0]: changed})


def _own(value: object, source: str) -> object:
    if isinstance(value, Sourced):
        return value.model_copy(update={"source": OWN}) if value.source == source else value
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: _own(item, source) for name, item in inner.items()}
        return value.model_copy(update={n: item for n, item in changed.items() if item != inner[n]})
    if isinstance(value, tuple):
        return tuple(_own(item, source) for item in value)
    if isinstance(value, Mapping):
        return {key: _own(item, source) for key, item in value.items()}
    return value


_OF_TRAINING = ("parallel", "batch")
"""Keys that a scenario states unless it has `serving`."""


class Scenario(Section):
    """Input of one prediction; the keys of a scenario file are these field names.

    Rules choose the keys that are not stated when a scenario is built (`moesim.simulator.scenario.defaults`).
    Such keys can be read like stated ones; `defaults` lists them, and dumps leave them out.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["cluster"]}, {"required": ["fleet"]}],
            "allOf": [{"anyOf": [{"required": ["parallel", "batch"]}, {"required": ["serving"]}]}],
        }
    )

    name: str = Field(
        default_factory=str, description="Shown in the result. Absent: model, GPUs and accelerator."
    )
    description: str = ""
    """Free text."""
    model: str | ModelShape
    """A shipped model, a model.yaml or a Hugging Face config.json; or the shape itself."""
    cluster: AnyCluster | None = Field(
        None,
        description="A shipped cluster, a file, {accelerator or node, nodes} with the rest chosen by rule, "
        "or a full description.",
    )
    fleet: Fleet | None = None
    """Several clusters that share the pipeline, in the place of `cluster`."""
    profile: SerializeAsAny[str | CalibrationProfile] = Field(
        default_factory=str,
        description="Calibration profile: a shipped name or a file, or the profile itself. Absent: the best "
        "shipped one of the accelerator (measured before published before datasheet peaks).",
    )
    without_entries: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        (),
        max_length=50,
        exclude_if=lambda value: not value,
        description="Entries of the profile that are left out, by id or by a pattern with *, such as "
        "*-sustained.*: the next entry or prior that fits takes their place.",
    )
    precision: str | Precision = Field(
        default_factory=lambda: "bf16",
        description="Recipe: a name or its fields. Absent: fp8 where the model was trained in FP8 and the "
        "accelerator has it, else bf16.",
    )
    parallel: ParallelPlan = Field(default_factory=ParallelPlan, description="Degrees of parallelism.")
    schedule: str = "1f1b"
    """A name, or a CSV file in PyTorch's pipelining notation (sends awaited if bidirectional)."""
    batch: Batch = Field(
        default_factory=lambda: Batch(sequences=1, sequence_length=4096),
        description="Sequences of one step over the whole cluster, and their length.",
    )
    stages: Stages = Stages()
    """Which layers each pipeline stage holds."""
    communication: Communication = Communication()
    """Communication kernels."""
    recompute: RecomputeKey = "none"
    """What the backward computes again: a policy (none, attention, selective, op, full, deepseek-v3), or a
    list of modules by Megatron-Core's names, such as [layernorm, moe_act]."""
    routing: Routing = Field(
        default_factory=Routing, description="Which experts tokens go to, and how uneven the load is."
    )
    variation: Variation = Field(default_factory=Variation, description="Other differences between ranks.")
    run: RunPlanRef = Field(
        default_factory=RunPlan,
        description="The whole run: a run plan's name or file, or its keys. Absent: the tokens that the "
        "model was trained on where they are known, else 1 T.",
    )
    resolution: Literal["folded", "full"] = "folded"
    """`folded`: one group of GPUs represents all; `full`: every GPU is simulated."""
    spreading: Spreading = "modulo"
    """How switches spread flows over equal paths (full resolution)."""
    faults: tuple[Fault, ...] = ()
    """What is broken or slow in the cluster (full resolution)."""
    software: Software = Field(
        default_factory=Software,
        description="The trainer's release and host, and what it does in another way. Absent: the usual ones "
        "of the accelerator.",
    )
    serving: Serving | None = Field(None, exclude_if=lambda value: value is None)
    """How the model is served, for `moesim serve`; training does not read it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of every random draw."""
    _base: str | None = PrivateAttr(None)
    """Folder that relative paths start from (set by the loader)."""
    _defaults: tuple[Default, ...] = PrivateAttr(())
    _origin: ScenarioOrigin = PrivateAttr(default_factory=ScenarioOrigin)

    @field_validator("profile")
    @classmethod
    def _profile_stands_alone(cls, value: str | CalibrationProfile) -> str | CalibrationProfile:
        return with_includes_merged(value) if isinstance(value, CalibrationProfile) else value

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        return without_nulls(data) if isinstance(data, Mapping) else data

    @model_validator(mode="wrap")
    @classmethod
    def _says_what_runs(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Parallel and batch are required unless the scenario has `serving`; said with what else is wrong."""
        bare = isinstance(data, Mapping) and not data.get("serving")
        missing = [key for key in _OF_TRAINING if bare and data.get(key) is None]
        lines = [InitErrorDetails(type="missing", loc=(key,), input=data) for key in missing]
        try:
            scenario = handler(data)
        except ValidationError as error:
            lines = [cast(InitErrorDetails, line) for line in error.errors(include_url=False)] + lines
        if lines:
            raise ValidationError.from_exception_data(cls.__name__, lines)
        return scenario

    @model_validator(mode="after")
    def _one_place(self) -> Scenario:
        if self.cluster is None and self.fleet is None:
            raise ValueError("cluster is missing: give a cluster, or a fleet of several")
        if self.cluster is not None and self.fleet is not None:
            raise ValueError(
                "cluster and fleet exclude each other: give one, name every cluster in fleet.pools"
            )
        return self

    @model_validator(mode="after")
    def _chosen_by_rule(self, info: ValidationInfo) -> Scenario:
        self._base = (info.context or {}).get("base")
        self._defaults = fill_defaults(self, (info.context or {}).get("place"))
        return self

    @model_serializer(mode="wrap")
    def _as_stated(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        for key in _OF_TRAINING:
            if self.serving is not None and not is_stated(self, key):
                data.pop(key, None)  # else it would count as stated when it is read again
        return as_stated(self, data, resolved=bool((info.context or {}).get("resolved")))

    def __str__(self) -> str:
        """Model, machines, plan, batch and profile, in about ten lines; nothing is loaded for it."""
        return scenario_text(
            self.name,
            model=self.model,
            machines=[self.cluster] if self.fleet is None else [pool.cluster for pool in self.fleet.pools],
            parallel=self.parallel,
            order=f"{self.schedule}, recompute={self.recompute}",
            batch=self.batch,
            rates=(self.profile, self.precision),
            communication=self.communication,
            mode=f"{self.resolution}, seed {self.seed}, {len(self.faults)} faults",
            chosen=len(self._defaults),
        )

    def __repr__(self) -> str:
        """The text of `str`; `to_dict` gives all stated keys."""
        return str(self)

    @property
    def defaults(self) -> tuple[Default, ...]:
        """The keys that were not stated, with the values that rules chose and the reasons."""
        return self.defaults_on(self.machines)

    def defaults_on(self, machines: Sequence[Cluster]) -> tuple[Default, ...]:
        """Return `defaults`, given the clusters of the scenario or of its pools, already loaded."""
        return list_defaults(self, self._defaults, machines)

    @property
    def trains(self) -> bool:
        """Whether it states a training step; a scenario with `serving` may leave that out."""
        return all(is_stated(self, key) for key in _OF_TRAINING)

    @property
    def recipe(self) -> Precision:
        """The precision recipe, loaded by name if needed; raises InputError for an unknown name.

        The trainer's own loss may widen the logits (`software.loss: eager`).
        """
        if not isinstance(self.precision, Precision) and self.precision not in PRECISIONS:
            raise InputError(
                f"precision={self.precision!r} is not known{nearest(self.precision, list(PRECISIONS))}; "
                f"known: {', '.join(PRECISIONS)}, or give the fields of a recipe"
            )
        recipe = self.precision if isinstance(self.precision, Precision) else PRECISIONS[self.precision]
        return in_fp32_loss(recipe) if self.software.loss == "eager" else recipe

    @property
    def shape(self) -> ModelShape:
        """The model shape, loaded from its name or file if needed."""
        return self.model if isinstance(self.model, ModelShape) else load_model(self.path(self.model))

    @property
    def machine(self) -> Cluster:
        """The cluster, loaded if needed; raises InputError for a fleet, which is not one cluster."""
        if self.cluster is None:
            raise self.needs_one_cluster()
        return self._cluster(self.cluster)

    def needs_one_cluster(self) -> InputError:
        """Error to raise where a fleet is given but one cluster is needed."""
        return InputError(
            f"scenario {self.name} runs on a fleet of several clusters (fleet.pools), and this needs "
            "one: give cluster instead. Fleets go with simulate, explain, check, compare, sweep, "
            "neighbours and plan, in folded resolution and without uncertainty"
        )

    @property
    def machines(self) -> tuple[Cluster, ...]:
        """The cluster, or those of the fleet's pools."""
        if self.fleet is None:
            return (self.machine,)
        machines = []
        for number, pool in enumerate(self.fleet.pools):
            try:
                machines.append(self.pool_machine(pool))
            except InputError as error:
                raise InputError(f"fleet.pools.{number}: {error}") from None
        return tuple(machines)

    def pool_machine(self, pool: Pool) -> Cluster:
        """The nodes of a pool as a cluster; raises InputError where they do not fit its network."""
        cluster = self._cluster(pool.cluster)
        if pool.nodes is None or pool.nodes == cluster.nodes:
            return cluster
        part = cluster.model_copy(update={"nodes": pool.nodes})
        part.topology()
        return part

    @property
    def calibration(self) -> CalibrationProfile:
        """The calibration profile, loaded from its name or file if needed."""
        return self._calibration(self.profile)

    @property
    def calibrations(self) -> tuple[CalibrationProfile, ...]:
        """The calibration profiles: the scenario's, or one for every pool of its fleet."""
        pools = () if self.fleet is None else self.fleet.pools
        named = tuple(self.pool_profile(pool) for pool in pools) or (self.profile,)
        return tuple(self._calibration(profile) for profile in named)

    def _calibration(self, profile: str | CalibrationProfile) -> CalibrationProfile:
        whole = profile if isinstance(profile, CalibrationProfile) else load_profile(self.path(profile))
        return without_entries(whole, self.without_entries)

    def pool_profile(self, pool: Pool, machine: Cluster | None = None) -> str | CalibrationProfile:
        """Calibration profile of a pool: its own, else the scenario's, else the best of its accelerator.

        `machine` is the pool's cluster, if it was loaded already.
        """
        if pool.profile is not None or is_stated(self, "profile"):
            return pool.profile or self.profile
        return rules.profile_of((machine or self.pool_machine(pool)).accelerator)[0]

    def pool_sms(self, pool: Pool, machine: Cluster | None = None) -> int:
        """SMs of a pool's communication kernels: its own, else the scenario's, else its accelerator's.

        `machine` is the pool's cluster, if it was loaded already.
        """
        if pool.communication_sms is not None:
            return pool.communication_sms
        if is_stated(self, "communication.sms"):
            return self.communication.sms
        return rules.sms_of((machine or self.pool_machine(pool)).accelerator)[0]

    def _cluster(self, cluster: str | Cluster | ClusterOutline) -> Cluster:
        base = None if self._base is None else Path(self._base) / "scenario"
        if isinstance(cluster, ClusterOutline):
            cluster = cluster.cluster(base)
        return rules.with_default_price(load_cluster(cluster, base) if isinstance(cluster, str) else cluster)

    def path(self, name: str) -> str:
        """Path of `name` in the folder of the scenario file, if such a file exists there; else `name`."""
        if self._base is not None and is_there(Path(self._base) / name):
            return str(Path(self._base) / name)
        return name

    def replace(self, **changes: Any) -> Scenario:
        """Return the scenario with some keys changed, validated again.

        Examples are `replace(seed=1)`, `replace(communication={"sms": 8})` (the other keys of the section
        stay) and, by dotted path, `replace(**{"communication.sms": 8})`. Quantities carry units as in a file
        ("160 GB/s"). Raises InputError with key, value and nearest legal value.
        """
        made: list[Change] = []
        for key, value in changes.items():
            section = isinstance(value, Mapping) and "." not in key and key in SECTIONS
            for below, inner in value.items() if section else [("", value)]:
                path = f"{key}.{below}" if below else key
                made.append(Change(path, plain(inner), text_of(path, inner), f"replace({path}=...)"))
        return changed_scenario(self.origin, made, self._base)

    def to_dict(self) -> dict[str, Any]:
        """The stated keys as plain data, which can be written to a scenario file."""
        return self.model_dump(mode="json", exclude_none=True)

    def resolved(self) -> dict[str, Any]:
        """All keys as plain data, including those that rules chose."""
        return self.model_dump(mode="json", exclude_none=True, context={"resolved": True})

    def based_on(self, folder: str) -> Scenario:
        """Return the scenario with relative paths that start from `folder`."""
        copy = self.model_copy()
        copy._base = folder
        return copy

    def overridden(self, *overrides: str) -> Scenario:
        """Return the scenario with `key=value` overrides; raises InputError as `load_scenario` does."""
        return changed_scenario(self.origin, changes_of(overrides), self._base)

    @property
    def origin(self) -> ScenarioOrigin:
        """Where the scenario comes from, with the data that further changes apply to."""
        if self._origin.data is not None:
            return self._origin
        data = self.to_dict()
        texts = self._origin.all_overrides(data)
        return dataclasses.replace(
            self._origin, data=data, place=f"scenario {self.name}", overrides=texts, copied=frozenset()
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's copy, which notes the sections that it replaces."""
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._origin = self._origin.copied_with(list(update))
        return copy


def changed_scenario(origin: ScenarioOrigin, changes: Sequence[Change], base: str | None) -> Scenario:
    """The scenario of an origin's data with some keys changed, validated.

    On another accelerator, keys that nobody states together with the move are left to the rules
    (`moesim.simulator.scenario.machine`). Raises InputError with key, value and nearest legal value.
    """
    place, data = origin.place or "scenario", dict(origin.data or {})
    for change in changes:
        data = put(data, change.key, change.value, change.place, partial(_resolved, data, place, base))
    scenario = validate_model(Scenario, data, place, base)
    left: tuple[str, ...] = ()
    if any(may_change_machine(change.key) for change in changes):
        try:
            before = validate_model(Scenario, origin.data or {}, place, base)
            has_machines = bool(before.machines)
        except InputError:  # the data become a scenario only by the changes
            has_machines = False
        if has_machines:
            left = left_to_rules(before, scenario, [change.key for change in changes])
        for key in left:
            data = without_key(data, key)
        if left:
            scenario = validate_model(Scenario, data, place, base)
    changed = origin.changed(data, changes, left)
    # Figures at and below overridden keys are the user's instead of the file's, unless they name a source.
    for text in changed.overrides:
        scenario = _below(scenario, overridden_key(text).split("."), f"{STATED_IN}{place}")
    scenario._origin = changed
    return scenario


def _resolved(data: Mapping[str, Any], place: str, base: str | None) -> dict[str, Any]:
    return validate_model(Scenario, data, place, base).resolved()


SECTIONS = frozenset(
    name
    for name, field in Scenario.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
) | {"cluster"}
"""Keys with keys below them."""
