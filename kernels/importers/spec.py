"""The record that an importer registers: its name, its reader, and the facts that its logs may lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.ranges import BY_DIMENSION
from moesim.hwmodels.units import parse_quantity


@dataclass(frozen=True, slots=True)
class ImportOption:
    """A fact that a log may lack: the reader's parameter for it, and its help text.

    `flag` is the option of the command line; "" means `--` and the parameter. `dimension` is that of a
    quantity with a unit, such as bytes_per_s; `choices` are the only values, where there are few.
    """

    parameter: str
    help: str
    flag: str = ""
    type: type[str] | type[int] = str
    default: str | int | None = None
    required: bool = False
    dimension: str = ""
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The option as it is written on the command line."""
        return self.flag or f"--{self.parameter.replace('_', '-')}"

    def value(self, given: str | int | None) -> Any:
        """The value for the reader; raises InputError, with the option, for an unusable value."""
        if given is None:
            return None
        if self.choices and given not in self.choices:
            raise InputError(f"{self.option} {given}: {' or '.join(self.choices)} is expected")
        if not self.dimension:
            return given
        try:
            quantity = parse_quantity(str(given), self.dimension)
        except InputError as error:
            raise InputError(f"{self.option}: {error}") from None
        problem = BY_DIMENSION[self.dimension].problem(quantity, self.dimension)
        if problem:
            raise InputError(f"{self.option}: {problem}")
        return quantity


@dataclass(frozen=True, slots=True)
class CalibrationImporter:
    """One kind of log: `read` turns it into a profile and takes `options` as keyword arguments.

    With `several`, `read` takes a list of paths instead of one. It raises InputError for a file that is no
    such log.
    """

    name: str
    """Name of the command `moesim import NAME`."""
    help: str
    log: str
    """Help text on the log file."""
    read: Callable[..., CalibrationProfile]
    options: tuple[ImportOption, ...] = ()
    several: bool = False


NIC = ImportOption(
    "nic_bytes_per_s",
    'Nominal NIC rate per GPU, such as "400 Gb/s", for several nodes.',
    flag="--nic",
    dimension="bytes_per_s",
)
"""The option for the NIC rate, which several importers need."""
