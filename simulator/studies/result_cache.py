"""The result cache: predictions on disk, shared by the command line and the dashboard.

Each version has one file, with the layout and keys (scenario, calibration, version) of a sweep's store. The
file's name also carries a hash of the program and its data, so a changed checkout never returns old results.
An error of the file (a full disk, a folder that cannot be written) only turns the cache off. Nothing that
predicts is imported before it is needed, so that a stored answer of the command line is read quickly.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import make_private_folder
from moesim.simulator.studies.store import Key, PointOutcome, Store
from moesim.version import __version__

if TYPE_CHECKING:
    from moesim.simulator.predict.result import Result
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.studies.uncertainty import Say

FOLDER = "MOESIM_CACHE"
"""Environment variable with the cache's folder; `off` turns the cache off."""
MOST_BYTES = 256_000_000
"""Largest size of the rows; beyond it the older half is removed."""
OLD_S = 30 * 24 * 3600.0
"""Age in seconds since the last write at which files of other versions are removed."""
BUSY_S = 2.0

_problem: str | None = None


def folder() -> Path | None:
    """The cache's folder: MOESIM_CACHE, else the user's cache folder; None if the cache is off."""
    named = os.environ.get(FOLDER)
    if named == "off":
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "moesim"
    except RuntimeError:  # a user without a home
        return None


def problem() -> str | None:
    """One sentence on why the cache does not work; None if it works or is turned off."""
    return _problem


def check() -> str | None:
    """Open the cache, and say as `problem` does why it does not work; None if it works or is turned off."""
    with _opened():
        pass
    return _problem


@lru_cache(maxsize=1)
def program_hash() -> str:
    """Hash of every source and data file that a prediction may depend on (takes some 20 ms)."""
    root = Path(__file__).resolve().parents[2]
    return hash_of_files(root / part for part in ("simulator", "hwmodels"))


def hash_of_files(folders: Iterable[Path]) -> str:
    """Hash of the names and contents of all files in folders, those that Python compiled left out."""
    found = hashlib.sha256()
    for folder in folders:
        paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)  # noqa: PTH118
        for path in sorted(paths):
            if not path.endswith((".pyc", ".pyo")):
                with open(path, "rb") as file:  # noqa: PTH123 - 700 files: pathlib takes twice as long
                    data = file.read()
                found.update(f"{folder.name}{path[len(str(folder)) :]} {len(data)}\n".encode() + data)
    return found.hexdigest()


def find(scenario: Scenario, uncertainty: bool = False, engine_draws: int = 0) -> Result | None:
    """The cached prediction of exactly this scenario, prices included; None if there is none.

    Predictions of a fleet are not cached, as the prices of its pools cannot be changed afterwards.
    """
    if scenario.fleet is not None:
        return None
    from pydantic import ValidationError

    from moesim.simulator.predict.result import Result
    from moesim.simulator.scenario.inputs import inputs_of
    from moesim.simulator.studies.space import key_of

    key = key_of(scenario, uncertainty, engine_draws)
    with _opened() as store:
        text = "" if store is None else store.result(key)
        if store is None or not text:
            return None
        try:
            # The same scenario may come from another file, or by other overrides.
            found = Result.model_validate_json(text)
            return found.model_copy(update={"inputs": inputs_of(scenario)})
        except ValidationError:  # the row is damaged
            store.forget(key)
    return None


def keep(scenario: Scenario, result: Result) -> None:
    """Store a prediction, and the same one without prices, which serves scenarios with other prices."""
    if scenario.fleet is not None or folder() is None:
        return
    from moesim.simulator.predict.figures import energy_figures, figures
    from moesim.simulator.studies.reprice import unpriced, without_prices
    from moesim.simulator.studies.space import key_of

    bands = result.uncertainty
    draws = bands.by_engine.draws if bands is not None and bands.by_engine is not None else 0
    pairs = [(scenario, result), (without_prices(scenario), unpriced(result, scenario))]
    with _opened() as store:
        if store is None:
            return
        for of, found in pairs:
            outcome = PointOutcome(
                "ok", "", figures(found) | energy_figures(found.energy), found.model_dump_json()
            )
            store.put(key_of(of, bands is not None, draws), of.name, outcome)
        store.shrink(MOST_BYTES)


def predict_unpriced(
    scenario: Scenario,
    uncertainty: bool = False,
    engine_draws: int = 0,
    workers: int | None = None,
    say: Say | None = None,
    afterwards: Callable[[Callable[[], None]], None] = lambda store: store(),
) -> Result:
    """The prediction of a scenario without its prices, from the cache or else computed and stored.

    `uncertainty`: it has bands. `engine_draws`: number of engine runs from which further bands are taken, in
    `workers` processes (None: one a core); `say` hears how many are done. `afterwards` is given what stores a
    new prediction, for who answers first. Raises InputError for an illegal scenario and a number of draws out
    of range.
    """
    from moesim.simulator.predict.driver import simulate
    from moesim.simulator.studies.reprice import unpriced, without_prices
    from moesim.simulator.studies.uncertainty import with_uncertainty

    exact = find(scenario, uncertainty, engine_draws)
    if exact is not None:
        return unpriced(exact, scenario)
    other = find(without_prices(scenario), uncertainty, engine_draws)
    if other is not None:
        return other
    if uncertainty or engine_draws:
        result = with_uncertainty(scenario, engine_draws=engine_draws, workers=workers, say=say)
    else:
        result = simulate(scenario)
    afterwards(lambda: keep(scenario, result))
    return unpriced(result, scenario)


def find_answer(name: str) -> PointOutcome | None:
    """The answer that was kept under a name, with its text as `result`; None if there is none."""
    key = Key(name, "", __version__)
    with _opened() as store:
        outcome, text = (None, "") if store is None else (store.get(key), store.result(key))
        return replace(outcome, result=text) if outcome is not None and text else None
    return None


def keep_answer(name: str, of: str, answer: PointOutcome) -> None:
    """Store the answer of a command under a name, in the place of an older one. `of`: the scenario's name."""
    key = Key(name, "", __version__)
    with _opened() as store:
        if store is not None:
            store.forget(key)
            store.put(key, of, answer)
            store.shrink(MOST_BYTES)


@contextmanager
def _opened() -> Iterator[Store | None]:
    """The open cache, None where it is off or does not open; an error of its file ends the block."""
    global _problem
    where, store = folder(), None
    if where is None or _problem is not None:
        yield None
        return
    path = where / f"predictions-{__version__}-{program_hash()[:12]}.sqlite"
    try:
        if not path.exists():
            make_private_folder(where)
            for old in where.glob("predictions-*.sqlite*"):
                if time.time() - old.stat().st_mtime > OLD_S:
                    old.unlink(missing_ok=True)
        store = Store(path, durable=False, busy_s=BUSY_S)
        with store:
            yield store
    except (InputError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _problem = (
            f"predictions are not kept in {where}: {reason or error}; set {FOLDER} to another folder, "
            "or to off"
        )
        if store is None:
            yield None
