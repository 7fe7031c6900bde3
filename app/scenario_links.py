"""Pure functions that write a scenario as a preset with short `key=value` changes, and these as a link."""

from __future__ import annotations

import binascii
import json
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from pydantic import BaseModel

from moesim.app import uploads
from moesim.app.texts import compact
from moesim.hwmodels import list_clusters, load_cluster
from moesim.hwmodels.accelerator import list_accelerators, load_accelerator
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import list_networks, load_network
from moesim.hwmodels.node import list_nodes, load_node
from moesim.hwmodels.provenance import OWN, STATED_IN
from moesim.hwmodels.units import parse_quantity
from moesim.hwmodels.yaml_io import check, parse_mapping
from moesim.simulator.common.texts import overridden_key, split_key_value, value_of
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import may_change_machine

# -- packed links ------------------------------------------------------------------------------------
# Links that carry the uploaded files of a scenario with them, compressed, so that they open anywhere.
#
# The text is base64url of zlib of JSON: `{"preset", "set", "files"}`, where `files` holds the text of
# every upload by the token that names it in the rest. A token is the hash of its file, which is checked.

PARAMETER = "packed"
"""Query parameter that holds the text in the place of `preset` and `set`."""

MOST_CHARACTERS = 8_000
"""Limit on the text; browsers, servers and proxies take addresses of this length."""

MOST_BYTES = 1_000_000
"""Limit on what the text unpacks to, the same as for one uploaded file."""

MOST_VALUES = 10_000
"""Most texts and keys in it."""


def pack(name: str, texts: Sequence[str]) -> str | None:
    """The text of a scenario with the uploads that it uses; None where it uses none or would be too long.

    Recorded counts in NumPy's format are not text and are not embedded.
    """
    return _packed(name, tuple(texts), str(uploads.folder()))


@lru_cache(maxsize=256)
def _packed(name: str, texts: tuple[str, ...], folder: str) -> str | None:
    try:
        files: dict[str, str] = {}
        waiting = [token for text in (name, *texts) for token in uploads.TOKEN.findall(text)]
        while waiting:  # what is named inside a file comes along
            token = waiting.pop()
            if token not in files:
                files[token] = uploads.path_of(token).read_bytes().decode("utf-8")
                waiting += uploads.TOKEN.findall(files[token])
    except (InputError, UnicodeDecodeError):
        return None
    if not files or sum(map(len, files.values())) > MOST_BYTES // 2:
        return None
    data = json.dumps({"preset": name, "set": list(texts), "files": files}, separators=(",", ":"))
    text = urlsafe_b64encode(zlib.compress(data.encode(), 9)).decode().rstrip("=")
    return text if len(text) <= MOST_CHARACTERS else None


def unpack(text: str) -> tuple[str, tuple[str, ...]]:
    """(preset, changes) of a packed link; its files are stored as uploads.

    Raises InputError for a text that is too long, damaged, unpacks to more than the limit, or holds a file
    that does not belong to its name.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"the link's parameter {PARAMETER} has {len(text):,} characters, more than the "
            f"{MOST_CHARACTERS:,} that are read; send the saved scenario as a file instead"
        )
    data = _json_of(text)
    name, texts, files = data.get("preset"), data.get("set"), data.get("files")
    if not isinstance(name, str) or not isinstance(texts, list) or not isinstance(files, dict):
        raise _damaged("does not hold a preset, its changes and their files")
    if not all(isinstance(item, str) for item in [*texts, *files, *files.values()]):
        raise _damaged("holds something that is not text")
    for token, content in files.items():
        uploads.keep_named(token, content.encode())
    return name, tuple(texts)


def _json_of(text: str) -> dict[str, Any]:
    unzip = zlib.decompressobj()
    try:
        found = unzip.decompress(urlsafe_b64decode(text + "=" * (-len(text) % 4)), MOST_BYTES + 1)
    except (zlib.error, binascii.Error, ValueError):
        raise _damaged("is not compressed text, or was cut") from None
    if len(found) > MOST_BYTES:
        raise InputError(
            f"the link's parameter {PARAMETER} unpacks to more than the limit of {MOST_BYTES // 10**6} MB"
        )
    if not unzip.eof:
        raise _damaged("was cut")
    try:
        data = json.loads(found)
        check(data, MOST_VALUES, MOST_VALUES)
    except InputError as error:
        raise _damaged(f"holds what no scenario can: {error}") from None
    except (ValueError, RecursionError):
        raise _damaged("holds no JSON") from None
    if not isinstance(data, dict):
        raise _damaged("holds no JSON object")
    return data


def _damaged(what: str) -> InputError:
    return InputError(
        f"the link's parameter {PARAMETER} {what}: copy the whole link again, or ask for the saved scenario"
    )


PACKED = "packed:"
"""Beginning of a scenario that is written as a packed link."""

MOST_WRITTEN = 4_000
"""Limit on a scenario written as a JSON list; its link is at most half as long."""

MOST_LINK_CHARACTERS = 2_000
"""Limit on a scenario's link that browsers, mail and chat programs handle; a longer one becomes an upload."""

_SHIPPED: Mapping[str, tuple[Callable[[], Sequence[str]], Callable[[str], BaseModel]]] = {
    "cluster": (list_clusters, load_cluster),
    "node": (list_nodes, load_node),
    "network": (list_networks, load_network),
    "accelerator": (list_accelerators, load_accelerator),
}
"""Keys whose value may be written as the name of a shipped description, with changes by dotted keys below."""


def overrides_between(first: Scenario, other: Scenario) -> tuple[str, ...]:
    """Short overrides that turn `first` into `other`; uploads appear in them by their tokens."""
    after = other.to_dict()
    found = list(_differences(first.to_dict(), after, ""))
    moves = [(key, value) for key, value in found if may_change_machine(key)]
    if moves:
        # Another accelerator leaves keys to the rules: only what then still differs is written.
        with suppress(InputError):
            moved = first.overridden(*(f"{key}={text_of(value)}" for key, value in moves))
            found = [*moves, *_differences(moved.to_dict(), after, "")]
    return tuple(f"{key}={text_of(uploads.portable_data(value))}" for key, value in found)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key in [*before, *(k for k in after if k not in before)]:
        old, new = before.get(key), after.get(key)
        place = f"{path}{key}"
        if old == new:
            continue
        if isinstance(new, Mapping) and _is_stated(new):
            yield place, new["value"]
            continue
        if isinstance(new, Mapping):
            name = new.get("name")
            if key not in _SHIPPED or name not in _SHIPPED[key][0]():
                name = None
            if name is not None and name != (old if isinstance(old, str) else (old or {}).get("name")):
                yield place, name
                old = name
            if isinstance(old, str) and key in _SHIPPED:
                # An override below a name starts from what the name stands for.
                old = _SHIPPED[key][1](old).model_dump(mode="json", exclude_none=True)
            elif old is None and _goes_below(new):
                old = {}
        if isinstance(old, Mapping) and isinstance(new, Mapping) and _goes_below(new):
            yield from _differences(old, new, f"{place}.")
        else:
            yield place, new


def _goes_below(value: Mapping[str, Any]) -> bool:
    """Whether every key of the mapping can be written as part of a dotted key."""
    return bool(value) and not any("." in str(key) or "=" in str(key) for key in value)


def _is_stated(value: Mapping[str, Any]) -> bool:
    """Whether this is the stated figure that a plain value in an override would become."""
    return (
        value.get("kind") == "assumed"
        and str(value.get("source")).startswith((STATED_IN, OWN))
        and set(value) == {"value", "kind", "source", "date"}
    )


def text_of(value: Any) -> str:
    """The text of a value in an override: plain where YAML reads it back unchanged, otherwise JSON."""
    plain = isinstance(value, str) and re.fullmatch(r"\$?[A-Za-z0-9][\w ./$-]*", value) is not None
    text = json.dumps(value, separators=(",", ":"))
    if plain and parse_mapping(f"value: {value}", "value")["value"] == value:
        return str(value)
    return text


def is_below(text: str, key: str) -> bool:
    """Whether an override sets a key or one below it."""
    return overridden_key(text) == key or overridden_key(text).startswith(f"{key}.")


def parameters(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """The query parameters of a scenario; uploads that it uses are packed into them where they are short."""
    packed = pack(name, texts)
    if packed is not None:
        return {PARAMETER: packed}
    return _unpacked(name, texts)


def _unpacked(name: str, texts: Sequence[str]) -> dict[str, Any]:
    return {"preset": name, "set": list(texts)} if texts else {"preset": name}


def is_long(name: str, texts: Sequence[str]) -> bool:
    """Whether the changes are longer than a link should be, uploaded files left out."""
    return len(urlencode(_unpacked(name, texts), doseq=True)) >= MOST_LINK_CHARACTERS


def link(name: str, texts: Sequence[str]) -> str:
    """The query string of a scenario, with its question mark."""
    return "?" + urlencode(parameters(name, texts), doseq=True)


def written(name: str, texts: Sequence[str]) -> str:
    """A scenario as one text: a JSON list of its preset and changes, or a packed link."""
    packed = pack(name, texts)
    return json.dumps([name, *texts]) if packed is None else f"{PACKED}{packed}"


def read(text: str) -> tuple[str, tuple[str, ...]]:
    """(preset, changes) of what `written` wrote; raises InputError if malformed."""
    if text.startswith(PACKED):
        return unpack(text.removeprefix(PACKED))
    try:
        data = json.loads(text[:MOST_WRITTEN])
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, list) or not data or not all(isinstance(item, str) for item in data):
        raise InputError("is not a list of a preset and overrides")
    check(data, MOST_WRITTEN, MOST_WRITTEN)
    return data[0], tuple(data[1:])


# -- names for people --------------------------------------------------------------------------------
# A scenario is called by what differs from its preset: "NVLink x2, 8 SMs".

UP_KEYS = ("cluster.node.accelerator.scale_up_bandwidth", "cluster.node.scale_up.fabric.link_bandwidth")
NIC_KEYS = ("cluster.node.nic_bandwidth", "cluster.network.fabric.link_bandwidth")
HIDDEN = ("name", "description")
"""Changes that name the scenario, and are no part of its difference."""
_WORDS: Mapping[str, str] = {
    "communication.sms": "{} {units}",
    "communication.kernels": "{} kernels",
    "parallel.pp": "PP{}",
    "parallel.ep": "EP{}",
    "parallel.tp": "TP{}",
    "parallel.cp": "CP{}",
    "parallel.vpp": "VPP{}",
    "parallel.expert_tp": "expert TP{}",
    "parallel.microbatch": "micro-batch {}",
    "parallel.zero_stage": "ZeRO-{}",
    "batch.sequences": "{} sequences",
    "batch.sequence_length": "{} tokens a sequence",
    "cluster.nodes": "{} nodes",
    "cluster.network": "network {}",
    "cluster.energy": "electricity of {}",
    "cluster.price_per_gpu_hour": "{} a GPU",
    "model": "{}",
    "cluster": "on {}",
    "schedule": "{}",
    "precision": "{}",
    "recompute": "recompute {}",
    "profile": "rates of {}",
    "routing.expert_load_cv": "load spread {}",
    "run": "run of {}",
    "run.tokens": "{} tokens",
    "run.start": "start {}",
    "run.failures": "failures from {}",
    "run.restart": "restart times from {}",
}
"""What people call a change of a key; `{}` is its value."""
MOST_WORDS = 4
"""Differences that a name states; of the others it gives the number."""


def named(name: str, texts: Sequence[str], base: Scenario | None = None) -> str:
    """What people call a scenario: the name that it was given, else what differs from its preset.

    `base`: the preset as shipped, where it can be read. A name that a page chose after model and cluster
    stands before the differences, as an uploaded scenario's own does.
    """
    own = {overridden_key(text): _value(text) for text in texts}
    given, about = own.get("name"), str(own.get("description") or "")
    model, on, machine = about.partition(" on ")
    chosen = f"{model}-{machine.replace(',', '').replace(' ', 'x', 1)}" if on else ""
    if isinstance(given, str) and given != chosen:
        return given[:80]
    upload = uploads.TOKEN.fullmatch(name) is not None
    first = [given] if isinstance(given, str) else [uploads.name_of(name)] if upload else []
    skipped = ("model", "cluster", "profile", "run") if isinstance(given, str) else ()
    words = [text for keys, text in differences(texts, base) if keys[0].split(".")[0] not in skipped]
    more = [f"{len(words) - MOST_WORDS} more"] if len(words) > MOST_WORDS else []
    return ", ".join([*first, *words[:MOST_WORDS], *more]) or uploads.with_names(name)


def differences(texts: Sequence[str], base: Scenario | None = None) -> list[tuple[tuple[str, ...], str]]:
    """(keys, words) of each change, in order; keys that belong together are one change."""
    found: dict[tuple[str, ...], str] = {}
    for text in texts:
        key = overridden_key(text)
        if key in HIDDEN:
            continue
        family = next((f for f in (UP_KEYS, NIC_KEYS) if key in f), (key,))
        before = next((known for known in found if set(known) & set(family)), ())
        words = found.pop(before, None)
        found[(*before, key)] = words or _said(key, text, base)
    return list(found.items())


def _said(key: str, text: str, base: Scenario | None) -> str:
    """One change in words, such as "NVLink x2"; a value that is a description is left out."""
    value, machine = _value(text), None
    if base is not None:
        with suppress(InputError):
            machine = base.machine
    if key in (*UP_KEYS, *NIC_KEYS):
        link = "NIC" if key in NIC_KEYS else scale_up_name(machine)
        return f"{link} {_factor(key, value, base)}"
    if key == "run.price" and isinstance(value, Mapping):
        rent = value.get("rent")
        return f"rent {rent.get('term')}" if isinstance(rent, Mapping) else f"bought: {value.get('buy')}"
    if key == "routing.load" and isinstance(value, Mapping) and "exponent" in value:
        return f"Zipf {value['exponent']}"
    form = _WORDS.get(key, f"{key.rpartition('.')[2].replace('_', ' ')} {{}}")
    if value is None:
        shown = "the rule" if key == "profile" else "none"
    elif isinstance(value, Mapping | list):
        shown = "hardware of your own" if key == "cluster" else "changed"
    elif isinstance(value, int) and not isinstance(value, bool):
        shown = compact(value) if key == "run.tokens" else f"{value:,}"
    else:
        shown = uploads.with_names(str(value))[:40]
    units = "SMs" if machine is None else f"{machine.accelerator.unit_name}s"
    return form.replace("{units}", units).replace("{}", shown)


def _factor(key: str, value: Any, base: Scenario | None) -> str:
    """A bandwidth as a multiple of the preset's, such as "x2"; as it is written where that is not known."""
    with suppress(InputError, AttributeError, TypeError, ZeroDivisionError):
        before: Any = None if base is None else base.machine
        for part in key.split(".")[1:]:
            before = getattr(before, part)
        return f"x{parse_quantity(str(value), 'bytes_per_s') / before.value:.3g}"
    return str(value)[:40]


def scale_up_name(machine: Cluster | None) -> str:
    """What people call the links inside a node."""
    vendor = "NVIDIA" if machine is None else machine.accelerator.vendor
    return {"NVIDIA": "NVLink", "AMD": "Infinity Fabric"}.get(vendor, "Scale-up")


def _value(text: str) -> Any:
    with suppress(InputError):
        return value_of(text, "a change")
    return split_key_value(text)[1]


def readable(text: str) -> str:
    """An override for display: uploads appear by their names and nested data is left out."""
    key, value = split_key_value(text)
    nested = "{" in (value or "")
    return f"{key}: described in full" if nested else uploads.with_names(text)[:100]


def only_here(name: str, texts: Sequence[str]) -> str | None:
    """The warning for a link that works on this server only; None where the link works anywhere."""
    names = {overridden_key(text) for text in texts if uploads.TOKEN.search(text)}
    if uploads.TOKEN.fullmatch(name):
        names.add("the scenario itself")
    if not names or pack(name, texts) is not None:
        return None
    return (
        f"An uploaded file is used ({', '.join(sorted(names))}): this link works on this server only, "
        "and only while it runs. For elsewhere, save the scenario: the saved file holds all of it."
    )
