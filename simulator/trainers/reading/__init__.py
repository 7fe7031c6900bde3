"""Readers of what a trainer was told: its printed arguments, configurations, plain scripts and captures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import MAX_YAML_BYTES, parse_mapping
from moesim.simulator.trainers.launch import LaunchFile, Machine
from moesim.simulator.trainers.reading.capture import NOTED, read_capture
from moesim.simulator.trainers.reading.configuration import MOST_BYTES, read_configuration, read_toml
from moesim.simulator.trainers.reading.launchers import (
    arguments_of,
    chosen_launch,
    header_options,
    slurm_variables,
)
from moesim.simulator.trainers.reading.printed import bridge_container, printed_launch, wandb_values
from moesim.simulator.trainers.reading.script import REMEDY, Script, Word
from moesim.simulator.trainers.reading.trainer_names import trainer_of

__all__ = ["read_launch"]

_NOTHING: Mapping[str, str] = MappingProxyType({})
MOST_LOG_BYTES = 20_000_000
"""Most bytes of a log, in which a trainer prints its arguments once."""


def read_launch(
    path: Path,
    environment: Mapping[str, str] = _NOTHING,
    parameters: Sequence[str] = (),
    run: int | None = None,
) -> LaunchFile:
    """What a trainer was told, from its printed arguments, a configuration, a plain script or a capture.

    `environment` gives the variables that the file does not set itself, `parameters` are `$1`, `$2`, ... of a
    script, and `run` chooses one of several launches. Nothing of the file is run. Raises InputError, naming
    file and line, for a file that cannot be read, is beyond the limits, needs a shell, or starts no training.
    """
    try:
        return _launch_of(path, environment, parameters, run)
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read: {type(error).__name__}: {str(error)[:200]}; write the arguments out"
        ) from error


def _launch_of(
    path: Path, environment: Mapping[str, str], parameters: Sequence[str], run: int | None
) -> LaunchFile:
    suffix = path.suffix.lower()
    if path.is_dir():
        return read_capture(path / NOTED, environment, run)
    if suffix == ".jsonl":
        return read_capture(path, environment, run)
    if suffix == ".toml":
        return read_toml(path)
    if suffix == ".py":
        raise InputError(
            f"{path}: a recipe in Python is not read; hand in what the trainer prints of it: the YAML of "
            "Megatron-Bridge's print_yaml(), the configuration that torchtitan logs, or config.yaml of W&B"
        )
    text = read_text(path, MOST_LOG_BYTES, "launch file", strict=False)
    if suffix not in (".yaml", ".yml", ".json"):
        launch = printed_launch(text, path.name, run)
        if launch is not None:
            return launch
        script = read_text(path, MOST_BYTES, "launch script", strict=False)
        return read_script(script, path, environment, parameters, run)
    # An export of W&B, a ConfigContainer, or any other configuration.
    read_text(path, MAX_YAML_BYTES, "configuration")
    data = parse_mapping(text, str(path))
    if "wandb_version" in data or "_wandb" in data:
        data, launch = wandb_values(data, text, path.name)
        if launch is not None:
            return launch
    if str(data.get("_target_", "")).endswith("ConfigContainer"):
        return bridge_container(data, text, path.name)
    return read_configuration(data, text, path.name, environment)


def read_script(
    text: str, path: Path, environment: Mapping[str, str], parameters: Sequence[str], run: int | None
) -> LaunchFile:
    """The launch of a script whose arguments are literal words and plain `NAME=value`.

    Raises InputError, with the line and the remedy, for what only a shell can evaluate on the way to it.
    """
    headers = header_options(text, path.name)
    slurm: dict[str, str] = {}
    for options, _ in headers:
        slurm |= slurm_variables(options)
    script = Script(path.name, {**slurm, **environment}, parameters)
    script.follow(text.replace("\r\n", "\n"))
    launch = chosen_launch(script.commands, path.name, headers, run=run)
    if launch is not None:
        return launch
    if script.stopped:
        raise InputError(
            f"{script.stopped}: stands before the launch, and only a shell can follow it; {REMEDY}"
        )
    return _variables_only(script, path.name)


def _variables_only(script: Script, file: str) -> LaunchFile:
    """The launch of a file that only sets one variable with arguments, such as a model's configuration."""
    found = {
        name: texts
        for name, texts in script.values.items()
        if name not in script.given
        and sum(bool(re.match(r"\s*--\w", piece.text)) for text in texts for piece in text)
    }
    if len(found) != 1:
        names = f"; of its variables {', '.join(sorted(found))}, none holds all arguments" if found else ""
        raise InputError(
            f"{file}: starts no program with arguments (torchrun, deepspeed, accelerate, python){names}; "
            "give the script that starts the training, a configuration (.yaml, .toml, .json), or a log in "
            "which the trainer prints its arguments"
        )
    (name,) = found
    arguments = arguments_of([Word(text, place) for text, place in script.words_of(name)])
    note = f"{file} starts no training; the arguments of its variable {name} were read"
    return LaunchFile(trainer_of("", arguments), None, arguments, Machine(), {}, (note,))
