"""What a result is of: its scenario as data, the overrides on it, its plan, the engine and the version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from moesim.hwmodels.cluster import Cluster, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.yaml_io import EXTENSIONS
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.scenario.outline import AnyCluster, ClusterOutline
from moesim.simulator.scenario.scenario import Scenario
from moesim.version import __version__

EVENTS = "discrete events"
"""Engine of a simulated result. Its implementations give the same bytes, so which one ran is not stated."""
CLOSED_FORM = "closed form"
"""Engine of an estimate."""

WIDTH = 80
"""Columns of a printed line."""
MOST_LINES = 2
"""Most lines of a row of the printed inputs; `Inputs` itself has all of it."""


class PlanInputs(Section):
    """The plan of a result: layout, order and numbers of one step."""

    n_gpus: int
    tp: int
    pp: int
    ep: int
    cp: int
    dp: int
    vpp: int
    expert_tp: int
    microbatch: int
    """Sequences of a micro-batch."""
    sequences: int
    """Sequences of a step."""
    sequence_length: int
    schedule: str
    zero_stage: int
    precision: str
    recompute: str
    dispatcher: str
    """Communication kernels (`communication.kernels`)."""
    communication_sms: int
    """SMs of the communication kernels (`communication.sms`)."""

    def __str__(self) -> str:
        """The plan in the field's shorthand."""
        degrees = (("TP", self.tp), ("CP", self.cp), ("PP", self.pp), ("VPP", self.vpp), ("EP", self.ep),
                   ("ETP", self.expert_tp), ("DP", self.dp))  # fmt: skip
        shown = [f"{name}{degree}" for name, degree in degrees if degree > 1]
        parts = [
            " ".join([*shown, f"MBS{self.microbatch}"]),
            self.schedule,
            f"ZeRO-{self.zero_stage}",
            f"recompute {self.recompute}",
            self.precision,
        ]
        if self.ep > 1:
            parts.append(f"{self.dispatcher} on {self.communication_sms} SMs")
        return ", ".join(parts)


class Inputs(Section):
    """What a result is of. `moesim.load` makes the scenario again, also from the JSON of a result."""

    name: str
    """Name of the scenario, as stated or by rule."""
    source: str | None
    """Name of the preset or path of the file; null for a scenario that was built in Python."""
    overrides: tuple[str, ...]
    """The `key=value` texts that were applied to the source, in order."""
    left_to_rules: tuple[str, ...] = Field((), exclude_if=lambda value: not value)
    """Keys that the source states for another accelerator, and that rules chose anew."""
    scenario: dict[str, Any]
    """The stated keys with everything applied; models and clusters from files are written into it."""
    files: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """SHA-256 of the files that `scenario` names, by key."""
    plan: PlanInputs | None = Field(None, exclude_if=lambda value: value is None)
    """Left out of a scenario that is only served."""
    engine: str
    """What computed the step: discrete events, or the closed form."""
    version: str
    """Version of moesim."""

    def lines(self, width: int = WIDTH, *, plan: bool = True) -> list[str]:
        """Source, overrides and plan (unless it is not wanted) as text of at most `width` columns."""
        most = width // 2
        texts = [text if len(text) <= most else f"{text[: most - 3]}..." for text in self.overrides]
        rows = {
            "of": self.source if self.source not in (None, self.name) else "",
            "with": ", ".join(texts),
            "by rule": ", ".join(self.left_to_rules),
            "plan": str(self.plan) if plan and self.plan else "",
        }
        lines = []
        for title, text in rows.items():
            lines += wrap(
                text or "",
                width,
                initial_indent=f"  {title:<8}",
                subsequent_indent=" " * 10,
                break_on_hyphens=False,
                max_lines=MOST_LINES,
                placeholder=" ...",
            )
        return lines


@runtime_checkable
class HasInputs(Protocol):
    """A result, which carries what it is of."""

    @property
    def inputs(self) -> Inputs | None:
        """What it is of."""


def inputs_of(scenario: Scenario, engine: str = EVENTS, n_gpus: int | None = None) -> Inputs:
    """What a result of `scenario` says that it is of.

    `n_gpus`: GPUs of its cluster or fleet; absent, the cluster is loaded to count them. Raises InputError for
    a file that cannot be read.
    """
    data = self_contained(scenario).to_dict()
    origin = scenario._origin
    # The files that the scenario names and that are not written into it.
    named: dict[str, object] = {
        "profile": scenario.profile,
        "schedule": scenario.schedule,
        "routing.load.file": getattr(scenario.routing.load, "file", None),
    }
    for number, pool in enumerate(scenario.fleet.pools if scenario.fleet else ()):
        named[f"fleet.pools.{number}.profile"] = pool.profile
    paths = {
        key: Path(scenario.path(name))
        for key, name in named.items()
        if isinstance(name, str) and name.lower().endswith((*EXTENSIONS, ".csv", ".npz", ".npy"))
    }
    return Inputs(
        name=scenario.name,
        source=origin.source,
        overrides=origin.all_overrides(data),
        left_to_rules=tuple(key for key in origin.left if key.split(".")[0] not in origin.copied),
        scenario=data,
        files={key: _digest(path) for key, path in paths.items() if is_there(path)},
        plan=_plan(scenario, n_gpus) if scenario.trains else None,
        engine=engine,
        version=__version__,
    )


def self_contained(scenario: Scenario) -> Scenario:
    """The scenario with the models and clusters of its files written into it.

    Profiles, schedules and recorded expert counts stay names of files: they may be large.
    """
    update: dict[str, object] = {}
    if _is_file(scenario.model):
        update["model"] = scenario.shape
    cluster = _written(scenario, scenario.cluster)
    if cluster is not scenario.cluster:
        update["cluster"] = cluster
    if scenario.fleet is not None:
        pools = [(pool, _written(scenario, pool.cluster)) for pool in scenario.fleet.pools]
        if any(new is not pool.cluster for pool, new in pools):
            written = tuple(pool.model_copy(update={"cluster": new}) for pool, new in pools)
            update["fleet"] = scenario.fleet.model_copy(update={"pools": written})
    return scenario.model_copy(update=update) if update else scenario


def _written(scenario: Scenario, cluster: AnyCluster | None) -> AnyCluster | Cluster | None:
    """A cluster with the descriptions of its files in it; the same object where it names none."""
    base = None if scenario._base is None else Path(scenario._base) / "scenario"
    if isinstance(cluster, str) and _is_file(cluster):
        return load_cluster(cluster, base)
    if isinstance(cluster, ClusterOutline):
        parts: dict[str, object] = {}
        for key, load in (("node", load_node), ("network", load_network)):
            name = getattr(cluster, key)
            if _is_file(name):
                parts[key] = load(name, base)
        return cluster.model_copy(update=parts) if parts else cluster
    return cluster


def _is_file(name: object) -> bool:
    return isinstance(name, str) and name.lower().endswith(EXTENSIONS)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def check_files(inputs: Inputs, base: str | None, place: str) -> None:
    """Raise InputError where a file that a result read is missing or has another content now."""
    for key, digest in inputs.files.items():
        name = _value_at(inputs.scenario, key)
        if not isinstance(name, str):
            raise InputError(f"{place}: inputs.files names {key[:80]!r}, where the scenario names no file")
        path = Path(name) if base is None else Path(base) / name
        if not is_there(path):
            path = Path(name)
        if not is_there(path) or _digest(path) != digest:
            what = "has changed" if is_there(path) else "is not there"
            raise InputError(
                f"{place}: the result read {key}={name}, and this file {what}; put the file back (SHA-256 "
                f"{digest[:12]}), or predict anew",
                key=key,
            )


def _value_at(data: object, key: str) -> object:
    """The value at a dotted path of plain data; None where there is none."""
    for part in key.split("."):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def _plan(scenario: Scenario, n_gpus: int | None) -> PlanInputs:
    plan = scenario.parallel
    gpus = sum(machine.n_gpus for machine in scenario.machines) if n_gpus is None else n_gpus
    recipe = scenario.precision
    if not isinstance(recipe, str):
        recipe = next((name for name, one in PRECISIONS.items() if one == recipe), f"own {recipe.linear}")
    return PlanInputs(
        n_gpus=gpus,
        **{name: getattr(plan, name) for name in ("tp", "pp", "ep", "cp", "vpp", "expert_tp", "microbatch")},
        dp=max(1, gpus // (plan.tp * plan.pp * plan.cp)),
        sequences=scenario.batch.sequences,
        sequence_length=scenario.batch.sequence_length,
        schedule=scenario.schedule,
        zero_stage=plan.zero_stage,
        precision=recipe,
        recompute=recompute_label(scenario.recompute),
        dispatcher=scenario.communication.kernels,
        communication_sms=scenario.communication.sms,
    )
