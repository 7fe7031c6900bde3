"""Reads YAML launch files: MODEL_ARGS of Megatron-LM, and nested configurations of NeMo and Bridge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import MAX_YAML_BYTES, parse_mapping
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown, Value
from moesim.simulator.trainers.reading.flatten import YamlLines, flattened, plain
from moesim.simulator.trainers.reading.interpolation import resolved
from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.trainer_names import trainer_of_keys

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_OTHER_FORM = re.compile(r"\$\{[A-Za-z_]\w*[^\w}][^}]{0,200}\}", re.ASCII)
_NODES = ("trainer.num_nodes", "training.trainer.num_nodes", "strategy.num_nodes")
_GPUS = ("trainer.devices", "training.trainer.devices", "trainer.num_gpus_per_node")


def read_yaml(path: Path, environment: Mapping[str, str]) -> LaunchFile:
    """The launch of a YAML file.

    A mapping MODEL_ARGS is a command line of Megatron-LM, with `${NAME}` filled from `environment`; any other
    mapping gives dotted names. Raises InputError as `parse_mapping` does, and for a file without entries.
    """
    text = read_text(path, MAX_YAML_BYTES, "YAML launch file")
    data = parse_mapping(text, str(path))
    if "MODEL_ARGS" in data:
        return _model_args(data, text, path.name, environment)
    return configuration(data, text, path.name, environment)


def _model_args(data: Mapping[str, Any], text: str, file: str, environment: Mapping[str, str]) -> LaunchFile:
    budget = Budget(file)
    notes: dict[str, None] = {}
    own = {str(key): _scalar(value) for key, value in _section(data, "ENV_VARS", file).items()}
    lines = YamlLines(text, file)
    raw = text.splitlines()

    def filled(value: str, place: str) -> str | Unknown:
        return _filled(value, place, environment, own, budget, notes)

    arguments: list[Argument] = []
    for key, value in _section(data, "MODEL_ARGS", file).items():
        place = lines(f"MODEL_ARGS.{key}")
        if value is False:
            notes[f"{place}: {key} is false, so the flag is not given"] = None
            continue
        arguments.append(Argument(str(key), _argument(value, place, raw, filled), place))
    if not arguments:
        raise InputError(f"{file}: MODEL_ARGS holds no argument; list the flags of the training under it")
    seen = {key: filled(value, lines(f"ENV_VARS.{key}")) for key, value in own.items()}
    notes |= {
        f"{file}: the section {key} is not read": None
        for key in data
        if key not in ("ENV_VARS", "MODEL_ARGS")
    }
    return LaunchFile("megatron-lm", None, tuple(arguments), Machine(), seen, tuple(notes))


def _argument(value: Any, place: str, raw: list[str], filled: Any) -> Value | Unknown:
    """The value of one flag: None for true, the text as it is written for a number."""
    if value is True or value is None or value == "":
        return None
    if isinstance(value, list):
        words = [filled(_scalar(item), place) for item in value]
        unknown = next((word for word in words if isinstance(word, Unknown)), None)
        if unknown is not None:
            return Unknown(" ".join(w.text if isinstance(w, Unknown) else w for w in words), unknown.reason)
        return tuple(words)
    text = _scalar(value)
    if isinstance(value, int | float):
        number = re.search(r"line (\d+)$", place)
        written = re.search(r":\s+([^\s#]+)\s*(?:#.*)?$", raw[int(number[1]) - 1]) if number else None
        text = written[1] if written and re.fullmatch(r"[-+.\w]+", written[1]) else text
    result: str | Unknown = filled(text, place)
    if isinstance(result, str) and not re.search(r"[\"'()\[\]]", result) and len(result.split()) > 1:
        return tuple(result.split())
    return result


def _section(data: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    section = data.get(key) or {}
    if not isinstance(section, dict):
        raise InputError(f"{file}: {key}={str(section)[:60]!r} must be a mapping of names to values")
    return section


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    shown = plain(value)
    return shown if isinstance(shown, str) else "" if shown is None else str(shown)


def _filled(
    text: str,
    place: str,
    environment: Mapping[str, str],
    own: Mapping[str, str],
    budget: Budget,
    notes: dict[str, None],
) -> str | Unknown:
    """The text with its variables filled in once; one that has no value makes an Unknown."""
    missing: list[str] = []

    def one(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in environment:
            return environment[name]
        if name in own and "$" not in own[name]:
            notes[f"{place}: {match[0]} is taken from ENV_VARS of the same file"] = None
            return own[name]
        missing.append(name)
        return match[0]

    if _OTHER_FORM.search(text):
        return Unknown(text, "this form of a variable is not filled in by envsubst")
    done = _VARIABLE.sub(one, text)
    budget.text(len(done), text[:80])
    if missing:
        return Unknown(done, f"the variable {missing[0]} is not set")
    return done


def configuration(
    data: Mapping[str, Any], text: str, file: str, environment: Mapping[str, str]
) -> LaunchFile:
    """The launch of a nested configuration, whose interpolations (`${model.size}`) are resolved."""
    lines = YamlLines(text, file)
    budget = Budget(file)
    notes: dict[str, None] = {}
    entries = flattened({key: value for key, value in data.items() if key != "defaults"}, lines)
    if "defaults" in data:
        shown = (
            ", ".join(str(plain(item)) for item in data["defaults"] or ())
            if isinstance(data["defaults"], list)
            else ""
        )
        notes[f"{lines('defaults')}: the defaults of other files are not read ({shown[:200]})"] = None
    arguments = tuple(
        replace(entry, value=resolved(entry.value, entry.name, data, environment, budget))
        for entry in entries
    )
    if not arguments:
        raise InputError(f"{file}: holds no entry; give the file that configures the training")
    trainer = trainer_of_keys([argument.name for argument in arguments], text)
    machine = machine_of_keys(arguments)
    return LaunchFile(trainer, None, arguments, machine, {}, tuple(notes))


def machine_of_keys(arguments: tuple[Argument, ...]) -> Machine:
    """The nodes and GPUs of a node that a configuration states."""
    places: dict[str, str] = {}
    counts: dict[str, int | Unknown] = {}
    for field, names in (("nodes", _NODES), ("gpus_per_node", _GPUS)):
        for argument in arguments:
            value = argument.value
            if argument.name in names and not isinstance(value, bool) and isinstance(value, int | Unknown):
                counts[field], places[field] = value, argument.place
    return Machine(counts.get("nodes"), counts.get("gpus_per_node"), places)
