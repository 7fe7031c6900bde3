"""A scenario: everything a prediction depends on, read from YAML, validated, units parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    PrivateAttr,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from moesim.hwmodels import ranges
from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import CalibrationProfile, load_profile, written_out
from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.provenance import SourcedFraction
from moesim.hwmodels.topologies import Spreading
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping, parse_mapping
from moesim.simulator.chunk import OVERLAP_ORDERS, OverlapOrder
from moesim.simulator.fleet.pools import Fleet, Pool
from moesim.simulator.full.faults import Fault
from moesim.simulator.layout.activations import RecomputePolicy
from moesim.simulator.layout.parallel import ParallelPlan
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.shape import ModelShape, load_model
from moesim.simulator.routing_load import Capacity, Eplb, Load
from moesim.simulator.run.plan import RunPlanRef, load_run_plan
from moesim.simulator.software import Software
from moesim.simulator.stated import credited

PRESETS = "data/scenarios"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Batch(_Part):
    """Global batch of one step."""

    sequences: int = Field(gt=0, le=10_000_000_000)
    """Sequences of one step over the whole cluster."""
    sequence_length: int = Field(gt=0, le=100_000_000)
    """Tokens of one sequence."""


class Communication(_Part):
    """Communication kernels: how many SMs they hold, which generation, what they overlap with."""

    sms: int = Field(20, ge=0)
    """SMs or compute units reserved for communication kernels; 0 where an engine moves collectives."""
    kernels: str = "deepep-2025-02"
    """Generation of the expert-parallel kernels: names the profile curve ep.nic_fraction.<kernels>."""
    overlap: str | OverlapOrder = "deepseek-v3"
    """Order of the phases inside an overlapped pair: a name or the two lists."""

    @property
    def order(self) -> OverlapOrder:
        """The overlap order itself."""
        if isinstance(self.overlap, OverlapOrder):
            return self.overlap
        if self.overlap not in OVERLAP_ORDERS:
            hint = nearest(self.overlap, list(OVERLAP_ORDERS))
            raise InputError(
                f"communication.overlap={self.overlap!r} is not known{hint}; "
                f"known: {', '.join(OVERLAP_ORDERS)}, or give compute and communication lists"
            )
        return OVERLAP_ORDERS[self.overlap]


class Stages(_Part):
    """Which layers each pipeline stage holds.

    `layers`: decoder layers per stage, embedding on the first and MTP and head on the last; absent =
    balanced by the stages' compute. `blocks`: explicit block kinds per stage ("moe*4"), which may be
    only a part of the model, as for a kernel-level test.
    """

    layers: tuple[int, ...] | None = None
    """Decoder layers per stage; embedding on the first, MTP and head on the last; absent: balanced."""
    blocks: tuple[str, ...] | None = None
    """Block kinds per stage ("moe*4") of embedding, dense, moe, mtp, head; may be a part of the model."""

    @model_validator(mode="after")
    def _one_way(self) -> Stages:
        if self.layers is not None and self.blocks is not None:
            raise ValueError("stages.layers and stages.blocks exclude each other: give one")
        return self


class Routing(_Part):
    """Which experts tokens go to: the gate, and how uneven the load is."""

    gate: Literal["model", "best", "top2-sum", "unlimited"] = "model"
    """`model`: as the model's config says; the others replace the score by which groups are ranked."""
    groups_per_token: PositiveInt | None = None
    """Expert groups (nodes, where a group is one) that a token reaches; absent: as the model's gate says."""
    expert_load_cv: Annotated[SourcedFraction, ranges.LOAD_SPREAD]
    """Coefficient of variation of the load of one expert within one micro-batch of one group."""
    load: Load | None = None
    """Lasting popularity of the experts of a layer; absent: all equal."""
    capacity: Capacity | None = None
    """Rows above it are dropped; absent: nothing is dropped."""
    eplb: Eplb | None = None
    """Redundant experts and their placement; absent: experts in order, one replica each."""

    @property
    def redundant_experts(self) -> int:
        """Replicas beyond one for each expert, in every layer of one expert-parallel group."""
        return 0 if self.eplb is None else self.eplb.redundant_experts


class Variation(_Part):
    """What else makes ranks differ."""

    clock_cv: Annotated[SourcedFraction, ranges.SPEED_SPREAD]
    """Relative spread of the GPUs' sustained speed."""
    jitter_cv: Annotated[SourcedFraction, ranges.JITTER]
    """Relative spread of one phase's duration from run to run on one GPU."""


class Scenario(_Part):
    """One prediction's input; the keys of a scenario file are these field names."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["cluster"]}, {"required": ["fleet"]}]}
    )

    name: str
    """Shown in the result."""
    description: str = ""
    """Free text."""
    model: str | ModelShape
    """A shipped model, a model.yaml or a Hugging Face config.json; or the shape itself."""
    cluster: str | Cluster | None = None
    """A shipped cluster, a file, or its description; see below."""
    fleet: Fleet | None = None
    """Several clusters that share the pipeline, in the place of `cluster`."""
    profile: SerializeAsAny[str | CalibrationProfile]
    """Calibration profile: a shipped name or a file; or the profile itself."""
    precision: str | Precision
    """Recipe: `fp8` (DeepSeek-V3's), `bf16`, or the formats of products, states and transfers."""
    parallel: ParallelPlan
    """Degrees of parallelism."""
    schedule: str = "1f1b"
    """A name, or a CSV file in PyTorch's pipelining notation (sends awaited if bidirectional)."""
    batch: Batch
    """Global batch of one step."""
    stages: Stages = Stages()
    """Which layers each pipeline stage holds."""
    communication: Communication = Communication()
    """Communication kernels."""
    recompute: RecomputePolicy = "none"
    """What backward forms again; `deepseek-v3` is `selective` with the attention output cached in E5M6."""
    routing: Routing
    """Which experts tokens go to."""
    variation: Variation
    """What else makes ranks differ."""
    run: RunPlanRef
    """The whole run: a run plan's name or file, or its keys."""
    resolution: Literal["folded", "full"] = "folded"
    """`folded`: one group of GPUs stands for all; `full`: every GPU for itself."""
    spreading: Spreading = "modulo"
    """How switches spread flows over equal paths (full resolution)."""
    faults: tuple[Fault, ...] = ()
    """What is broken or slow in the cluster (full resolution)."""
    software: Software = Software()
    """What the framework does: attention kernels, overlap of collectives."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of every random draw."""
    _base: str | None = PrivateAttr(None)
    """Folder that relative paths start from (set by the loader)."""

    @field_validator("profile")
    @classmethod
    def _profile_stands_alone(cls, value: str | CalibrationProfile) -> str | CalibrationProfile:
        return written_out(value) if isinstance(value, CalibrationProfile) else value

    @model_validator(mode="after")
    def _one_place(self) -> Scenario:
        if self.cluster is None and self.fleet is None:
            raise ValueError("cluster is missing: give a cluster, or a fleet of several")
        if self.cluster is not None and self.fleet is not None:
            raise ValueError(
                "cluster and fleet exclude each other: give one, name every cluster in fleet.pools"
            )
        return self

    @property
    def recipe(self) -> Precision:
        """The precision recipe itself."""
        if isinstance(self.precision, Precision):
            return self.precision
        if self.precision not in PRECISIONS:
            raise InputError(
                f"precision={self.precision!r} is not known{nearest(self.precision, list(PRECISIONS))}; "
                f"known: {', '.join(PRECISIONS)}, or give the fields of a recipe"
            )
        return PRECISIONS[self.precision]

    @property
    def shape(self) -> ModelShape:
        """The model shape itself."""
        return self.model if isinstance(self.model, ModelShape) else load_model(self.path(self.model))

    @property
    def machine(self) -> Cluster:
        """The cluster itself; raises InputError for a fleet, which is not one cluster."""
        if self.cluster is None:
            raise InputError(
                f"scenario {self.name} runs on a fleet of several clusters (fleet.pools), and this needs "
                "one: give cluster instead. Fleets go with simulate, explain, check, compare, sweep, "
                "neighbours and plan, in folded resolution and without uncertainty"
            )
        return self._cluster(self.cluster)

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
        """The calibration profile itself."""
        return self._calibration(self.profile)

    @property
    def calibrations(self) -> tuple[CalibrationProfile, ...]:
        """The calibration profiles: the scenario's, or one for every pool of its fleet."""
        pools = () if self.fleet is None else self.fleet.pools
        named = tuple(pool.profile or self.profile for pool in pools) or (self.profile,)
        return tuple(self._calibration(profile) for profile in named)

    def _calibration(self, profile: str | CalibrationProfile) -> CalibrationProfile:
        return profile if isinstance(profile, CalibrationProfile) else load_profile(self.path(profile))

    def _cluster(self, cluster: str | Cluster) -> Cluster:
        if isinstance(cluster, Cluster):
            return cluster
        return load_cluster(cluster, None if self._base is None else Path(self._base) / "scenario")

    def path(self, name: str) -> str:
        """`name` relative to the scenario file, where such a file exists beside it."""
        if self._base is not None and is_there(Path(self._base) / name):
            return str(Path(self._base) / name)
        return name

    def replace(self, **changes: Any) -> Scenario:
        """The same scenario with some keys changed, checked again.

        `replace(seed=1)`, `replace(communication={"sms": 8})` (the other keys of the section stay) or, by
        dotted path, `replace(**{"communication.sms": 8})`. Quantities carry units, as in a file: "160 GB/s".
        Raises InputError with key, value and nearest legal value.
        """
        data, paths, place = self.model_dump(mode="json", exclude_none=True), [], f"scenario {self.name}"
        for key, value in changes.items():
            section = isinstance(value, Mapping) and "." not in key and key in SECTIONS
            for below, inner in value.items() if section else [("", value)]:
                path = f"{key}.{below}" if below else key
                data = _put(data, path, _plain(inner), f"replace({path}=...)")
                paths.append(path)
        changed = credited(validate_model(Scenario, data, place), paths, place)
        return changed if self._base is None else changed.based_on(self._base)

    def to_dict(self) -> dict[str, Any]:
        """All keys as plain data; a scenario file may hold it."""
        return self.model_dump(mode="json", exclude_none=True)

    def based_on(self, folder: str) -> Scenario:
        """The same scenario with relative paths starting from `folder`."""
        copy = self.model_copy()
        copy._base = folder
        return copy

    def overridden(self, *overrides: str) -> Scenario:
        """The same scenario with `key=value` overrides; raises InputError as `load_scenario` does."""
        data = self.model_dump(mode="json", exclude_none=True)
        for text in overrides:
            data = _override(data, text)
        changed = credited(validate_model(Scenario, data, self.name), _keys(overrides), self.name)
        return changed if self._base is None else changed.based_on(self._base)


def preset_names() -> list[str]:
    """Names of the scenarios that ship with the package."""
    folder = resources.files("moesim.simulator").joinpath(PRESETS)
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_scenario(name_or_path: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a preset name or a YAML/JSON file, with `key=value` overrides applied.

    An override names a key by its dotted path ("parallel.ep=32"); its value is read as YAML. Raises
    InputError with file, key, value and nearest legal value for anything malformed.
    """
    if name_or_path in preset_names():
        folder = resources.files("moesim.simulator").joinpath(PRESETS)
        place = f"preset {name_or_path}"
        with resources.as_file(folder) as real:
            data = parse_mapping(folder.joinpath(f"{name_or_path}.yaml").read_text("utf-8"), place)
            base = str(real)
    elif name_or_path.lower().endswith(EXTENSIONS):
        data, place, base = load_mapping(Path(name_or_path)), name_or_path, str(Path(name_or_path).parent)
    else:
        raise InputError(
            f"unknown scenario {name_or_path!r}{nearest(name_or_path, preset_names())}; presets: "
            f"{', '.join(preset_names())}; or give a file that ends in {', '.join(EXTENSIONS)}"
        )
    for text in overrides:
        data = _override(data, text)
    return credited(validate_model(Scenario, data, place), _keys(overrides), place).based_on(base)


def with_overrides(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """The same scenario with `key=value` overrides applied, as `load_scenario` applies them.

    Raises InputError with key, value and nearest legal value for anything malformed.
    """
    return scenario.overridden(*overrides)


def _keys(overrides: Sequence[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in overrides]


def _dumped(load: Callable[[str], BaseModel]) -> Callable[[str], dict[str, Any]]:
    return lambda name: load(name).model_dump(mode="json", exclude_none=True)


def _recipe(name: str) -> BaseModel:
    if name not in PRECISIONS:
        raise InputError(f"precision={name!r} is not known; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


_DESCRIPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "cluster": _dumped(load_cluster),
    "node": _dumped(load_node),
    "network": _dumped(load_network),
    "accelerator": _dumped(load_accelerator),
    "precision": _dumped(_recipe),
    "run": _dumped(load_run_plan),
}
"""Keys whose value may be a name, and what the name stands for."""


SECTIONS = frozenset(
    name
    for name, field in Scenario.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
) | {"cluster"}
"""Keys with keys below them."""

_MOST_PARTS = 20

INSTEAD = {"cluster": "fleet", "fleet": "cluster", "fleet.pools": "cluster"}
"""Keys that take the place of another when they are set as a whole."""


def _plain(value: Any) -> Any:
    """A Python value as a file would hold it: no None inside descriptions, lists for tuples."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _override(data: Mapping[str, Any], text: str) -> dict[str, Any]:
    """`data` with the dotted key of `key=value` replaced; the value is read as YAML."""
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r}: write key=value, for example parallel.ep=32")
    value = parse_mapping(f"value: {value_text}", f"--set {key.strip()}")["value"]
    return _put(data, key.strip(), value, f"--set {text!r}")


def _put(data: Mapping[str, Any], key: str, value: Any, place: str) -> dict[str, Any]:
    """`data` with one dotted key replaced; creates missing sections, so the validator names a typo."""
    result: dict[str, Any] = json.loads(json.dumps(data, default=str)) if data else {}
    if key in INSTEAD and value is not None:
        result.pop(INSTEAD[key], None)
    section: Any = result
    parts = key.split(".")
    if len(parts) > _MOST_PARTS or not all(parts):
        raise InputError(f"{place}: {key[:80]!r} is no key; write its path, for example parallel.ep=32")
    for part in parts[:-1]:
        below = section.get(part)
        if below is None:
            below = section[part] = {}
        if isinstance(below, str) and part in _DESCRIPTIONS:
            # A name stands for its description: write that out, so that one figure in it can change.
            below = section[part] = _DESCRIPTIONS[part](below)
        if not isinstance(below, dict):
            raise InputError(
                f"{place}: {part!r} is {repr(below)[:60]}, which has no keys below it; replace it as a whole"
            )
        section = below
    section[parts[-1]] = value
    return result
