"""The current scenario: a preset and overrides, held in the URL, so that a scenario is a link.

The address carries `preset` once and `set` for every override (`?preset=...&set=parallel.ep=32`); leaving
them out means the home case. The session keeps a copy, because changing the page empties the address.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import streamlit as st

import moesim
from moesim.app import jobs, main, uploads, work
from moesim.hwmodels.provenance import OWN, STATED_IN
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.reprice import without_prices
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.study.point import key_of

HOME = main.HOME
MOST_LINK_CHARACTERS = 16_000


# -- the scenario --------------------------------------------------------------------------------------


def preset() -> str:
    """Name of the shipped scenario that the overrides apply to."""
    return str(st.session_state.get("preset", HOME))


def overrides() -> tuple[str, ...]:
    """The `key=value` texts that make the current scenario out of its preset, in order."""
    return tuple(st.session_state.get("overrides", ()))


def current() -> Scenario:
    """The scenario that every page shows. Raises InputError where an override is malformed."""
    return build(preset(), overrides())


def build(name: str, texts: Sequence[str]) -> Scenario:
    """A scenario from what a visitor may send; names of files on the server are refused (InputError)."""
    return _built(name, tuple(texts), uploads.folder())


@lru_cache(maxsize=256)
def _built(name: str, texts: tuple[str, ...], _folder: object) -> Scenario:
    return uploads.scenario_of(name, texts)


def open_upload(name: str, data: bytes) -> None:
    """Make an uploaded scenario the current one, as overrides, so that its link works elsewhere too.

    Raises InputError for anything that is no scenario.
    """
    kept = uploads.accept("scenario", name, data).content
    assert isinstance(kept, Scenario)
    open_scenario(HOME, overrides_of(kept))


def set_override(key: str, value: object) -> None:
    """Set one key, or take it back to the preset's with None; overrides below the key go."""
    rest = tuple(t for t in overrides() if not _is_below(t, key))
    if (
        value is not None
        and _same(build(preset(), ()), key, value)
        and not any(_is_below(key, _key(t)) for t in rest)
    ):
        value = None
    text = () if value is None else (f"{key}={value if isinstance(value, str) else json.dumps(value)}",)
    open_scenario(preset(), (*rest, *text))


def _same(scenario: Scenario, key: str, value: object) -> bool:
    """Whether a scenario has this value already."""
    found: Any = scenario.model_dump(mode="json", exclude_none=True)
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and "value" in found:
        found = found["value"]
    return found is not None and type(found) is type(value) and found == value


def override(key: str) -> str | None:
    """The text given for a key, or None where it is the preset's."""
    return next((t.partition("=")[2] for t in reversed(overrides()) if _key(t) == key), None)


def open_scenario(name: str, texts: Sequence[str] = ()) -> None:
    """Make this the current scenario."""
    st.session_state["preset"], st.session_state["overrides"] = name, tuple(texts)


def adopt(scenario: Scenario) -> None:
    """Make a scenario that the dashboard built itself the current one, as overrides of the preset."""
    name = preset() if preset() in moesim.presets() else HOME
    open_scenario(name, overrides_of(scenario, name))


def overrides_of(scenario: Scenario, base: str = HOME) -> tuple[str, ...]:
    """Compact overrides that make `scenario` out of the preset `base`."""
    return overrides_between(moesim.load(base), scenario)


def overrides_between(first: Scenario, other: Scenario) -> tuple[str, ...]:
    """Compact overrides that make the scenario `other` out of `first`."""
    before, after = (item.model_dump(mode="json", exclude_none=True) for item in (first, other))
    if isinstance(first.cluster, str) and not isinstance(other.cluster, str):
        # An override below a name starts from what the name stands for.
        written = first.machine.model_dump(mode="json", exclude_none=True)
        if written["name"] == other.machine.name:
            before["cluster"] = written
    return tuple(f"{key}={_text(value)}" for key, value in _differences(before, after, ""))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key in [*before, *(k for k in after if k not in before)]:
        old, new = before.get(key), after.get(key)
        place = f"{path}{key}"
        if old == new:
            continue
        if isinstance(new, Mapping) and _is_stated(new):
            yield place, new["value"]
        elif isinstance(old, Mapping) and isinstance(new, Mapping) and not any("." in str(k) for k in new):
            yield from _differences(old, new, f"{place}.")
        else:
            yield place, new


def _is_stated(value: Mapping[str, Any]) -> bool:
    """Whether it is a figure that a plain value in an override becomes."""
    return (
        value.get("kind") == "assumed"
        and str(value.get("source")).startswith((STATED_IN, OWN))
        and set(value) == {"value", "kind", "source", "date"}
    )


def _text(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"\$?[A-Za-z0-9][\w ./$-]*", value) is not None
    text = json.dumps(value, separators=(",", ":"))
    if plain and parse_mapping(f"value: {value}", "value")["value"] == value:
        return str(value)
    return text


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _is_below(text: str, key: str) -> bool:
    return _key(text) == key or _key(text).startswith(f"{key}.")


# -- the address ---------------------------------------------------------------------------------------


def synchronise() -> None:
    """Take over a link that was just opened, else write the current scenario into the address."""
    shown = (st.query_params.get("preset"), tuple(st.query_params.get_all("set")))
    given = shown != (None, ())
    if given and shown != st.session_state.get("address"):
        open_scenario((shown[0] or HOME)[:200], [text[:MOST_LINK_CHARACTERS] for text in shown[1]])
    publish()


def publish() -> None:
    """Write the current scenario into the address."""
    wanted = parameters(preset(), overrides())
    have: dict[str, Any] = {}
    if "preset" in st.query_params:
        have["preset"] = st.query_params["preset"]
    if st.query_params.get_all("set"):
        have["set"] = st.query_params.get_all("set")
    if have != wanted:
        others = {k: st.query_params.get_all(k) for k in st.query_params if k not in ("preset", "set")}
        st.query_params.from_dict({**others, **wanted})
    st.session_state["address"] = (wanted.get("preset"), tuple(wanted.get("set", ())))


def parameters(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """The query parameters of a scenario; none for the home case."""
    found: dict[str, Any] = {}
    if name != HOME or texts:
        found["preset"] = name
    if texts:
        found["set"] = list(texts)
    return found


def link(name: str, texts: Sequence[str]) -> str:
    """The query string of a scenario, with its question mark."""
    return "?" + urlencode(parameters(name, texts), doseq=True)


def only_here(texts: Sequence[str]) -> str | None:
    """What to say where a link to these overrides works on this server only; None where it works anywhere."""
    names = {text.partition("=")[0] for text in texts if uploads.TOKEN.search(text)}
    if not names:
        return None
    return (
        f"An uploaded file is used ({', '.join(sorted(names))}): this link works on this server only, "
        "and only while it runs. For elsewhere, save the scenario and send the file along."
    )


# -- results -------------------------------------------------------------------------------------------


def cache_key(scenario: Scenario) -> str:
    """Scenario hash, calibration hash, version: the key of a sweep's store; equal keys mean equal results."""
    return key_of(scenario).text


def result() -> Result | None:
    """The current scenario's result, from the cache or computed beside the page.

    Raises InputError, InfeasibleError or JobError, which the shell shows as one sentence.
    """
    return result_of(current())


def result_of(scenario: Scenario, label: str = "Simulating one step") -> Result:
    """The result of any scenario; other prices do not simulate again."""
    plain = without_prices(scenario)
    found: Result = compute(f"result/{cache_key(plain)}", label, work.simulate, scenario)
    return moesim.reprice(found, scenario)


def begin(scenario: Scenario) -> None:
    """Start computing a scenario's result without waiting for it."""
    plain = without_prices(scenario)
    jobs.submit(f"result/{cache_key(plain)}", work.simulate, scenario, ahead=True)


def trace_of(scenario: Scenario) -> bytes:
    """A Perfetto trace (.json.gz), from the cache or simulated while the caller waits a second or more."""
    data: bytes = jobs.submit(f"trace/{cache_key(scenario)}", work.trace, scenario).result(
        jobs.SHORT_BUDGET_S
    )
    return data


def compute(key: str, label: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` as a job, waited for with its time shown; the cached value where there is one."""
    job = jobs.submit(key, function, *args)
    if job.wait(0.15):
        return job.result()
    place = st.empty()
    began = time.monotonic()
    try:
        while not job.wait(0.2):
            # Writing to the page is also what lets a newer interaction end this wait.
            place.caption(f":material/hourglass_top: {label}: {time.monotonic() - began:.0f} s")
    finally:
        if not job.done:
            job.cancel()
        else:
            place.empty()
    return job.result()
