"""Readers of launch files: shell scripts, YAML, TOML, JSON and Python recipes, of which nothing is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.reading.limits import MOST_BYTES
from moesim.simulator.trainers.reading.python_recipe import read_recipe
from moesim.simulator.trainers.reading.shell import read_shell
from moesim.simulator.trainers.reading.toml_launch import read_json, read_toml
from moesim.simulator.trainers.reading.yaml_launch import read_yaml

__all__ = ["read_launch"]

_NOTHING: Mapping[str, str] = MappingProxyType({})
_SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".conf", "")


def read_launch(
    path: Path,
    environment: Mapping[str, str] = _NOTHING,
    recipe: str | None = None,
    parameters: Sequence[str] = (),
) -> LaunchFile:
    """What a launch file says: a shell script, a YAML, TOML or JSON configuration, or a Python recipe.

    `environment` gives the variables that the file does not set itself, `recipe` names the function of a
    Python file, and `parameters` are the positional parameters of a script, or `name=value` parameters of a
    recipe. Nothing of the file is run. Raises InputError, naming file and line, for a file that cannot be
    read, that is beyond the limits, or that starts no training.
    """
    try:
        return _read(path, environment, recipe, parameters)
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read: {type(error).__name__}: {str(error)[:200]}; write the arguments out"
        ) from error


def _read(
    path: Path, environment: Mapping[str, str], recipe: str | None, parameters: Sequence[str]
) -> LaunchFile:
    suffix = path.suffix.lower()
    if recipe is not None and suffix != ".py":
        raise InputError(
            f"{path}: recipe={recipe!r} names a function, but only a .py file has functions; leave it out"
        )
    if suffix in (".yaml", ".yml"):
        return read_yaml(path, environment)
    if suffix == ".toml":
        return read_toml(path)
    if suffix == ".json":
        return read_json(path, environment)
    if suffix == ".py":
        return read_recipe(path, recipe, _named(parameters))
    if suffix in _SHELL or read_text(path, MOST_BYTES, "launch file", strict=False).startswith("#!"):
        return read_shell(path, environment, parameters)
    raise InputError(
        f"{path}: {suffix!r} is no launch file that can be read; give a shell script (.sh, .slurm), a "
        "configuration (.yaml, .toml, .json) or a recipe (.py)"
    )


def _named(parameters: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for parameter in parameters:
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", parameter, re.DOTALL)
        if match is None:
            raise InputError(f"the parameter {parameter[:60]!r} of a recipe must be written as name=value")
        named[match[1]] = match[2]
    return named
