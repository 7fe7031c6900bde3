"""Checks that a file which only names its model means the base's: its sizes would be another model's else."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.torchtitan.rules import FLAVORS, sizes_of

FAMILIES = (
    "deepseek", "qwen", "mixtral", "mistral", "llama", "gpt-oss", "gpt", "kimi", "glm", "gemma", "nemotron",
    "bert", "falcon", "phi", "bloom", "grok", "minimax", "dbrx", "olmo", "opt",
)  # fmt: skip
"""Families of models, by the word that their names hold; a longer one stands before one that it holds."""

NAMING = frozenset([
    "model.name", "model.flavor", "model.config", "model", "model_spec", "hf_assets_path",
    "model.hf_assets_path", "--model_recipe_name", "--model_name_or_path", "--model-name", "--model",
    "--recipe", "training", "run.name",
])  # fmt: skip
"""Arguments that name a model or a recipe of one."""

VARIABLES = ("MODEL", "MODEL_NAME")

_SIZE = re.compile(r"(?<![\d.])(?:\d{1,4}x)?\d{1,4}(?:\.\d{1,2})?b(?![a-z0-9])")
_VERSION = re.compile(r"(?<![a-z])v(\d)")


def check_named_model(launch: LaunchFile, shape: ModelShape, ignore: Collection[str] = ()) -> None:
    """Raise InputError where the file names another model than the base's, which has this `shape`.

    A flavor of torchtitan must have the base's sizes. `ignore` are names of arguments to skip.
    """
    model = shape.name
    ours = _marks(model)
    if launch.trainer == "torchtitan":
        _check_flavor(launch, shape, ignore)
    for text, place in _names(launch, ignore):
        family, sizes, versions = _marks(text)
        other_size = sizes and ours[1] and not sizes & ours[1]
        other_version = versions and ours[2] and not versions & ours[2]
        if family in (None, ours[0]) and not other_size and not (family and other_version):
            continue
        raise InputError(
            f"{place}: names the model {text[:60]!r}, whose sizes the file does not state, and the base's "
            f"model is {model}; give a --base with this model"
        )


def _check_flavor(launch: LaunchFile, shape: ModelShape, ignore: Collection[str]) -> None:
    stated = {argument.name.lstrip("-"): argument for argument in launch.arguments}
    family, flavor = stated.get("model.name"), stated.get("model.flavor")
    if flavor is None or flavor.name in ignore or isinstance(flavor.value, Unknown):
        return
    names = {str(family.value)} if family is not None else {one.family for one in FLAVORS}
    same_name = [one for one in FLAVORS if one.family in names and one.name == str(flavor.value)]
    ours = sizes_of(shape)
    remedy = f"give a --base with this model, or --ignore {flavor.name}"
    if not same_name:
        raise InputError(
            f"{flavor.place}: names the model {str(flavor.value)[:60]!r}, a flavor of torchtitan whose sizes "
            f"are not known here, and the base's model is {shape.name}; {remedy} if it is the same"
        )
    if ours is not None and not any(one.sizes == ours for one in same_name):
        sizes = same_name[0].sizes
        raise InputError(
            f"{flavor.place}: names the model {flavor.value!r} of {sizes.layers} layers and width "
            f"{sizes.hidden}, and the base's model {shape.name} has {ours.layers} layers and width "
            f"{ours.hidden}; {remedy}"
        )


def _names(launch: LaunchFile, ignore: Collection[str]) -> Iterator[tuple[str, str]]:
    """Texts that name the model, with their places."""
    for variable in VARIABLES:
        set_to = launch.environment.get(variable)
        if isinstance(set_to, str):
            yield set_to, f"the variable {variable}"
    for argument in launch.arguments:
        if argument.name.lstrip("+") in NAMING and argument.name not in ignore:
            value = argument.value.text if isinstance(argument.value, Unknown) else argument.value
            yield str(value), f"{argument.place}: {argument.name}"
    program = launch.program
    if program is not None and "/" not in program and not program.endswith((".py", ".sh")):
        yield program, "the recipe"


def _marks(text: str) -> tuple[str | None, set[str], set[str]]:
    """Family, sizes and versions in a name."""
    plain = text.lower().replace("_", "-")
    family = next((family for family in FAMILIES if re.search(rf"(?<![a-z]){family}", plain)), None)
    versions = set(_VERSION.findall(plain)) if family == "deepseek" else set[str]()
    return family, set(_SIZE.findall(plain)), versions
