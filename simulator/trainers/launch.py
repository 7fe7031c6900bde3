"""What a trainer was told: its arguments in order, with their places, and the machine that it asks for."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

Value = str | bool | int | float | None | tuple["Value", ...]
"""A value as the file writes it: text from a script or log, typed scalars and lists from a configuration."""


class Unknown(Struct, frozen=True):
    """A value that a configuration does not state by itself.

    `text` is what the file says, and `reason` a sentence on why it has no value ("the variable DATA_PATH is
    not set", "the file leaves this value to the command line (???)").
    """

    text: str
    reason: str


class Argument(Struct, frozen=True):
    """One argument as the trainer would receive it.

    `name` is the trainer's own word: `--num-layers` of a command line, `model.num_layers` of a configuration
    file. It is "" for a word that belongs to no flag: a positional argument, or an unknown `$EXTRA_ARGS`.
    `value` is None for a flag without a value, a tuple for several words. `place` is file and line.
    """

    name: str
    value: Value | Unknown
    place: str


class Machine(Struct, frozen=True):
    """Nodes and GPUs that a launcher asks for (torchrun, srun, #SBATCH); None where it does not say.

    `places` says for each of the two where it was read.
    """

    nodes: int | Unknown | None = None
    gpus_per_node: int | Unknown | None = None
    places: Mapping[str, str] = field(default_factory=dict)


class LaunchFile(Struct, frozen=True):
    """A launch file as it was understood, before any argument is given a meaning.

    `trainer` is the registered name of the training framework, or None where the file does not tell.
    `program` is the script or recipe that is started (`pretrain_gpt.py`). `environment` holds the variables
    that the program sees and the file sets. `notes` are sentences on what was taken as it is or passed over,
    such as another launch of the same script.
    """

    trainer: str | None
    program: str | None
    arguments: tuple[Argument, ...]
    machine: Machine = Machine()
    environment: Mapping[str, str | Unknown] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
