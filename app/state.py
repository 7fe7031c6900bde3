"""The current scenario, held in the URL as a preset and overrides, so that a link opens it.

The address carries `preset` once and `set` for every override (`?preset=...&set=parallel.ep=32`); leaving
them out means the home case. The session keeps a copy, because changing the page may empty the address.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

import moesim
from moesim.app import forms, jobs, predictions, scenario_links, uploads
from moesim.app import scenario_links as changes
from moesim.app.pages import HOME, SERVED_HOME
from moesim.app.texts import escaped
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.common.texts import overridden_key, split_key_value, value_of
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.reprice import without_prices
from moesim.simulator.studies.space import key_of

# -- history -----------------------------------------------------------------------------------------
# Undo and redo of a session: the scenarios that were current, oldest first, and which one is now.

MOST_STEPS = 100

Shown = tuple[str, str, tuple[str, ...]]
"""(id of the scenario object, preset, changes)."""


def record(shown: Shown) -> None:
    """Remember what is current now; what had been undone is forgotten once something else is changed."""
    steps, at = _steps()
    if steps and steps[at] == shown:
        return
    kept = [*steps[: at + 1], shown][-MOST_STEPS:]
    st.session_state["history"], st.session_state["history at"] = kept, len(kept) - 1


def can_undo() -> bool:
    """Whether something was current before."""
    return _steps()[1] > 0


def can_redo() -> bool:
    """Whether something was undone."""
    steps, at = _steps()
    return at + 1 < len(steps)


def step(by: int) -> Shown | None:
    """Make current what came one change before (-1) or was undone last (+1); return it, or None at an end."""
    steps, at = _steps()
    if not 0 <= at + by < len(steps):
        return None
    st.session_state["history at"] = at + by
    return steps[at + by]


def _steps() -> tuple[list[Shown], int]:
    return st.session_state.get("history", []), st.session_state.get("history at", 0)


LINK_PROBLEM = "link problem"
"""Session key with the reason why the link that was opened last could not be read."""

_ADOPTED = "adopted together"
"""Session key with the changes of each plan that was adopted, whose chip takes them back together."""

MOST_REFUSALS = 4
"""Illegal values that are reported at once."""

MOST_NAME = 80
"""Characters of a scenario's name that a visitor may give."""

MOST_PUBLISHED = 20
"""Number of written addresses that a session remembers."""

Address = tuple[str | None, tuple[str, ...], tuple[str, ...], str | None]
"""(preset, changes, form fields, packed link) as the address holds them."""


# -- the scenario --------------------------------------------------------------------------------------


def preset() -> str:
    """Name of the shipped scenario that the overrides apply to."""
    return str(st.session_state.get("preset", HOME))


def overrides() -> tuple[str, ...]:
    """The `key=value` texts that turn the preset into the current scenario, in order."""
    return tuple(st.session_state.get("overrides", ()))


def current() -> Scenario:
    """The scenario that every page shows. Raises InputError where an override is malformed."""
    return build(preset(), overrides())


def build(name: str, texts: Sequence[str]) -> Scenario:
    """Build a scenario from untrusted text; raises InputError for names of files on the server.

    A shipped scenario is read here, any other in a process with limits on time and memory.
    """
    jobs.check_link([name, *texts])
    return _built(name, tuple(texts), str(uploads.folder()))


@lru_cache(maxsize=64)
def _built(name: str, texts: tuple[str, ...], folder: str) -> Scenario:
    if not texts and name in moesim.presets():
        return moesim.load(name)
    key = hashlib.sha256(json.dumps([folder, name, *texts]).encode()).hexdigest()
    found: Scenario = jobs.submit(
        f"scenario/{key}", predictions.read_scenario, folder, name, texts, lane="read"
    ).result(jobs.MOST_WAITING * jobs.READ_S)
    return found


def accept(kind: str, name: str, data: bytes) -> uploads.Kept:
    """Check and store an upload in a process of its own; raises InputError, or JobError at its limits."""
    key = hashlib.sha256(f"{kind}/{name}/".encode() + data).hexdigest()
    found: uploads.Kept = jobs.submit(
        f"upload/{key}", predictions.read_upload, str(uploads.folder()), kind, name, data, lane="read"
    ).result(jobs.MOST_WAITING * jobs.READ_S)
    return found


def open_upload(name: str, data: bytes) -> None:
    """Make an uploaded scenario the current one, as changes of a preset if the link stays short.

    Raises InputError for a file that is not a scenario.
    """
    kept = accept("scenario", name, data).content
    assert isinstance(kept, Scenario)
    base = HOME if kept.trains else SERVED_HOME
    open_scenario(base, overrides_of(kept, base), kept, new=True)


def set_override(key: str, value: object) -> None:
    """Set one key, or restore the preset's value with None; overrides below the key are removed."""
    rest = tuple(t for t in overrides() if not changes.is_below(t, key))
    if (
        value is not None
        and _same(build(preset(), ()), key, value)
        and not any(changes.is_below(key, overridden_key(t)) for t in rest)
    ):
        value = None
    text = () if value is None else (f"{key}={value if isinstance(value, str) else json.dumps(value)}",)
    open_scenario(preset(), (*rest, *text))


def _same(scenario: Scenario, key: str, value: object) -> bool:
    """Whether the scenario already has this value."""
    found: Any = scenario.model_dump(mode="json", exclude_none=True)
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and "value" in found:
        found = found["value"]
    return found is not None and type(found) is type(value) and found == value


def override(key: str) -> str | None:
    """The override text of a key, or None where the preset's value holds."""
    return next((split_key_value(t)[1] for t in reversed(overrides()) if overridden_key(t) == key), None)


def open_scenario(
    name: str, texts: Sequence[str] = (), known: Scenario | None = None, *, new: bool = False
) -> None:
    """Make this the current scenario; a scenario whose link would be too long is stored as an upload.

    `known` is the scenario itself, where the caller has built it. `new` makes it another scenario object, so
    that the one before stays as it is in the list of scenarios.
    """
    if changes.is_long(name, texts):
        with suppress(MoesimError):  # a scenario that cannot be built stays, and the page says why
            kept = uploads.keep(build(name, texts) if known is None else known)
            build(kept, ())
            name, texts = kept, ()
    _show(secrets.token_hex(8) if new else object_id(), name, tuple(texts))


def object_id() -> str:
    """Name of the scenario object that changes belong to; an opened preset or plan is another object."""
    found: str = st.session_state.setdefault("scenario id", secrets.token_hex(8))
    return found


def adopt(scenario: Scenario, *, new: bool = True) -> None:
    """Make a scenario that the dashboard built itself the current one, as changes of its preset."""
    try:
        base, first = preset(), build(preset(), ())
    except MoesimError:
        base, first = HOME, build(HOME, ())
    texts = changes.overrides_between(first, scenario)
    own = tuple(text for text in texts if text not in overrides())
    if len(own) > 1:
        st.session_state[_ADOPTED] = [*st.session_state.get(_ADOPTED, ())[-MOST_PUBLISHED:], own]
    open_scenario(base, texts, scenario, new=new)


def overrides_of(scenario: Scenario, base: str = HOME) -> tuple[str, ...]:
    """Short overrides that turn the preset `base` into `scenario`."""
    return changes.overrides_between(moesim.load(base), scenario)


def undo() -> None:
    """Go back one change; where nothing came before, as after an opened link, leave out the last change."""
    before = step(-1)
    if before is None:
        open_scenario(preset(), overrides()[:-1])
    else:
        _show(*before)


def redo() -> None:
    """Make the change again that was undone last."""
    after = step(+1)
    if after is not None:
        _show(*after)


def _show(number: str, name: str, texts: tuple[str, ...]) -> None:
    st.session_state["scenario id"] = number
    st.session_state["preset"], st.session_state["overrides"] = name, texts


def reset() -> None:
    """Return to the preset as shipped, or to the home case where the preset does not exist."""
    known = preset() in moesim.presets() or uploads.TOKEN.fullmatch(preset()) is not None
    open_scenario(preset() if known and overrides() else HOME)


def title() -> str:
    """What people call the current scenario: its own name, or what differs from its preset."""
    return title_of(preset(), overrides())


def title_of(name: str, texts: Sequence[str]) -> str:
    """What people call a scenario of a link, as `scenario_links.named` says."""
    return changes.named(name, texts, base_of(name))


def base_of(name: str) -> Scenario | None:
    """The preset of a link as it is without changes; None where it cannot be read."""
    with suppress(MoesimError):
        return build(name, ())
    return None


def actions() -> list[tuple[tuple[str, ...], str]]:
    """(keys, words) of the changes, in order; what one click changed together is one entry."""
    own = changes.differences(overrides(), base_of(preset()))
    text_of = {overridden_key(text): text for text in overrides()}
    steps, at = _steps()
    together = [set(texts) for texts in st.session_state.get(_ADOPTED, ())]

    def began(keys: tuple[str, ...]) -> tuple[str, int]:
        """Which action these changes come from: one of a plan that was adopted, else the step of history."""
        texts = {text_of[key] for key in keys}
        for number, adopted in enumerate(together):
            if texts <= adopted:
                return "adopted", number
        first = at
        while first > 0 and steps[first - 1][:2] == steps[first][:2] and texts <= set(steps[first - 1][2]):
            first -= 1
        known = first > 0 and steps[first - 1][:2] == steps[first][:2]
        return ("step", first) if known else (keys[0], -1)  # of an opened link each stands alone

    found: dict[tuple[str, int], tuple[tuple[str, ...], list[str]]] = {}
    for keys, words in own:
        place = began(keys)
        known, said = found.get(place, ((), []))
        found[place] = (*known, *keys), [*said, words]
    return [(keys, _joined(said)) for keys, said in found.values()]


def _joined(words: Sequence[str]) -> str:
    more = [f"{len(words) - changes.MOST_WORDS} more"] if len(words) > changes.MOST_WORDS else []
    return ", ".join([*words[: changes.MOST_WORDS], *more])


def take_back(keys: Sequence[str]) -> None:
    """Leave out the changes of these keys, all at once."""
    open_scenario(preset(), tuple(text for text in overrides() if overridden_key(text) not in keys))


def rename(name: str) -> None:
    """Give the current scenario another name; an empty one restores that of its differences."""
    plain = " ".join(name.split())[:MOST_NAME]
    rest = tuple(text for text in overrides() if overridden_key(text) != "name")
    automatic = plain in ("", preset(), title_of(preset(), rest))
    open_scenario(preset(), rest if automatic else (*rest, f"name={changes.text_of(plain)}"))


def follow(model_changed: bool = False) -> None:
    """Name the current scenario after its model and cluster where they differ from the preset's.

    Another model also gets the run that a rule chooses for it, because the preset's run was for its model.
    """
    with suppress(MoesimError):  # a scenario that cannot be built keeps its name, and the page says why
        now, first = current(), build(preset(), ())
        same_model = now.model == first.model
        same = same_model and (now.machine.name, now.machine.nodes) == (
            first.machine.name,
            first.machine.nodes,
        )
        model, machine = now.shape.name, now.machine
        set_override("name", None if same else f"{model}-{machine.n_gpus}x{machine.accelerator.name}")
        text = f"{model} on {machine.n_gpus:,} {machine.accelerator.name}"
        set_override("description", None if same else text)
        if model_changed:
            kept = tuple(text for text in overrides() if not changes.is_below(text, "run"))
            open_scenario(preset(), kept if same_model else (*kept, "run=null"))


# -- the address ---------------------------------------------------------------------------------------


def synchronise() -> None:
    """Take over a link that was just opened; otherwise write the current state into the address.

    The address of a page that was just chosen may be empty; then the session's copy counts.
    """
    shown = _address()
    if any(shown) and _was_opened(shown):
        name, texts, fields, packed = shown
        st.session_state.pop(LINK_PROBLEM, None)
        read = tuple(text[: jobs.LINK_CHARACTERS + 1] for text in texts[: jobs.LINK_TEXTS + 1])
        wanted = ((name or HOME)[:200], read)
        if packed is not None:
            try:
                wanted = scenario_links.unpack(packed)
            except InputError as error:
                st.session_state[LINK_PROBLEM] = str(error)
        if wanted != (preset(), overrides()):
            open_scenario(*wanted, new=True)
        forms.read(fields)
    publish()


def publish() -> None:
    """Write the current scenario and the forms into the address, and remember it for undo."""
    wanted = changes.parameters(preset(), overrides()) | forms.parameters()
    address: Address = (
        wanted.get("preset"),
        tuple(wanted.get("set", ())),
        tuple(wanted.get(forms.PARAMETER, ())),
        wanted.get(scenario_links.PARAMETER),
    )
    if _address() != address:
        own = ("preset", "set", forms.PARAMETER, scenario_links.PARAMETER)
        others = {k: st.query_params.get_all(k) for k in st.query_params if k not in own}
        st.query_params.from_dict({**others, **wanted})
    published = _published()
    if published[-1:] != [address]:
        st.session_state["addresses"] = [*published[-MOST_PUBLISHED:], address]
    record((object_id(), preset(), overrides()))


def _address() -> Address:
    get, one = st.query_params.get_all, st.query_params.get
    return one("preset"), tuple(get("set")), tuple(get(forms.PARAMETER)), one(scenario_links.PARAMETER)


def _published() -> list[Address]:
    found: list[Address] = st.session_state.get("addresses", [])
    return found


def _was_opened(shown: Address) -> bool:
    """Whether the visitor opened this address, by a link or by Back.

    An address that this session wrote earlier and that returns without Back is outdated: the visitor acted
    before the browser received the newest address.
    """
    published = _published()
    if published and shown == published[-1]:
        return False
    by_back: bool = getattr(get_script_run_ctx(), "is_history_navigation", True)  # some releases lack it
    return by_back or shown not in published


# -- results -------------------------------------------------------------------------------------------


def cache_key(scenario: Scenario) -> str:
    """Scenario hash, calibration hash and version, as in a sweep's store; equal keys mean equal results."""
    return key_of(scenario).text


def result_of(scenario: Scenario, label: str = "Simulating one step") -> Result:
    """The result of any scenario; a change of prices does not cause another simulation."""
    plain = without_prices(scenario)
    found: Result = compute(f"result/{cache_key(plain)}", label, predictions.simulate, scenario)
    return moesim.reprice(found, scenario)


def known_result(scenario: Scenario) -> Result | None:
    """The result of a scenario where it is known already; None where it would have to be computed."""
    found: Result | None = jobs.cache.get(f"result/{cache_key(without_prices(scenario))}")
    return None if found is None else moesim.reprice(found, scenario)


def begin(scenario: Scenario) -> None:
    """Start computing a scenario's result without waiting for it."""
    plain = without_prices(scenario)
    jobs.submit(f"result/{cache_key(plain)}", predictions.simulate, scenario, ahead=True)


def trace_of(scenario: Scenario) -> bytes:
    """A Perfetto trace (.json.gz), from the cache or simulated while the caller waits a second or more."""
    data: bytes = jobs.submit(f"trace/{cache_key(scenario)}", predictions.trace, scenario).result(
        jobs.SHORT_S
    )
    return data


def compute(key: str, label: str, function: Callable[..., Any], *args: Any) -> Any:
    """The value of `function(*args)`, cached or computed in a job while the page shows the elapsed time."""
    job = jobs.submit(key, function, *args)
    if job.wait(0.15):
        return job.result()
    place = st.empty()
    began = time.monotonic()
    try:
        while not job.wait(0.2):
            # Writing to the page also lets a newer interaction end this wait.
            place.caption(f":material/hourglass_top: {escaped(label)}: {time.monotonic() - began:.0f} s")
    finally:
        if not job.done:
            job.cancel()
        else:
            place.empty()
    return job.result()


# -- scenario form -----------------------------------------------------------------------------------
# The scenario whose values a form shows while some of its changes are refused.


def accepted() -> tuple[Scenario, tuple[str, ...]]:
    """(the nearest scenario to the current one that can be built, the changes it leaves out).

    Raises InputError where not even the preset can be built.
    """
    texts = overrides()
    for first in (texts, texts[:-1]):  # usually the last change is the refused one
        with suppress(MoesimError):
            return _usable(first), texts[len(first) :]
    kept: tuple[str, ...] = ()
    for text in texts:
        with suppress(MoesimError):
            _usable((*kept, text))
            kept = (*kept, text)
    return _usable(kept), tuple(text for text in texts if text not in kept)


def _usable(texts: Sequence[str]) -> Scenario:
    """A scenario whose names can all be resolved, as a form needs it; raises InputError otherwise."""
    scenario = build(preset(), texts)
    assert scenario.shape and scenario.machine and scenario.recipe and scenario.calibration
    return scenario


def form() -> Scenario:
    """The scenario whose values a form shows; refused changes stay in their widgets (see `refused`).

    Raises InputError where not even the preset can be built.
    """
    scenario, left_out = accepted()
    st.session_state["refused"] = left_out
    return scenario


def left_out() -> tuple[str, ...]:
    """The changes that the scenario of `form` leaves out, because they cannot be built."""
    found: tuple[str, ...] = st.session_state.get("refused", ())
    return found


def refusals(first: MoesimError) -> list[MoesimError]:
    """`first`, and what else is wrong with the current scenario once the refused change is left out."""
    found, texts = [first], overrides()
    while isinstance(found[-1], InputError) and found[-1].key is not None and len(found) < MOST_REFUSALS:
        rest = tuple(text for text in texts if overridden_key(text) != found[-1].key)
        if len(rest) == len(texts):
            break
        texts = rest
        try:
            scenario = build(preset(), texts)
            compute(f"check/{cache_key(scenario)}", "Checking the plan", predictions.check, scenario)
            break
        except MoesimError as error:
            found.append(error)
    return found


def refused(key: str) -> Any:
    """The value of a change that the scenario of `form` leaves out; None where it accepted the change."""
    texts = [t for t in left_out() if overridden_key(t) == key]
    with suppress(MoesimError):
        return value_of(texts[-1], key) if texts else None
    return None
