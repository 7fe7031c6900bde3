"""Reads launch scripts with the former reader, until the reader of all launch files is merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moesim.simulator.trainers.launch import Argument, Launch
from moesim.simulator.trainers.megatron.read import read_script


def read_launch(
    path: Path,
    environment: Mapping[str, str] | None = None,
    recipe: str | None = None,
    parameters: tuple[str, ...] = (),
) -> Launch:
    """Read a script with the former reader."""
    arguments = []
    for flag, value in read_script(path).items():
        if not flag.startswith("--nproc") and not flag.startswith("--nnodes"):
            words = tuple(value.split(" ")) if value and " " in value and flag.endswith("-modules") else value
            arguments.append(Argument(flag, words, str(path)))
    return Launch("megatron-lm", None, tuple(arguments))
