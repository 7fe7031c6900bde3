"""Sweeps of the dashboard: the store of every visitor, and the functions that job processes run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from msgspec import Struct

import moesim
from moesim.app import jobs, uploads
from moesim.app.predictions import Progress, read_below
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import oldest_beyond
from moesim.simulator.common.texts import parse_values
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.space import evaluate
from moesim.simulator.studies.store import Store, Taken, copied, take_over
from moesim.simulator.studies.sweep import Progress as SweepProgress
from moesim.simulator.studies.sweep import Survey, survey

MOST_KEYS = 3
MOST_POINTS = 1000
MOST_S = 1800.0
"""Longest sweep, as estimated before it starts."""
BUDGET_S = 2 * MOST_S
"""Time limit of a sweep's job; a sweep that is stopped by it can be continued."""
STORE_BYTES = 32_000_000
"""A larger store of a visitor loses its older half; a point takes about 7 kB."""
ALL_BYTES = 512_000_000
"""Limit on the stores of all visitors; the one that was not used for longest goes first."""


class Pace(Struct, frozen=True):
    """Seconds of one point, and on how many points that was measured."""

    seconds: float
    points: int


def read_space(texts: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of every key of a form. Raises InputError for malformed, too many and forbidden values."""
    found: dict[str, list[Any]] = {}
    for key, text in texts.items():
        values = list(parse_values(text, key))
        for value in values:
            uploads.refuse_paths(value, key)
        found[key] = values
    total = prod(map(len, found.values()))
    if total > MOST_POINTS:
        counts = " x ".join(f"{len(values)} of {key}" for key, values in found.items())
        raise InputError(
            f"the sweep has {total:,} points ({counts}), more than the {MOST_POINTS:,} of the dashboard: "
            "take fewer values, or use the command line (moesim sweep)"
        )
    return found


def store_of(visitor: str) -> Path:
    """The file of a visitor's store, in a folder that only this user may read."""
    folder = uploads.folder() / "sweeps"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{visitor}.sqlite"


def stamp(store: Path) -> str:
    """Changes whenever a point is written to the store."""
    parts = []
    for path in (store, store.with_name(f"{store.name}-wal")):
        with suppress(FileNotFoundError):
            parts.append(path.stat())
    return "-".join(f"{part.st_size}.{part.st_mtime_ns}" for part in parts) or "none"


def make_room(store: Path) -> None:
    """Remove the stores of other visitors that were not used for longest, where all take too much."""
    own = store.stat().st_size if store.exists() else 0
    others = (path for path in store.parent.glob("*.sqlite") if path != store)
    for path in oldest_beyond(ALL_BYTES - own, others):
        for part in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))):
            part.unlink(missing_ok=True)


def contents(store: Path) -> bytes:
    """A copy of the store as one file; empty where there is none."""
    if not store.is_file():
        return b""
    with tempfile.TemporaryDirectory(dir=store.parent) as folder:
        copy = Path(folder) / "sweep.sqlite"
        copied(store, copy)
        return copy.read_bytes()


# -- in a job's process ---------------------------------------------------------------------------------


def surveyed(folder: str, scenario: Scenario, texts: Mapping[str, str], store: Path) -> Survey:
    """Which points of a sweep are known, illegal and missing."""
    read_below(folder)
    return survey(jobs.admit(scenario), read_space(texts), store, admit=jobs.admit)


def pace(folder: str, scenario: Scenario, values: tuple[dict[str, Any], ...]) -> Pace:
    """Predict some points of a sweep to learn how long one takes; the first one also warms up and is free."""
    read_below(folder)
    taken = []
    for point in values:
        began = time.perf_counter()
        evaluate(scenario.replace(**point))
        taken.append(time.perf_counter() - began)
    return Pace(sum(taken) / len(taken), len(taken))


def swept(
    folder: str, scenario: Scenario, texts: Mapping[str, str], store: Path, progress: Progress
) -> tuple[int, int]:
    """Compute the missing points of a sweep into its store; returns how many were computed and were known."""
    read_below(folder)

    def say(done: SweepProgress) -> None:
        missing = max(1, done.total - done.reused)
        told = f", {done.reused} were known" if done.reused else ""
        progress((done.done - done.reused) / missing, f"{done.done} of {done.total} points{told}")

    with Store(store, durable=False) as opened:
        opened.shrink(STORE_BYTES)
    found = moesim.sweep(scenario, read_space(texts), workers=1, store=store, progress=say)
    return found.computed, found.reused


def taken_over(data: bytes, store: Path) -> Taken:
    """Put the points of an uploaded store into the visitor's own."""
    handle, name = tempfile.mkstemp(dir=store.parent, suffix=".upload")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        with Store(store, durable=False) as own:
            own.shrink(STORE_BYTES)
            return take_over(Path(name), own)
    except InputError as error:
        raise InputError(str(error).replace(name, "of the upload")) from None
    finally:
        Path(name).unlink(missing_ok=True)
