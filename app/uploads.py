"""Checks all untrusted input: uploaded bytes, and text that could name a file.

The reader of its kind checks an upload, which is then stored under a name made from its content; a scenario
refers to it by that name. No other path is read, be it from a text box, a link or an uploaded scenario.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.calibration import CalibrationProfile, list_profiles, load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import READ_BELOW, oldest_beyond
from moesim.hwmodels.importers import ImportedTopology, import_topology
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.common.texts import split_key_value, value_of
from moesim.simulator.layout.popularity import read_counts
from moesim.simulator.model.catalogue import read_model
from moesim.simulator.model.huggingface import ImportedModel, to_yaml
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario, load_scenario, with_overrides
from moesim.simulator.serving.requests import read_log

MAX_BYTES = {"scenario": 1_000_000, "model": 1_000_000, "profile": 1_000_000, "topology": 4_000_000}
"""Limit on an unpacked upload, by kind; the readers have their own limits as well."""
MAX_BYTES_HISTOGRAM = 16_000_000
MAX_KEPT_BYTES = 256_000_000
"""Limit on all uploads together; the oldest are removed first."""

ENDINGS: Mapping[str, tuple[str, ...]] = {
    "scenario": (".yaml", ".yml", ".json"),
    "model": (".json", ".yaml", ".yml"),
    "profile": (".yaml", ".yml", ".json"),
    "topology": (".xml", ".txt", ".edges"),
    "histogram": (".csv", ".npy", ".json"),
    "load": (".jsonl", ".csv"),
}
"""Allowed file name endings of each kind; `.gz` may follow."""

TOKEN = re.compile(r"upload-[0-9a-f]{32}\.(?:yaml|yml|json|jsonl|csv|npy|xml|txt|edges)")
_NAME = re.compile(r'^(?:\{?\s{0,4}"name"|name)\s*:\s*("(?:[^"\\]|\\.)*"|[^,\n}]+)', re.MULTILINE)
"""The name at the head of a YAML or JSON file."""
_FILE = re.compile(r"\.(?:ya?ml|jsonl?|csv|npy|npz|xml|txt|edges|pkl|gz|xz|py|toml)$", re.IGNORECASE)
_QUANTITY = re.compile(
    r"\s*[-+]?\$?\.?\d[\d_.,]*(?:[eE][-+]?\d+)?\s*(?:[A-Za-zµ$][A-Za-z0-9µ$-]*)?(?:/[A-Za-z-]+){1,2}\s*"
)
_PROSE = frozenset(
    ("description", "source", "note", "title", "assumption", "reference", "meaning", "evidence", "software")
)
"""Keys whose text is shown and never opened."""


class ConfigReading(Struct, frozen=True):
    """How the keys of a config.json were read; empty for a model file."""

    understood: tuple[tuple[str, str, str], ...]
    """(key, value, meaning) of every key that decides the shape."""
    ignored: tuple[str, ...]
    not_modelled: tuple[str, ...]


class Kept(Struct, frozen=True):
    """An accepted upload: the token that names it in scenarios and links, and its parsed content."""

    token: str
    name: str
    content: Scenario | ModelShape | CalibrationProfile | ImportedTopology | None
    reading: ConfigReading | None = None
    """How an uploaded model was read; None for other kinds."""


def accept(kind: str, name: str, data: bytes, **options: Any) -> Kept:
    """Check an upload of a kind (see ENDINGS) and store it; `options` go to `import_topology`.

    A topology is stored as the cluster file that it is converted to. Raises InputError, naming the file as
    the visitor did, for a file that is too large, malformed, hostile or of another kind; nothing of a refused
    file is stored.
    """
    name = name.encode(errors="replace").decode()
    shown = Path(name.replace("\\", "/")).name[:80] or "the file"
    plain = shown[:-3] if shown.lower().endswith(".gz") else shown
    ending = Path(plain).suffix.lower()
    if ending not in ENDINGS[kind]:
        found = kind_of(data)
        told = "" if found is None or found[0] == kind else f"; this is {found[1]}, and {found[2]}"
        raise InputError(
            f"{shown}: a {kind} file ends in {', '.join(ENDINGS[kind])} (or that and .gz), not in "
            f"{ending or 'nothing'}{told}"
        )
    most = MAX_BYTES.get(kind, MAX_BYTES_HISTOGRAM)
    data = _unpacked(data, shown, most) if plain != shown else data
    if len(data) > most:
        raise InputError(f"{shown}: larger than the limit of {most // 10**6} MB for a {kind} file")
    # Under a name of its own while it is read: another upload of the same bytes may be refused meanwhile.
    path = _written(data, f"upload-{secrets.token_hex(16)}{ending}")
    try:
        content, reading = _READERS[kind](path, **options), None
        if isinstance(content, ImportedModel):
            understood = tuple((u.key, str(u.value)[:200], u.meaning) for u in content.understood)
            reading = ConfigReading(understood, content.ignored, content.shape.not_modelled)
            content = _named(content.shape, path, plain)
        if isinstance(content, ImportedTopology | ModelShape):  # the parsed content is stored instead
            text = content.text if isinstance(content, ImportedTopology) else to_yaml(content)
            kept = _store(text.replace(path.name, plain).encode(), ".yaml")
        else:
            kept = path.replace(_path_of_content(data, ending))
        _forget_oldest(kept)
    except InputError as error:
        found = kind_of(data)
        if found is not None and found[0] != kind:
            raise InputError(f"{shown} is {found[1]}, not what is read here; {found[2]}") from None
        text = str(error).replace(str(path), shown).replace(path.name, shown)
        raise InputError(text.replace(path.stem, Path(shown).stem)) from None
    except (RecursionError, MemoryError):
        raise InputError(f"{shown}: nested too deeply or too large to be a {kind} file") from None
    finally:
        path.unlink(missing_ok=True)
    return Kept(kept.name, shown, content, reading)


_MARKS: tuple[tuple[str, str, str, str], ...] = (
    ("trace", r'"traceEvents"', "a profiler's trace", "the page Trace reads it"),
    ("model", r'"?(?:model_type|hidden_size|num_hidden_layers)"?\s*:', "a model's config.json",
     "Start, and Scenario under Open or save, read it as a model"),
    ("index", r'"weight_map"\s*:', "an index of weights", "the config.json beside it describes the model"),
    ("tokenizer", r'"(?:tokenizer_class|added_tokens|merges|pre_tokenizer|truncation)"\s*:',
     "a tokenizer's file", "the config.json beside it describes the model"),
    ("deepspeed", r'"(?:zero_optimization|train_micro_batch_size_per_gpu)"\s*:', "a DeepSpeed configuration",
     "moesim import launch reads it on the command line"),
    ("result", r'"schema_version"\s*:', "a result that moesim printed",
     "its scenario is under `inputs`; Scenario reads the saved scenario"),
    ("profile", r'(?m)^\s*"?(?:residual|measured_on|entries|laws)"?\s*:', "a calibration profile",
     "Calibration, and Scenario under Open or save, read it as a profile"),
    ("scenario", r'(?m)^\s*"?(?:parallel|batch|schedule)"?\s*:', "a scenario of moesim",
     "Scenario reads it under Open or save"),
    ("launch", r"(?:torchrun|--tensor-model-parallel-size|#SBATCH|srun )", "a launch script",
     "moesim import launch reads it on the command line"),
    ("topology", r"<(?:system|topology|cpu)\b", "a topology in XML", "the page Topology reads it"),
)  # fmt: skip
"""(kind, what only such a file has, what it is, where it is read), the surest first."""


def kind_of(data: bytes) -> tuple[str, str, str] | None:
    """(kind, what it is, where it is read) of a file by its beginning; None where that is not sure."""
    text = data[:20_000].decode("utf-8", "replace")
    return next(((kind, what, place) for kind, mark, what, place in _MARKS if re.search(mark, text)), None)


def scenario_of(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a preset name or of an uploaded scenario's token, with overrides applied.

    The only way in which the dashboard makes a scenario: every text in it that could name a file must be a
    token of an upload. Raises InputError otherwise, and as `load_scenario` does.
    """
    if not TOKEN.fullmatch(name):
        refuse_paths(name, "scenario")
        return load_scenario(name, [_checked_override(text) for text in overrides])
    data = load_mapping(path_of(name))
    scenario = scenario_from(data, f"the uploaded scenario {str(data.get('name', ''))[:80]}")
    return with_overrides(scenario, [_checked_override(text) for text in overrides])


def scenario_from(data: Mapping[str, Any], place: str = "the scenario") -> Scenario:
    """The scenario of plain data, which may name uploads by their tokens; raises InputError at any path."""
    refuse_paths(data, "scenario")
    return validate_model(Scenario, _with_paths(data), place)


def keep(scenario: Scenario) -> str:
    """Store a scenario as if it had been uploaded and return its token; it names other uploads by token."""
    data = portable_data(scenario.to_dict())
    return _store(json.dumps(data).encode(), ".json").name


def keep_named(token: str, data: bytes) -> None:
    """Store a file that a link carries under the token that names it; it is read and checked when it is used.

    Raises InputError where the name is none of an upload, or not the hash of the file.
    """
    named = TOKEN.fullmatch(token) is not None
    if not named or token != f"upload-{hashlib.sha256(data).hexdigest()[:32]}{Path(token).suffix}":
        raise InputError(
            f"the link carries a file that is not {token[:80]!r}, as it says; copy the link again"
        )
    _store(data, Path(token).suffix)


def name_of(token: str) -> str:
    """The name inside an upload: that of its model, cluster, profile or scenario."""
    try:
        return _name_in(str(path_of(token)))
    except InputError:
        return "a file that is not here any more"


@lru_cache(maxsize=256)
def _name_in(path: str) -> str:
    """The name at the head of a file; only a process with limits reads whole uploads."""
    with Path(path).open("rb") as file:
        found = _NAME.search(file.read(4000).decode("utf-8", "replace"))
    return found[1].strip().strip("\"'")[:80] if found else "unnamed"


def with_names(text: str) -> str:
    """A text for display, with uploads by their own names instead of tokens and folders."""
    return TOKEN.sub(lambda found: f"{name_of(found[0])} (uploaded)", portable(text))


def profile_of(name: str) -> CalibrationProfile:
    """The calibration profile of a shipped name or of an upload's token; raises InputError otherwise."""
    if TOKEN.fullmatch(name):
        return load_profile(path_of(name))
    if name not in list_profiles():
        raise InputError(f"no calibration profile {name[:80]!r}; upload one or choose a shipped one")
    return load_profile(name)


def path_of(token: str) -> Path:
    """The path of an upload; raises InputError for a malformed token, or where the file is gone."""
    path = folder() / token
    if not TOKEN.fullmatch(token) or not path.is_file():
        raise InputError(f"the uploaded file {token[:80]!r} is no longer on this server; upload it again")
    return path


def portable(text: str) -> str:
    """A text with the paths of uploads replaced by their tokens."""
    return text.replace(f"{folder()}{os.sep}", "")


def portable_data(value: Any) -> Any:
    """Plain data with `portable` applied to every text."""
    if isinstance(value, str):
        return portable(value)
    if isinstance(value, Mapping):
        return {key: portable_data(inner) for key, inner in value.items()}
    return [portable_data(inner) for inner in value] if isinstance(value, list | tuple) else value


def folder() -> Path:
    """The folder of uploads: the server's, or one of this process where there is no server."""
    below = os.environ.get(READ_BELOW)
    return Path(below) if below else Path(_own_folder())


@lru_cache(maxsize=1)
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="moesim-uploads-")


def _store(data: bytes, ending: str) -> Path:
    """The file that holds the bytes, written anew, which makes it the newest one."""
    path = _written(data, _path_of_content(data, ending).name)
    _forget_oldest(path)
    return path


def _path_of_content(data: bytes, ending: str) -> Path:
    """The file of these bytes: named by hash, so equal uploads share it and none can be guessed."""
    return folder() / f"upload-{hashlib.sha256(data).hexdigest()[:32]}{ending}"


def _written(data: bytes, name: str) -> Path:
    """A file of the folder, in place as a whole or not at all; raises InputError where it cannot be kept."""
    try:
        handle, temporary = tempfile.mkstemp(dir=folder())
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            return Path(temporary).replace(folder() / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"the server cannot keep the file: {error.strerror or error}") from None


def _forget_oldest(newest: Path) -> None:
    for path in oldest_beyond(MAX_KEPT_BYTES, folder().glob("upload-*")):
        if path != newest:
            path.unlink(missing_ok=True)


def _unpacked(data: bytes, name: str, most: int) -> bytes:
    """Unpack gzip up to `most` bytes, so that a decompression bomb is refused before it unpacks."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        found = unzip.decompress(data, most + 1)
    except zlib.error:
        raise InputError(f"{name}: not a gzip file") from None
    if len(found) > most:
        raise InputError(f"{name}: unpacks to more than the limit of {most // 10**6} MB")
    if not unzip.eof:
        raise InputError(f"{name}: the gzip file ends too early")
    return found


def _named(shape: ModelShape, path: Path, name: str) -> ModelShape:
    """Name a nameless shape after its file, or after its family for a config.json."""
    if not shape.name.startswith("upload-"):
        return shape
    own = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(name).stem).strip("-")
    if own.lower() in ("", "config"):
        own = str(load_mapping(path).get("model_type", "model"))[:80]
    return shape.model_copy(update={"name": own})


def _read_profile(path: Path) -> CalibrationProfile:
    _check_includes(load_mapping(path), path.name)
    return load_profile(path)


def _check_includes(profile: Mapping[str, Any], where: str) -> None:
    included = profile.get("include")  # the one key of a profile that opens files
    unknown = [n for n in included if n not in list_profiles()] if isinstance(included, list) else []
    if unknown:
        raise InputError(
            f"{where}: include {str(unknown[0])[:80]!r} is not a shipped profile; write its entries into "
            "the file"
        )


def _read_histogram(path: Path) -> None:
    read_counts(path)


def _read_load(path: Path) -> None:
    read_log(path)


_READERS: Mapping[str, Callable[..., Any]] = {
    "scenario": lambda path: scenario_of(path.name),
    "model": read_model,
    "profile": _read_profile,
    "topology": import_topology,
    "histogram": _read_histogram,
    "load": _read_load,
}


def _checked_override(text: str) -> str:
    """One `key=value` with its values checked and tokens of uploads replaced by their paths."""
    key, value = split_key_value(text)
    if value is None:
        return text  # the loader says what is wrong with it
    if key == "name" or key.split(".")[-1] in _PROSE:
        return text
    place = key[:80]
    refuse_paths(value_of(text, f"override of {place}"), place)
    return f"{key}={TOKEN.sub(lambda found: str(path_of(found[0])), value)}"


def _with_paths(value: Any) -> Any:
    """Plain data with tokens of uploads replaced by their paths; prose keys stay unchanged."""
    if isinstance(value, str):
        return TOKEN.sub(lambda found: str(path_of(found[0])), value) if TOKEN.fullmatch(value) else value
    if isinstance(value, Mapping):
        return {key: inner if key in _PROSE else _with_paths(inner) for key, inner in value.items()}
    return [_with_paths(inner) for inner in value] if isinstance(value, list | tuple) else value


def refuse_paths(value: object, where: str) -> None:
    """Raise InputError at the first text that could be a file path and is not a token."""
    if isinstance(value, str):
        for part in value.split("=")[-1:] if where.endswith(".override") else [value]:
            _refuse_path(part, where)
    elif isinstance(value, Mapping) and where.split(".")[-1] == "profile":
        _check_includes(value, where)  # units and kernel names in a profile are not paths
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _PROSE and key != "edges" and (where, key) != ("scenario", "name"):
                refuse_paths(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_paths(inner, where)


def _refuse_path(text: str, where: str) -> None:
    if TOKEN.fullmatch(text.strip()):
        path_of(text.strip())
        return
    separated = "\\" in text or ("/" in text and not _QUANTITY.fullmatch(text))
    if separated or _FILE.search(text.strip()) or text.strip() in (".", "..", "~"):
        raise InputError(
            f"{where}={text[:80]!r} looks like the path of a file, and no file of the server is read; "
            "upload the file, or give a shipped name"
        )
