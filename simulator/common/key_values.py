"""The texts `key=value` that override a scenario, wherever they are written: one reader for all of them."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import parse_mapping


def divided(text: str) -> tuple[str, str | None]:
    """The key without spaces around it, and what follows the first `=`; None where there is none."""
    key, equals, value = text.partition("=")
    return key.strip(), value if equals else None


def overridden_key(text: str) -> str:
    """The dotted key of a `key=value` text."""
    return divided(text)[0]


def key_and_text(text: str, option: str, form: str) -> tuple[str, str]:
    """Key and text of the value; raises InputError naming `option` and the `form` to write without either."""
    key, value = divided(text)
    if value is None or not key:
        raise InputError(f"{option} {text!r}: write {form}")
    return key, value


def value_of(text: str, place: str) -> Any:
    """The text behind the `=`, read as YAML. Raises InputError, naming `place`, for what is no value."""
    return parse_mapping(f"value: {divided(text)[1] or ''}", place)["value"]
