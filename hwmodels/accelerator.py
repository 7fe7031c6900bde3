"""One accelerator as its vendor and published measurements describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import (
    DateText,
    Kind,
    Source,
    Sourced,
    SourcedBytes,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFlopPerSecond,
    SourcedHertz,
    SourcedWatts,
)
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

FOLDER = "accelerators"

SourcedT = TypeVar("SourcedT", bound=Sourced)

ComputeDtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"]


class CommunicationEngine(Frozen):
    """The engine that moves the payload of collectives where no compute unit does, with its provenance."""

    name: str
    kind: Kind
    source: Source
    date: DateText
    note: str | None = None


RECIPE_FORMATS = ("bf16", "fp8", "fp4")
"""Number formats of the products of linear layers in precision recipes."""


class Accelerator(Frozen):
    """Data of one accelerator (`data/accelerators/*.yaml`).

    Fields hold numbers with provenance; the properties below return them as SI floats with the unit in their
    name. Compute peaks are dense (no 2:4 sparsity). Scale-up bandwidth is per GPU and direction. An
    achievable figure is what a published or own measurement reached, payload only. A figure that nobody
    published is left out; a property that needs it raises InputError with its name.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    unit_name: str = "SM"
    """The vendor's word for what `compute_units` counts."""
    compute_units: SourcedCount | None = None
    communication_engine: CommunicationEngine | None = None
    """Absent where collectives are kernels that take compute units (GPUs)."""
    peak: dict[ComputeDtype, SourcedFlopPerSecond]
    """Datasheet peak by number format. A format that the chip lacks is absent."""
    peak_sustained: dict[ComputeDtype, SourcedFlopPerSecond] = Field(default_factory=dict)
    """Peak at the clock that the chip holds under a dense GEMM, where somebody published it."""
    gemm_achievable: dict[ComputeDtype, SourcedFlopPerSecond] = Field(default_factory=dict)
    """Best rate that a dense GEMM of any shape reached, where somebody measured it."""
    hbm: SourcedBytes
    hbm_bandwidth: SourcedBytesPerSecond
    hbm_bandwidth_achievable: SourcedBytesPerSecond | None = None
    l2: SourcedBytes | None = None
    clock: SourcedHertz | None = None
    clock_sustained: SourcedHertz | None = None
    tdp: SourcedWatts | None = None
    power_limit: SourcedWatts | None = None
    """Cap set below `tdp` (nvidia-smi -pl); it lowers the clock by the power law of the profile."""
    scale_up_bandwidth: SourcedBytesPerSecond | None = None
    scale_up_bandwidth_achievable: SourcedBytesPerSecond | None = None
    host_bandwidth: SourcedBytesPerSecond | None = None
    """Bandwidth of PCIe (or similar) to the host, per direction."""
    note: str | None = None

    @property
    def n_sms(self) -> int:
        """Number of compute units (SMs or the vendor's counterpart) that compute and communication share.

        Raises InputError where their number is not known.
        """
        return self._required(self.compute_units, "compute_units").n

    @property
    def hbm_bytes(self) -> float:
        """Memory capacity."""
        return self.hbm.value

    @property
    def hbm_bytes_per_s(self) -> float:
        """Nominal memory bandwidth, reads and writes together."""
        return self.hbm_bandwidth.value

    @property
    def scale_up_bytes_per_s(self) -> float:
        """Nominal NVLink (or similar) bandwidth per GPU and direction; raises InputError where unknown."""
        return self._required(self.scale_up_bandwidth, "scale_up_bandwidth").value

    @property
    def scale_up_achievable_bytes_per_s(self) -> float:
        """Payload bandwidth of a copy kernel per GPU and direction; raises InputError where unknown."""
        return self._required(self.scale_up_bandwidth_achievable, "scale_up_bandwidth_achievable").value

    @property
    def tdp_w(self) -> float:
        """Board power limit; raises InputError where unknown."""
        return self._required(self.tdp, "tdp").value

    @property
    def limit_w(self) -> float:
        """Power that a board may draw: the cap where one is set, else `tdp_w`."""
        return self.tdp_w if self.power_limit is None else self.power_limit.value

    @property
    def clock_hz(self) -> float:
        """The clock that reproduces the datasheet peak; raises InputError where unknown."""
        return self._required(self.clock, "clock").value

    def peak_flop_per_s(self, dtype: str) -> float:
        """Dense datasheet peak of a number format. MFU divides by the bf16 peak.

        Raises InputError where the accelerator has no such figure.
        """
        figure = next((value for key, value in self.peak.items() if key == dtype), None)
        if figure is None:
            raise InputError(
                f"accelerator {self.name!r} has no peak.{dtype}; {self.usable_formats()}another accelerator, "
                "or add the figure, with its source, to its file"
            )
        return figure.value

    def usable_formats(self) -> str:
        """The advice on number formats in an error, up to what else may be chosen: those that recipes use."""
        usable = sorted(set(self.peak) & set(RECIPE_FORMATS))
        if usable:
            return f"precisions that it has are {', '.join(usable)}: choose one of them, "
        return (
            f"it has {', '.join(sorted(self.peak))} alone, and recipes multiply in "
            f"{', '.join(RECIPE_FORMATS)}: no precision runs on it; choose "
        )

    def gemm_achievable_flop_per_s(self, dtype: str) -> float:
        """Best rate that a dense GEMM of any shape reached; raises InputError where nobody measured it."""
        figure = next((value for key, value in self.gemm_achievable.items() if key == dtype), None)
        return self._required(figure, f"gemm_achievable.{dtype}").value

    def _required(self, figure: SourcedT | None, key: str) -> SourcedT:
        if figure is None:
            raise InputError(
                f"accelerator {self.name!r} has no figure {key}; add it, with its source, to its file"
            )
        return figure


def list_accelerators() -> tuple[str, ...]:
    """Names of the shipped accelerators."""
    return shipped_names(FOLDER)


def load_accelerator(name: str, base: Path | None = None) -> Accelerator:
    """The accelerator of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Accelerator, FOLDER, name, "accelerator", base)


AcceleratorRef = Annotated[Accelerator, by_name(Accelerator, load_accelerator)]
"""A field that takes an accelerator's name, path or full description."""
