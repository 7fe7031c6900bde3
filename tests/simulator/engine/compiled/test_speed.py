"""The compiled engine is several times faster than SimPy: a ratio of one run, never a wall time."""

from __future__ import annotations

import time

import pytest

from moesim.simulator.engine.compiled.loader import numba_version
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import load_scenario

LEAST = 5.0
"""With 32 micro-batches of the home case the ratio is about nine; it grows with the program."""


@pytest.mark.skipif(numba_version() is None, reason="Numba is not installed")
def test_the_compiled_engine_is_several_times_faster_than_simpy() -> None:
    programs = prepare(load_scenario("deepseek-v3-2048xh800", ["batch.sequences=4096"])).programs
    seconds: dict[str, list[float]] = {"compiled": [], "simpy": []}
    engine_of("compiled").execute(programs)  # compiles or loads the code
    for _ in range(2):
        for name, taken in seconds.items():
            began = time.process_time()
            engine_of(name).execute(programs)
            taken.append(time.process_time() - began)
    assert min(seconds["simpy"]) > LEAST * min(seconds["compiled"]), seconds
