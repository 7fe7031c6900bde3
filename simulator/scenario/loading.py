"""Reads scenarios: presets, files, plain data, and what a result says that it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping, parse_mapping
from moesim.simulator.scenario.inputs import HasInputs, Inputs, check_files
from moesim.simulator.scenario.origin import ScenarioOrigin, changes_of
from moesim.simulator.scenario.scenario import Scenario, changed_scenario

PRESETS = "data/scenarios"
SERVING_PRESETS = f"{PRESETS}/serving"

AnyScenario: TypeAlias = Scenario | str | Path | Mapping[str, Any] | HasInputs
"""What stands for a scenario wherever one is an argument: the scenario itself, a preset's name, the path of a
file, its keys as plain data, or a result, which carries the scenario that it is of."""


def preset_names(*, serving: bool = False) -> list[str]:
    """Names of the scenarios that ship with the package: those of training, or those for `moesim serve`."""
    folder = resources.files("moesim.simulator").joinpath(SERVING_PRESETS if serving else PRESETS)
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_scenario(what: AnyScenario, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario that `what` stands for, with `key=value` overrides applied.

    `what`: a Scenario, the name of a preset, a YAML or JSON file, plain data, a result or a result's JSON. An
    override names a key by its dotted path ("parallel.ep=32"); its value is read as YAML. Rules choose anew
    what nobody states, also on another accelerator. Raises InputError with file, key, value and nearest legal
    value for anything malformed, and for anything else than these.
    """
    if isinstance(what, Scenario):
        return what.overridden(*overrides) if overrides else what
    if isinstance(what, Path):
        what = str(what)
    if isinstance(what, str):
        origin, base = _read(what)
    elif isinstance(what, Mapping):
        origin, base = _of_data(what, "the scenario given as data", None, None)
    elif isinstance(inputs := getattr(what, "inputs", None), Inputs):
        origin, base = _of_inputs(inputs, "the result's scenario")
    else:
        raise InputError(
            f"{repr(what)[:80]} is no scenario: give a Scenario, the name of a preset, the path of a file, "
            "its keys as a mapping, or a result"
        )
    return changed_scenario(origin, changes_of(overrides), base)


def _read(name_or_path: str) -> tuple[ScenarioOrigin, str | None]:
    """(origin, folder of relative paths) of a preset or a file."""
    if preset_folder := _preset_folder(name_or_path):
        folder = resources.files("moesim.simulator").joinpath(preset_folder)
        place = f"preset {name_or_path}"
        data = parse_mapping(folder.joinpath(f"{name_or_path}.yaml").read_text("utf-8"), place)
        return ScenarioOrigin(name_or_path, data, place), _folder(name_or_path)
    if name_or_path.lower().endswith(EXTENSIONS):
        data = load_mapping(Path(name_or_path))
        return _of_data(data, name_or_path, name_or_path, _folder(name_or_path))
    known = [*preset_names(), *preset_names(serving=True)]
    raise InputError(
        f"unknown scenario {name_or_path!r}{nearest(name_or_path, known)}; presets: {', '.join(known)}; "
        f"or give a file that ends in {', '.join(EXTENSIONS)}"
    )


def _preset_folder(name: str) -> str | None:
    """The folder of a preset's file in the package; None for other names."""
    folders = {PRESETS: preset_names(), SERVING_PRESETS: preset_names(serving=True)}
    return next((folder for folder, names in folders.items() if name in names), None)


def _folder(source: str) -> str:
    """The folder that relative paths in a preset or file start from."""
    if (folder := _preset_folder(source)) is None:
        return str(Path(source).parent)
    with resources.as_file(resources.files("moesim.simulator").joinpath(folder)) as real:
        return str(real)


def _of_data(
    data: Mapping[str, Any], place: str, source: str | None, base: str | None
) -> tuple[ScenarioOrigin, str | None]:
    """The origin of plain data: the keys of a scenario, or a result with its `inputs`."""
    if isinstance(data.get("inputs"), Mapping) and "model" not in data:
        return _of_inputs(validate_model(Inputs, data["inputs"], f"{place}: inputs"), place)
    return ScenarioOrigin(source, data, place), base


def _of_inputs(inputs: Inputs, place: str) -> tuple[ScenarioOrigin, str | None]:
    """The origin of the scenario that a result is of; its relative paths start where they started."""
    base = None if inputs.source is None else _folder(inputs.source)
    check_files(inputs, base, place)
    origin = ScenarioOrigin(inputs.source, inputs.scenario, place, inputs.overrides, inputs.left_to_rules)
    return origin, base


def with_overrides(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with `key=value` overrides applied, as `load_scenario` applies them.

    Raises InputError with key, value and nearest legal value for anything malformed.
    """
    return scenario.overridden(*overrides)
