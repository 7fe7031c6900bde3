"""Form values that survive a change of page, a reload and the browser's Back.

The framework forgets a widget's value when its page is left, and the whole session on a reload. A field held
here is written into the address (`?form=plan.objective="cost"`) where it differs from its default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import check

PARAMETER = "form"
MOST_FIELDS = 40
MOST_CHARACTERS = 200
"""Limit on the text of one field in the address."""

_FIELDS = "fields"


def value(name: str, default: Any, legal: Callable[[Any], bool]) -> Any:
    """The value of a field, or its default where it was never set or a link gives an illegal value."""
    found = _fields().get(name, default)
    with suppress(TypeError):
        if found is not None and legal(found):
            return found
    return default


def put(name: str, value: Any) -> None:
    """Set a field; None restores its default."""
    fields = {k: v for k, v in _fields().items() if k != name}
    st.session_state[_FIELDS] = fields if value is None else {**fields, name: value}


def clear(prefix: str) -> None:
    """Restore the default of every field whose name starts with `prefix`."""
    st.session_state[_FIELDS] = {k: v for k, v in _fields().items() if not k.startswith(prefix)}


def one_of(
    widget: Callable[..., Any], label: str, name: str, options: Sequence[Any], default: Any, **more: Any
) -> Any:
    """The value of a widget that holds one of several options; `key` among `more` names the widget."""
    held = _held(name, more.pop("key", ""), default, lambda found: found in options)
    return widget(label, options, **held, **more)


def switch(widget: Callable[..., Any], label: str, name: str, key: str, **more: Any) -> bool:
    """The value of a widget that is on or off, at first off."""
    return bool(widget(label, **_held(name, key, False, lambda found: found in (False, True)), **more))


def some_of(
    widget: Callable[..., Any], label: str, name: str, options: Sequence[Any], default: Any = (), **more: Any
) -> Any:
    """The value of a widget that holds any number of several options."""
    held = _held(
        name,
        more.pop("key", ""),
        list(default),
        lambda found: isinstance(found, list) and all(item in options for item in found),
    )
    return widget(label, options, **held, **more)


def text(widget: Callable[..., Any], label: str, name: str, default: str, most: int, **more: Any) -> str:
    """The value of a widget that holds a text of at most `most` characters."""
    held = _held(
        name, more.pop("key", ""), default, lambda found: isinstance(found, str) and len(found) <= most
    )
    return str(widget(label, max_chars=most, **held, **more))


def number(
    widget: Callable[..., Any], label: str, name: str, least: Any, most: Any, default: Any, **more: Any
) -> Any:
    """The value of a widget that holds a number of the type of `default`."""
    kind = type(default)
    held = _held(
        name,
        more.pop("key", ""),
        default,
        lambda found: (
            isinstance(found, (int, float) if kind is float else int)
            and not isinstance(found, bool)
            and least <= found <= most
        ),
        convert=kind,
    )
    return widget(label, least, most, **held, **more)


def _held(
    name: str,
    key: str,
    default: Any,
    legal: Callable[[Any], bool],
    convert: Callable[[Any], Any] = lambda found: found,
) -> dict[str, Any]:
    """Keyword arguments that give a widget the field's value and write its changes to the field first."""
    key = key or f"field {name}"
    wanted = convert(value(name, default, legal))
    # Written only where it differs, because a write overrides what the visitor changed in the meantime.
    if key not in st.session_state or st.session_state[key] != wanted:
        st.session_state[key] = wanted
    return {"key": key, "on_change": _changed, "args": (name, key, default)}


def _changed(name: str, key: str, default: Any) -> None:
    chosen = st.session_state[key]
    put(name, None if chosen == default else chosen)


def take_over(prefix: str, texts: Sequence[str]) -> None:
    """Set the fields whose names start with `prefix` to those of an address; the others stay."""
    clear(prefix)
    others = _fields()
    read(texts)
    own = {name: value for name, value in _fields().items() if name.startswith(prefix)}
    st.session_state[_FIELDS] = {**others, **own}


def _fields() -> dict[str, Any]:
    found: dict[str, Any] = st.session_state.get(_FIELDS, {})
    return found


def parameters() -> dict[str, list[str]]:
    """The query parameter that holds every field."""
    texts = [
        f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in sorted(_fields().items())
    ]
    kept = [text for text in texts if len(text) <= MOST_CHARACTERS][:MOST_FIELDS]
    return {PARAMETER: kept} if kept else {}


def read(texts: Sequence[str]) -> None:
    """Take over the fields of an address; malformed ones are ignored."""
    fields = {}
    for text in texts[:MOST_FIELDS]:
        name, _, data = text[:MOST_CHARACTERS].partition("=")
        with suppress(ValueError, RecursionError, InputError):
            value = json.loads(data)
            check(value, MOST_CHARACTERS, MOST_CHARACTERS)
            fields[name] = value
    st.session_state[_FIELDS] = fields
