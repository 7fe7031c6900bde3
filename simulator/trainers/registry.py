"""Registry of the training frameworks. A new one is a data file, a module that writes plans and a line."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.trainers.bridge import bridge_export, bridge_problems
from moesim.simulator.trainers.deepspeed import deepspeed_export, deepspeed_problems
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.torchtitan.export import torchtitan_export
from moesim.simulator.trainers.torchtitan.rules import problems as torchtitan_problems
from moesim.simulator.trainers.trainer import Trainer, Writer, build_trainer

TRAINERS: Mapping[str, Writer] = {
    "megatron": Writer(megatron_arguments),
    "bridge": Writer(bridge_export, bridge_problems),
    "torchtitan": Writer(torchtitan_export, torchtitan_problems),
    "deepspeed": Writer(deepspeed_export, deepspeed_problems),
}
"""Code of every trainer by its name, which is also that of its data file."""


def trainer_of(text: str) -> Trainer:
    """A trainer by name, such as `megatron`, or by name and version, such as `megatron@0.14`.

    Raises InputError, with the known names, for any other text.
    """
    name, _, version = text.partition("@")
    if name not in TRAINERS:
        raise InputError(
            f"trainer {name[:60]!r} is not known{nearest(name, list(TRAINERS))}; known: "
            f"{', '.join(TRAINERS)}, each with a version after @ if wanted"
        )
    return build_trainer(name, version or None, TRAINERS[name])
