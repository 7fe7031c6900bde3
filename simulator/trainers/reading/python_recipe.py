"""Reads recipes in Python (Megatron-Bridge, NeMo 2, torchtitan) from their syntax tree."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from pathlib import Path

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.reading.flatten import check_number
from moesim.simulator.trainers.reading.limits import MOST_BYTES
from moesim.simulator.trainers.reading.python_statements import MOST_LISTED, Recipe
from moesim.simulator.trainers.reading.python_values import Tree, arguments_of_tree
from moesim.simulator.trainers.reading.trainer_names import trainer_of_keys
from moesim.simulator.trainers.reading.yaml_launch import machine_of_keys

_NESTED_BRACKETS = 60


def read_recipe(path: Path, recipe: str | None, parameters: Mapping[str, str] | None = None) -> LaunchFile:
    """The launch of the function `recipe` of a Python file; of the only one where `recipe` is None.

    A variable of the file that holds a configuration counts as well. Raises InputError where the file is no
    Python, has no such function, or has several and none is named.
    """
    text = read_text(path, MOST_BYTES, "Python recipe")
    reader = Recipe(_parsed(text, path.name), path.name)
    try:
        reader.module()
        name = reader.chosen(recipe)
        value = reader.start(name, parameters or {})
    except RecursionError:
        raise InputError(f"{path.name}: nested too deeply; write the values out") from None
    if not isinstance(value, Tree | dict):
        shown = reader.text(value, path.name)[:80]
        raise InputError(
            f"{path.name}: {name} makes no configuration that can be read ({shown}); name another of "
            f"{', '.join(reader.recipes()[:MOST_LISTED])}"
        )
    tree = (
        value
        if isinstance(value, Tree)
        else Tree(entries={str(key): (item, 1) for key, item in value.items()})
    )
    arguments = tuple(arguments_of_tree(tree, path.name, reader.budget))
    if not arguments:
        raise InputError(f"{path.name}: {name} sets no value; name the function that configures the training")
    if tree.is_open and tree.call:
        reader.notes[
            f"{path.name}: {name} starts from {tree.call[:100]}, which is in another file; what this file "
            "does not set has that file's value"
        ] = None
    trainer = trainer_of_keys([argument.name for argument in arguments], text)
    return LaunchFile(trainer, name, arguments, machine_of_keys(arguments), {}, tuple(reader.notes))


def _parsed(text: str, file: str) -> ast.Module:
    level = deepest = 0
    for char in text:
        level += (char in "([{") - (char in ")]}")
        deepest = max(deepest, level)
    if deepest > _NESTED_BRACKETS + text.count("'") + text.count('"'):
        raise InputError(f"{file}: nested too deeply, more than {_NESTED_BRACKETS} brackets")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the file's text looks like is not the user's concern here
            tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{file}, line {error.lineno}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{file}: cannot be read as Python: {str(error)[:100]}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            check_number(node.value, f"{file}, line {node.lineno}")
    return tree
