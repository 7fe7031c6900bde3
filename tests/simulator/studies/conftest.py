"""Effects of the sources of a job's uncertainty, computed once for all tests that only read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.step import Prepared
from moesim.simulator.studies.effects import EntryEffect, entry_effects

KNOWN: dict[tuple[str, int], tuple[EntryEffect, ...]] = {}


@pytest.fixture(scope="module", autouse=True)
def effects_once() -> Iterator[None]:
    """Modules that draw intervals get the known effects of a scenario; tests ask for their own."""

    def once(prepared: Prepared, executions: Sequence[Execution], exact: int = 0) -> tuple[EntryEffect, ...]:
        key = prepared.scenario.model_dump_json(), exact
        if key not in KNOWN:
            KNOWN[key] = entry_effects(prepared, executions, exact)
        return KNOWN[key]

    with pytest.MonkeyPatch.context() as patched:
        for module in ("compare", "uncertainty", "whole_run"):
            patched.setattr(f"moesim.simulator.studies.{module}.entry_effects", once)
        yield
