"""Helpers of the tests of the readers: a launch from a text, and its arguments as a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.reading import read_launch


def launch_of(folder: Path, text: str, name: str = "run.sh", **options: Any) -> LaunchFile:
    """The launch of a text that is written to a file of this name."""
    path = folder / name
    path.write_text(text)
    launch = read_launch(path, **options)
    assert "\\ue00" not in ascii(launch), "a mark of an unknown value is left in the launch"
    return launch


def values(launch: LaunchFile) -> dict[str, Any]:
    """The arguments by name; an unknown value is `?` and its text."""
    return {
        argument.name: f"?{argument.value.text}" if isinstance(argument.value, Unknown) else argument.value
        for argument in launch.arguments
    }
