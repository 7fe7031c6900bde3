"""Keeps what `simulate` printed, so that the same command answers without loading any scenario or model.

An answer is kept under a hash of the command, the working directory and the program. It names every file that
was read or looked for, with a hash of its content, and holds only while all of them are unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from moesim.cli.console import print_raw, print_text
from moesim.hwmodels.errors import InfeasibleError
from moesim.hwmodels.files import fingerprint


class KeptAnswer(Struct, frozen=True):
    """The text of a finished command, and why its plan does not fit into memory (empty where it fits)."""

    text: str
    shortage: str

    def print(self, as_json: bool) -> None:
        """Print the text: JSON as it is, words in the width of the terminal."""
        (print_raw if as_json else print_text)(self.text)

    def check_fit(self) -> None:
        """Raise InfeasibleError if the plan does not fit into memory."""
        if self.shortage:
            raise InfeasibleError(self.shortage)


def find_answer(command: list[object]) -> KeptAnswer | None:
    """The kept answer of a command; None if there is none, or if a file that it depends on changed."""
    from moesim.simulator.studies import result_cache

    if result_cache.folder() is None:
        return None
    kept = result_cache.find_answer(_name(command))
    if kept is None:
        return None
    try:
        held = json.loads(kept.result)
        if all(fingerprint(path) == seen for path, seen in held["files"].items()):
            return KeptAnswer(str(held["text"]), kept.reason)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the row is damaged
        pass
    return None


def keep_answer(command: list[object], scenario: str, answer: KeptAnswer, paths: Iterable[str]) -> None:
    """Store the answer of a command about a scenario. `paths`: the files that it depends on."""
    from moesim.simulator.studies import result_cache
    from moesim.simulator.studies.store import PointOutcome

    if result_cache.folder() is None:
        return
    held = {"files": {path: fingerprint(path) for path in sorted(paths)}, "text": answer.text}
    outcome = PointOutcome("does not fit" if answer.shortage else "ok", answer.shortage, {}, json.dumps(held))
    result_cache.keep_answer(_name(command), scenario, outcome)


def _name(command: list[object]) -> str:
    """Hash of a command, of the folder that its relative paths start from, and of the code that prints."""
    from moesim.simulator.studies.result_cache import hash_of_files

    printing = hash_of_files([Path(__file__).parent])
    text = json.dumps(["answer", command, str(Path.cwd()), printing])
    return hashlib.sha256(text.encode()).hexdigest()
