"""Registry of the training frameworks. A new one is a data file, a module that writes plans and a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import Export
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.trainer import Trainer, build_trainer

EXPORTS: Mapping[str, Callable[[Scenario, str], Export]] = {"megatron": megatron_arguments}
"""What writes a scenario's plan for a version of a trainer, by the trainer's name."""


def trainer_of(text: str) -> Trainer:
    """A trainer by name, such as `megatron`, or by name and version, such as `megatron@0.14`.

    Raises InputError, with the known names, for any other text.
    """
    name, _, version = text.partition("@")
    if name not in EXPORTS:
        raise InputError(
            f"trainer {name!r} is not known{nearest(name, list(EXPORTS))}; known: {', '.join(EXPORTS)}, each "
            "with a version after @ if wanted"
        )
    return build_trainer(name, version or None, EXPORTS[name])
