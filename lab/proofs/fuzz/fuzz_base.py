"""What all cases are made with: the shipped files, how one is changed, and where the work begins."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from fuzz_mutator import Mutator, values_of

import moesim
import moesim.simulator.common.processes
import moesim.simulator.planner.search
import moesim.simulator.predict.step
import moesim.simulator.studies.sweep
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "hwmodels" / "data"
SIMULATED_SHARE = 0.01
"""Of the legal scenarios."""
MOST_CHUNKS = 2_000
"""Ranks times micro-batches times stages a rank of a scenario that is simulated."""


class ReachedError(Exception):
    """Everything was read and checked; what would follow is the work itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """`make` draws a case; `read` gives it to the program, which may refuse it."""

    name: str
    weight: int
    make: Callable[[Mutator], Any]
    read: Callable[[Any, Path, random.Random], None]


@dataclass(frozen=True, slots=True)
class File:
    """A file to be written and read."""

    name: str
    data: bytes


# -- where the work begins -----------------------------------------------------------------------------


@contextmanager
def only_checked() -> Iterator[None]:
    """Inside, a prediction, a search or a sweep ends with ReachedError once its input has been checked."""

    def reached(*_: Any, **__: Any) -> Any:
        raise ReachedError

    places: tuple[tuple[Any, str], ...] = (
        (moesim.simulator.predict.step, "assign_stages"),
        (moesim.simulator.planner.search, "VariantSearch"),
        (moesim.simulator.common.processes, "worker_pool"),
        (moesim.simulator.studies.sweep._Run, "compute"),
    )
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, reached)
    try:
        yield
    finally:
        for (owner, name), old in zip(places, before, strict=True):
            setattr(owner, name, old)


def check(scenario: Scenario, rng: random.Random) -> None:
    """All checks before any pricing; one legal and small scenario in a hundred is simulated."""
    with only_checked():
        try:
            if scenario.fleet is not None:
                moesim.check(scenario)
            else:
                prepare(scenario)
        except ReachedError:
            pass
    if rng.random() < SIMULATED_SHARE and _is_small(scenario):
        step = moesim.simulate(scenario).step
        assert isfinite(step.time_s) and step.time_s > 0.0, f"a step of {step.time_s} s"
        if scenario.stages.blocks is None:  # a part of a model has no MFU
            assert 0.0 <= step.mfu_causal <= 1.0, f"an MFU of {step.mfu_causal}"


def _is_small(scenario: Scenario) -> bool:
    plan, gpus = scenario.parallel, 0 if scenario.cluster is None else scenario.machine.n_gpus
    pipelines = max(1, gpus // (plan.tp * plan.pp * plan.cp))
    chunks = plan.pp * plan.vpp * scenario.batch.sequences / (plan.microbatch * pipelines)
    folded = scenario.resolution == "folded" or gpus <= 64
    return bool(gpus) and folded and chunks <= MOST_CHUNKS and gpus <= 4096 and scenario.run.replicas <= 1000


# -- files ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def source_of(path: Path) -> tuple[str, Any]:
    text = path.read_text("utf-8")
    data = (
        json.loads(text)
        if path.suffix == ".json"
        else parse_mapping(text, path.name)
        if path.suffix == ".yaml"
        else None
    )
    return text, data


@lru_cache(maxsize=64)
def files_of(folder: str, pattern: str = "*.yaml") -> tuple[Path, ...]:
    found = sorted((ROOT / folder).glob(pattern))
    assert found, f"no files {folder}/{pattern}"
    return tuple(sorted(found, key=lambda path: (path.stat().st_size, path.name)))


@lru_cache(maxsize=1)
def pool() -> tuple[Any, ...]:
    """Scalars of the shipped files, each once."""
    folders = [f"hwmodels/data/{kind.name}" for kind in sorted(DATA.iterdir()) if kind.name != "comparisons"]
    folders += [f"simulator/data/{name}" for name in ("models", "scenarios")]
    values = {
        repr(v): v for folder in folders for path in files_of(folder) for v in values_of(source_of(path)[1])
    }
    return tuple(values[name] for name in sorted(values))


def described(folder: str, ending: str = "", pattern: str = "*.yaml") -> Callable[[Mutator], File]:
    """Files of a folder, small ones more often, changed as data or as text."""

    def make(m: Mutator) -> File:
        files = files_of(folder, pattern)
        text, data = source_of(files[int(len(files) * m.rng.random() ** 2)])
        kind = m.rng.random()
        if kind < 0.6 and data is not None:
            as_json = m.rng.random() < 0.3
            return File(ending or (".json" if as_json else ".yaml"), m.bytes_of(m.text_of(m.data(data))))
        changed = m.text(text) if kind < 0.95 else m.hostile()
        return File(ending or ".yaml", m.bytes_of(changed))

    return make


def texts_of(ending: str, texts: Callable[[], tuple[str, ...]]) -> Callable[[Mutator], File]:
    def make(m: Mutator) -> File:
        text = m.rng.choice(texts())
        return File(ending, m.bytes_of(m.text(text) if m.rng.random() < 0.9 else m.hostile()))

    return make


def from_file(read: Callable[[Path], Any]) -> Callable[[File, Path, random.Random], None]:
    def run(case: File, folder: Path, rng: random.Random) -> None:
        path = folder / f"case-{os.urandom(6).hex()}{case.name}"  # readers remember files by name and time
        path.write_bytes(case.data)
        try:
            read(path)
        finally:
            path.unlink()

    return run


@lru_cache(maxsize=1)
def home() -> Scenario:
    return load_scenario("deepseek-v3-2048xh800")
