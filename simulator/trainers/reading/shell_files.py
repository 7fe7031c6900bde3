"""Finds the other scripts that a script includes or calls, which are read in its own folder only."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moesim.hwmodels.files import is_there, read_text
from moesim.simulator.trainers.reading.limits import MOST_BYTES
from moesim.simulator.trainers.reading.shell_syntax import check_text
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_follower import ShellFollower


def beside(shell: ShellFollower, name: str) -> Path | None:
    """The file that a path of the script names, relative to the script's folder, or None where there is none.

    A path whose folder is unknown (`$SCRIPT_DIR/run.sh`, `$(dirname $0)/run.sh`) counts as beside the script.
    """
    if shell.folder is None:
        return None
    if not is_known(name):
        match = re.fullmatch("\ue000\\d+\ue001/([^/\ue000]+)", name)
        if match is None:
            return None
        name = match[1]
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or not re.fullmatch(r"[\w.+/-]{1,300}", name):
        return None
    path = shell.folder.joinpath(*parts)
    if (
        not is_there(path)
        or not path.is_file()
        or path in shell.following
        or not shell.budget.may_read_file()
    ):
        return None
    return path


def read_file(shell: ShellFollower, path: Path, follow: Callable[[str], None]) -> None:
    """Follow the text of another file of the script's folder, which is noted."""
    text = check_text(read_text(path, MOST_BYTES, "shell script", strict=False), str(path))
    shell.notes[f"{shell.place}: {path.name} is read from the script's folder"] = None
    shell.following.append(path)
    follow(text)
    shell.following.pop()


def include(shell: ShellFollower, words: list[str]) -> None:
    """`source FILE`: follow it where it lies beside the script, else note that it was not read."""
    shell.scope.status = True
    if not words:
        return
    name = words[0]
    written = shell.scope.written(name)
    if written is not None:
        shell.run_text(written[0], shell.unknowns.shown(name), 1)
        return
    path = beside(shell, name)
    if path is None:
        shown = shell.unknowns.shown(name)[:80]
        shell.notes[
            f"{shell.place}: the file {shown} does not lie beside the script and was not read; a variable "
            "that it sets counts as not set"
        ] = None
        return
    kept = shell.scope.parameters, shell.scope.given
    if len(words) > 1:
        shell.scope.parameters, shell.scope.given = tuple(words[1:]), True
    read_file(shell, path, lambda text: shell.run_text(text, path.name, 1))
    shell.scope.parameters, shell.scope.given = kept
    if shell.scope.stopped == "return":
        shell.scope.stopped = ""
