"""Registry of trainer releases, each a file with its answers to the switches of `software`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from moesim.hwmodels.errors import LegalValuesError
from moesim.hwmodels.validation import nearest

NONE = "none"
"""No release: an ideal host, and every option that is not stated is off."""

RELEASES = (
    NONE,
    "torchtitan-0.2",
    "torchtitan-0.3",
    "megatron-core-0.16",
    "megatron-core-0.17",
    "megatron-bridge-0.4",
    "megatron-bridge-0.6",
    "nemo-25",
    "deepspeed-0.19",
)
"""The releases; `a-1.2` is the module `a_1_2.py`, which is loaded only where a scenario names it."""

OF_THE_RUN = frozenset(
    {
        "framework", "dropout", "allocator", "host", "host_slowness", "launch_blocking", "cuda_graphs",
        "static_experts",
    }
)  # fmt: skip
"""Switches that a run's own configuration or machine decides, whatever its trainer."""

OF_FSDP = ("parameters_copied", "shards_cast", "single_groups_copied", "flat_parameters", "gradients_divided")
"""Switches that only PyTorch's FSDP, 1 or 2, turns on."""

Value: TypeAlias = str | bool | int | None


class Answer(NamedTuple):
    """What a release does, as the value of a switch (None: what an absent key means), and who says so."""

    value: Value
    source: str


def all_off(source: str, *switches: str) -> dict[str, Answer]:
    """The answer that none of `switches` is on."""
    return dict.fromkeys(switches, Answer(False, source))


class Limits(NamedTuple):
    """What plans a release runs, by the values of a scenario's keys; None: any."""

    schedules: tuple[str, ...] | None = None
    """Orders of the micro-batches on several pipeline ranks."""
    schedule_files: bool = False
    """Whether it runs a CSV file in PyTorch's notation."""
    zero_stages: tuple[int, ...] | None = None
    """Without a pipeline."""
    zero_stages_in_pipelines: tuple[int, ...] | None = None
    formats: tuple[str, ...] | None = None
    """Formats of the GEMMs, with the scales of FP8: `bf16`, `fp8 tensor`, `fp8 tile`, `fp8 mx`, `fp4`."""
    policies: tuple[str, ...] | None = None
    """Recompute by policy."""
    modules: bool = True
    """Whether it recomputes a list of modules."""
    dispatchers: tuple[str, ...] | None = None
    """Values of `communication.kernels`."""


ANY_PLAN = Limits()


class Release(Struct, frozen=True):
    """A trainer release: its answers by switch. Other switches stay as they are without a framework."""

    title: str
    answers: Mapping[str, Answer]
    limits: Limits = ANY_PLAN
    dispatcher: Answer | None = None
    """Its value of `communication.kernels` where nobody states one."""

    @property
    def switches(self) -> dict[str, Value]:
        """The value of every switch that the release answers."""
        return {switch: answer.value for switch, answer in self.answers.items()}

    def assumed(self, switches: Iterable[str]) -> tuple[str, ...]:
        """Those of `switches` for which nobody has read what the release does."""
        return tuple(s for s in switches if s not in self.answers and s not in OF_THE_RUN)


def release_of(name: object) -> Release:
    """The release of a name; raises LegalValuesError, with the known names, for any other."""
    if name not in RELEASES:
        text = str(name)[:60]
        raise LegalValuesError(
            f"framework={text!r} is not known{nearest(text, list(RELEASES))}; known: {', '.join(RELEASES)}; "
            "or leave framework out and state the switches",
            "framework",
            RELEASES,
        )
    module = str(name).replace("-", "_").replace(".", "_")
    release: Release = import_module(f"moesim.simulator.frameworks.{module}").RELEASE
    return release
