"""The tables of keys from the pydantic models that read a scenario: in short in docs/scenario.md, and every
key with its whole meaning on the site's page scenario-keys.md, which docs/mkdocs_hooks.py adds."""

from __future__ import annotations

import datetime
import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.frozen import descriptions
from moesim.hwmodels.provenance import Sourced
from moesim.hwmodels.yaml_io import shipped_names
from moesim.simulator.frameworks.software import Software, StaticExperts
from moesim.simulator.model.catalogue import shipped_models
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import RULES
from moesim.simulator.scenario.sections import Down, Jitter, NodeLoss, SlowGpu, SlowLink
from moesim.simulator.scenario.sections import Pool
from moesim.simulator.scenario.outline import ClusterOutline
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.sections import (
    BiasLoad,
    Capacity,
    Eplb,
    HistogramLoad,
    MaxVioLoad,
    UniformLoad,
    ZipfLoad,
)
from moesim.simulator.scenario.run_plan import (
    Checkpoint,
    CheckpointTier,
    FaultTolerance,
    Maintenance,
    Preemption,
    Price,
    Ramp,
    RunPhase,
    RunPlan,
    Slow,
    Spares,
    run_plan_names,
)
from moesim.simulator.scenario.sections import Batch
from moesim.simulator.scenario.sections import Communication
from moesim.simulator.scenario.sections import Routing
from moesim.simulator.scenario.sections import Stages
from moesim.simulator.scenario.sections import Variation
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.schedules.template import OVERLAP_ORDERS
from moesim.simulator.schedules.template import OverlapOrder

TABLES: dict[str, dict[str, type[BaseModel]]] = {
    "scenario": {
        "": Scenario, "parallel": ParallelPlan, "batch": Batch, "stages": Stages,
        "communication": Communication, "communication.overlap": OverlapOrder, "routing": Routing,
        "routing.capacity": Capacity, "routing.eplb": Eplb, "variation": Variation, "software": Software,
        "software.static_experts": StaticExperts,
    },
    "precision": {"": Precision},
    "outline": {"": ClusterOutline},
    "cluster": {"": Cluster},
    "pool": {"": Pool},
    "run": {
        "": RunPlan, "ramp": Ramp, "phases[]": RunPhase, "checkpoint": Checkpoint,
        "checkpoint.tiers[]": CheckpointTier, "spares": Spares, "slow": Slow, "preemption": Preemption,
        "maintenance": Maintenance, "fault_tolerance": FaultTolerance, "price": Price,
    },
}  # fmt: skip
"""Tables by name: models by the path of the section that they are."""

KINDS: dict[str, tuple[type[BaseModel], ...]] = {
    "load": (UniformLoad, ZipfLoad, HistogramLoad, BiasLoad, MaxVioLoad),
    "faults": (SlowGpu, Jitter, SlowLink, Down, NodeLoss),
}
"""Tables of sections whose `kind` decides the other keys."""

SHIPPED: dict[str, Callable[[], Iterable[str]]] = {
    "scenario model": shipped_models,
    "scenario precision": lambda: PRECISIONS,
    "scenario schedule": lambda: SCHEDULES,
    "scenario run": run_plan_names,
    "scenario software.host": lambda: shipped_names("hosts"),
    "scenario communication.overlap": lambda: OVERLAP_ORDERS,
    "cluster network": lambda: shipped_names("networks"),
    "cluster energy": lambda: shipped_names("energy"),
    "run failures": lambda: shipped_names("failures"),
    "run restart": lambda: shipped_names("restarts"),
    "run checkpoint.storage": lambda: shipped_names("storage"),
    "run price.buy": lambda: shipped_names("purchases"),
}
"""Names that a key takes, by table and key, where they are few."""

WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", datetime.date: "date"}


LEFT_TO_ALL = (
    "software", "software.static_experts", "communication.overlap", "routing.capacity", "routing.eplb",
    "ramp", "phases[]", "checkpoint.tiers[]", "spares", "slow", "preemption", "maintenance", "fault_tolerance",
)  # fmt: skip
"""Sections whose keys docs/scenario.md leaves to the page of all keys."""


def filled(page: str) -> str:
    """docs/scenario.md with every table between its marks (`<!-- keys NAME -->`) written anew."""
    for name, lines in short_tables().items():
        begin, end = f"<!-- keys {name} -->\n", "<!-- end of keys -->"
        if begin not in page:
            raise SystemExit(f"the page has no mark {begin.strip()!r}")
        before, rest = page.split(begin)
        page = before + begin + "\n".join(lines) + "\n" + rest[rest.index(end) :]
    return page


def every_key() -> str:
    """The page of all keys, each with its type, limits, default and whole meaning."""
    lines = [
        "# Every key of a scenario",
        "",
        "From the code that reads a scenario; `moesim schema scenario` prints the same as JSON Schema. "
        "`required` means",
        "that there is no default, and `by rule` that the key [may be left "
        "out](scenario.md#what-may-be-left-out).",
    ]
    for name, rows in tables().items():
        lines += ["", f"## {TITLES[name]}", "", *rows]
    return "\n".join(lines) + "\n"


TITLES = {
    "scenario": "The scenario",
    "precision": "A precision recipe",
    "outline": "A short cluster",
    "cluster": "A full cluster",
    "pool": "A pool of a fleet",
    "run": "The run",
    "load": "Popularity of experts",
    "faults": "Faults",
}


SHORT_LEFT_OUT = ("precision", "cluster")
"""Tables that docs/scenario.md replaces by a sentence."""


def short_tables() -> dict[str, list[str]]:
    """The tables of docs/scenario.md: values, defaults in brackets, and first sentences of meanings."""
    kept = {name: parts for name, parts in TABLES.items() if name not in SHORT_LEFT_OUT}
    return {
        **{name: _keys(name, parts, brief=True) for name, parts in kept.items()},
        **{name: _kinds(models, brief=True) for name, models in KINDS.items()},
    }


def _row(cells: tuple[str, str, str, str], brief: bool) -> str:
    """A line of a table from key, type, default and meaning."""
    key, values, default, meaning = cells
    if brief:
        either = values.replace(" or ", ", ")
        return f"| {key} | {f'{either} ({default})' if either else ''} | {_first(meaning)} |"
    return f"| {' | '.join(cells)} |"


HEADS = {
    False: ["| key | type | default | meaning |", "|---|---|---|---|"],
    True: ["| key | values (default) | meaning |", "|---|---|---|"],
}


def _first(meaning: str) -> str:
    """The first sentence of a meaning, with the names that ship."""
    text, shipped, names = meaning.partition(". Shipped: ")
    first = re.split(r"(?<=[^.])(?<!eq)\. (?=[A-Z`])", text)[0]
    return first + (f". Shipped: {names}" if shipped else "")


def tables() -> dict[str, list[str]]:
    """Lines of every table by its name."""
    return {
        **{name: _keys(name, parts) for name, parts in TABLES.items()},
        **{n: _kinds(k) for n, k in KINDS.items()},
    }


def _keys(table: str, parts: dict[str, type[BaseModel]], brief: bool = False) -> list[str]:
    sections = {path for path in parts if path}
    lines = list(HEADS[brief])
    for path, model in parts.items():
        if brief and path in LEFT_TO_ALL:
            continue
        for name, field in model.model_fields.items():
            key = f"{path}.{name}" if path else name
            if key not in sections and f"{key}[]" not in sections:
                meaning = _meaning(model, name) + _shipped(SHIPPED.get(f"{table} {key}", tuple)())
                full = f"{table}.{key}" if table == "run" else key
                default = "by rule" if table in ("scenario", "run") and full in RULES else _default(field)
                lines.append(_row((f"`{key}`", _type(field), default, meaning), brief))
            elif descriptions(model).get(name) and not field.is_required():
                lines.append(_row((f"`{key}`", "section", _default(field), _meaning(model, name)), brief))
    return lines


def _shipped(names: Iterable[str]) -> str:
    """The names that ship; models have a page of their own."""
    names = tuple(names)
    if names == shipped_models():
        return f". Shipped: {len(names)}, listed in [models.md](models.md)"
    return ". Shipped: " + ", ".join(f"`{n}`" for n in names) if names else ""


def _kinds(models: tuple[type[BaseModel], ...], brief: bool = False) -> list[str]:
    lines = list(HEADS[brief])
    for model in models:
        kind = get_args(model.model_fields["kind"].annotation)[0]
        lines.append(
            _row((f"`kind: {kind}`", "", "", _sentence(str(model.__doc__).split(chr(10))[0])), brief)
        )
        lines += [
            _row((f"`{name}`", _type(field), _default(field), _meaning(model, name)), brief)
            for name, field in model.model_fields.items()
            if name != "kind"
        ]
    return lines


def _meaning(model: type[BaseModel], name: str) -> str:
    meaning = descriptions(model).get(name)
    if not meaning:
        raise SystemExit(
            f"{model.__name__}.{name} has no docstring: docs/scenario.md cannot say what it means"
        )
    return _sentence(meaning)


def _sentence(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == () or value == "":
        return "none"
    if isinstance(value, Sourced):
        return f"{value.value:g}"
    if isinstance(value, BaseModel):
        return "as below"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: FieldInfo) -> str:
    return " or ".join(dict.fromkeys(_words(field.annotation, list(field.metadata))))


def _words(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    """The alternatives of a type in words, each with its limits."""
    origin, args = get_origin(annotation), get_args(annotation)
    if any(_takes_a_name(m) for m in metadata):
        yield "text"
        metadata = [m for m in metadata if not _takes_a_name(m)]
    if origin is Annotated:
        more = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        yield from _words(args[0], [*more, *metadata])
    elif origin in (Union, types.UnionType):
        for part in args:
            if part is not type(None):
                yield from _words(part, metadata)
    elif origin is Literal:
        yield from (f"`{value}`" for value in args)
    elif origin in (tuple, list):
        inner = ", ".join(dict.fromkeys(_words(args[0], [])))
        least = next((f", at least {m.min_length}" for m in metadata if isinstance(m, MinLen)), "")
        yield f"list of {inner}{least}"
    elif isinstance(annotation, type) and issubclass(annotation, Sourced):
        yield f"sourced {_spaced(annotation.__name__.removeprefix('Sourced'))}{_limits(metadata)}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "mapping"
    else:
        yield f"{WORDS[annotation]}{_limits(metadata)}"


def _takes_a_name(validator: Any) -> bool:
    """Whether a validator accepts a name or a path in the place of a mapping."""
    return isinstance(validator, BeforeValidator) and str in get_args(validator.json_schema_input_type)


def _spaced(name: str) -> str:
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _limits(metadata: list[Any]) -> str:
    signs = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
    found = [
        f"{sign} {getattr(limit, attribute):g}"
        for kind, (sign, attribute) in signs.items()
        for limit in metadata
        if isinstance(limit, kind)
    ]
    for limit in metadata:
        if isinstance(limit, AfterValidator) and isinstance(limit.func, partial):
            allowed = limit.func.keywords["allowed"]
            found.append(f"{allowed.low:g} to {allowed.high:g}")
    return " " + ", ".join(found) if found else ""
