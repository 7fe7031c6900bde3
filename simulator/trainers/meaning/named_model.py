"""Checks that a file which only names its model means the base's: its sizes would be another model's else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import LaunchFile, Unknown

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


def check_named_model(launch: LaunchFile, model: str) -> None:
    """Raise InputError where the file names another model than the base's, which is called `model`."""
    ours = _marks(model)
    for text, place in _names(launch):
        family, sizes, versions = _marks(text)
        if family is None:
            if not (sizes and ours[1] and not sizes & ours[1]):
                continue
        elif family == ours[0] and not any(
            one and other and not one & other for one, other in ((sizes, ours[1]), (versions, ours[2]))
        ):
            continue
        raise InputError(
            f"{place}: names the model {text[:60]!r}, whose sizes the file does not state, and the base's "
            f"model is {model}; give a --base with this model"
        )


def _names(launch: LaunchFile) -> Iterator[tuple[str, str]]:
    """Texts that name the model, with their places."""
    for variable in VARIABLES:
        set_to = launch.environment.get(variable)
        if isinstance(set_to, str):
            yield set_to, f"the variable {variable}"
    for argument in launch.arguments:
        if argument.name.lstrip("+") in NAMING:
            value = argument.value
            yield (
                str(value.text if isinstance(value, Unknown) else value),
                f"{argument.place}: {argument.name}",
            )
    if (
        launch.program is not None
        and "/" not in launch.program
        and not launch.program.endswith((".py", ".sh"))
    ):
        yield launch.program, "the recipe"


def _marks(text: str) -> tuple[str | None, set[str], set[str]]:
    """Family, sizes and versions in a name."""
    plain = text.lower().replace("_", "-")
    family = next((family for family in FAMILIES if re.search(rf"(?<![a-z]){family}", plain)), None)
    versions = set(_VERSION.findall(plain)) if family == "deepseek" else set[str]()
    return family, set(_SIZE.findall(plain)), versions
