"""Turns a launch file into scenario keys and a table of what every argument means."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.meaning.arguments import (
    NAMED_TRAINERS,
    collect,
    read_variables,
    starts_another_script,
    with_nodes,
)
from moesim.simulator.trainers.meaning.given import Given, check_contradictions
from moesim.simulator.trainers.meaning.kernels import (
    fused_loss,
    read_dispatcher,
    read_precision,
    read_recompute,
    read_routing,
    read_software,
)
from moesim.simulator.trainers.meaning.model import NEEDED, read_shape
from moesim.simulator.trainers.meaning.named_model import check_named_model
from moesim.simulator.trainers.meaning.parallel import (
    STAGE_ARGUMENTS,
    read_degrees,
    read_expert_overlap,
    read_machine,
    read_rounds,
    read_schedule,
    read_stages,
)
from moesim.simulator.trainers.meaning.table import MeaningRow, megatron_table

RELEASES = {
    "megatron-lm": "megatron-core-0.17",
    "megatron-bridge": "megatron-bridge-0.4",
    "nemo": "nemo-25",
    "torchtitan": "torchtitan-0.2",
    "deepspeed": "deepspeed-0.19",
}
"""Release of `software.framework` of a launch file's trainer."""

KEPT = ("cluster", "fleet", "profile", "variation", "run", "resolution", "spreading", "faults", "seed")
"""Keys of the base that a scenario keeps unless the launch file sets them."""


class Understanding(Struct, frozen=True):
    """A launch file with a meaning for every argument.

    `keys` are the scenario keys that follow from the file, by dotted path; `rows` explain every argument in
    the order of the file's groups; `notes` are the reader's sentences; `scenario` is valid and complete.
    """

    keys: Mapping[str, Any]
    rows: tuple[MeaningRow, ...]
    notes: tuple[str, ...]
    scenario: Scenario

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "keys": json.loads(json.dumps(self.keys)),
            "arguments": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
            "scenario": self.scenario.to_dict(),
        }


def load_base(base: AnyScenario, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario that stands under a launch file, which says the plan (see `load_scenario`).

    A file may leave `parallel` out. Raises InputError as `load_scenario` does.
    """
    path = str(base) if isinstance(base, (str, Path)) else ""
    if path.lower().endswith(EXTENSIONS) and "parallel" not in load_mapping(Path(path)):
        return load_scenario(base, ["parallel={}", *overrides])
    return load_scenario(base, overrides)


def understand(
    launch: LaunchFile,
    base: Scenario,
    name: str = "launch",
    vocab: int | None = None,
    gpus: int | None = None,
    ignore: Collection[str] = (),
    ignore_unknown: bool = False,
) -> Understanding:
    """Give every argument of a launch file a meaning, and build the scenario.

    `base` gives cluster, profile, prices and run; `name` is the name of the file; `vocab` is the size of the
    vocabulary where the file does not state it; `gpus` replaces the number that it asks for; `ignore` are
    arguments to skip, and `ignore_unknown` skips those that no table has. Raises InputError, naming argument
    and place, for unknown, refused and contradictory arguments and for values that matter and are missing.
    """
    in_part = starts_another_script(launch)
    # A script that gives Megatron-DeepSpeed its model has Megatron-LM's own arguments.
    whole = {f"--{name}" for name in NEEDED} <= {argument.name for argument in launch.arguments}
    like_base = in_part or (launch.trainer in NAMED_TRAINERS and not whole)
    if like_base and not base.parallel.model_fields_set:
        raise InputError(
            f"{name} leaves the plan to the base, and the base states no parallel; add parallel to the base, "
            "or give the launch file that states the plan"
        )
    table = megatron_table()
    stated, rows = collect(launch, table, ignore, ignore_unknown)
    if in_part:
        rows += read_variables(launch, stated, table, base, ignore)
        launch = with_nodes(launch)
    given = Given(stated, rows, like_base)
    if not any(given.has(name) for name in NEEDED):
        check_named_model(launch, base.shape, ignore)
    check_contradictions(given)
    n_gpus = read_machine(given, launch, base, gpus)
    model_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:60] or "launch"
    _read(given, base, n_gpus, model_name, vocab, like_base, launch.trainer)
    if not any(row.kind in ("key", "default") for row in given.rows):
        raise InputError(
            f"{name}: none of its arguments sets a key of the scenario, so all of it would be the base's; "
            "give the file that states the plan"
        )
    given.explain_rest()
    scenario = scenario_of(given.keys, base, name, launch.trainer)
    return Understanding(given.keys, tuple(given.rows), launch.notes, scenario)


def _read(
    given: Given,
    base: Scenario,
    n_gpus: int,
    name: str,
    vocab: int | None,
    like_base: bool,
    trainer: str | None,
) -> None:
    tp = given.integer("tensor-model-parallel-size", base.parallel.tp if like_base else 1, most=1_000_000)
    shape = read_shape(given, base, name, tp, vocab, like_base)
    degrees = read_degrees(given, base, n_gpus, shape.moe is not None, like_base)
    # A trainer that is made of Megatron-LM has no other schedules from the base.
    spec, of_megatron = SCHEDULES.get(base.schedule), ("nemo", "megatron-bridge", "megatron-lm")
    has_it = spec is not None and ("megatron-lm" in spec.names_elsewhere or trainer not in of_megatron)
    if like_base and not given.has(*STAGE_ARGUMENTS) and has_it:
        kept = base.to_dict()
        given.set("schedule", base.schedule, "pipeline-model-parallel-size")
        given.keys["parallel.vpp"] = base.parallel.vpp
        if "stages" in kept:
            given.keys["stages"] = kept["stages"]
    else:
        read_stages(given, shape, degrees.pp, like_base)
    read_schedule(given)
    read_rounds(given, degrees.pp, given.keys["batch.sequences"] // (degrees.dp * degrees.microbatch))
    latent = any(attention.kind == "mla" for attention in shape.attention_by_name.values())
    read_recompute(given, base, latent, like_base)
    read_precision(given, fused_loss(given) == "fused", like_base, base.recipe)
    read_dispatcher(given, base, degrees.ep, like_base)
    read_expert_overlap(given, base, shape)
    read_routing(given, shape.moe is not None)
    read_software(given, base, degrees.tp, degrees.cp, like_base)


def scenario_of(keys: Mapping[str, Any], base: Scenario, name: str, trainer: str | None) -> Scenario:
    """The scenario with `keys` by dotted path, and the base's cluster, profile, prices and run.

    Its framework is the release of the `trainer` of the file, where the file tells it.
    """
    kept = base.to_dict()
    data: dict[str, Any] = {key: kept[key] for key in KEPT if key in kept}
    data["description"] = f"Imported from {name}"
    for section, stay in (
        ("communication", ("sms", "kernels", "overlap")),
        ("routing", ("expert_load_cv", "load")),
        ("software", ("framework", "host")),
    ):
        data[section] = {key: kept[section][key] for key in stay if key in kept.get(section, {})}
    for whole in ("precision", "recompute"):
        if whole in kept:
            data[whole] = kept[whole]
    if trainer is not None:
        data["software"]["framework"] = RELEASES[trainer]
    if "cluster" in keys:
        data.pop("fleet", None)
    for key, value in keys.items():
        section, dot, inner = key.partition(".")
        if dot:
            data.setdefault(section, {})[inner] = value
        else:
            data[section] = value
    return validate_model(Scenario, data, f"the scenario from {name}", base._base)
