"""Reads what trainers print of their own arguments: Megatron-LM, torchtitan, DeepSpeed, Bridge, W&B."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Value
from moesim.simulator.trainers.reading.configuration import YamlLines, flattened, plain
from moesim.simulator.trainers.reading.launchers import chosen_run

FILE = "data/trainers/megatron-dump.yaml"

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FIRST = re.compile(r"^(?P<before>.*?)-{10,} ?arguments ?-{10,}\s*$")
_LAST = re.compile(r"-{10,} ?end of arguments ?-{10,}\s*$")
_ENTRY = re.compile(r"  (\w+) \.* ?(.*)")
_VOCABULARY = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d{1,9})\)")
_TITAN = re.compile(r"Running with (?:configs|args): (?=\{)")
_DEEPSPEED = re.compile(r"\bjson = (?=\{)")
_BRIDGE = re.compile(r"^(?P<before>.*?)_target_: ([\w.]*megatron\.bridge[\w.]*ConfigContainer)\s*$")
_WORLD = re.compile(r"\bworld_size \.+ (\d{1,8})\s*$")
_MEMBER = re.compile(r"<\w+\.(\w+): [^<>]*>|\b[A-Z]\w+\.(\w+)\b")
MOST_VALUE = 10_000
"""Most characters of a value whose parts are looked at."""
MOST_MARK = 1000
"""Most characters of a line that begins or ends the arguments."""
_LONG = ("torchtitan", "deepspeed")
"""Trainers whose configuration may begin in a longer line."""
MOST_OBJECT_LINES = 5000
"""Most lines of a configuration inside a log."""
FORMATS = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
NEEDED = ("tensor_model_parallel_size", "num_layers", "micro_batch_size", "seq_length", "world_size")
"""Arguments without which a dump of Megatron-LM was cut."""


class _Names(Section):
    """The keys of the data file."""

    opposite: dict[str, str]
    named: dict[str, str]
    derived: Annotated[dict[str, str | None], Field(default_factory=dict)]
    defaults: dict[str, tuple[str, ...]]
    copies: dict[str, str]


@lru_cache(maxsize=1)
def _names() -> _Names:
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    return validate_model(_Names, parse_mapping(text, FILE), FILE)


class _Found(Struct, frozen=True):
    """A run in a log: its trainer, the number of its first line, and what reads it."""

    trainer: str
    line: int
    read: Callable[[], LaunchFile]


def printed_launch(text: str, file: str, run: int | None = None) -> LaunchFile | None:
    """The launch of a log in which a trainer printed its arguments; None for text without any.

    Raises InputError, with the line, for arguments that were cut, and for several runs in one log where
    `run` names none of them.
    """
    lines = _COLOURS.sub("", text).split("\n")
    found: list[_Found] = []
    for number, line in enumerate(lines):
        for trainer, pattern, reader in _READERS:
            match = pattern.search(line) if trainer in _LONG or len(line) <= MOST_MARK else None
            if match is not None:
                found.append(_Found(trainer, number, partial(reader, lines, number, match, file)))
    runs = [one for one in found if one.trainer != "deepspeed"] or found
    if not runs:
        return None
    places = [f"{file}, line {one.line + 1} ({one.trainer})" for one in runs]
    at = chosen_run(file, places, run)
    launch = runs[at].read()
    if runs[at].trainer == "megatron-lm":
        end = runs[at + 1].line if at + 1 < len(runs) else len(lines)
        # The tokenizer prints the vocabulary after the arguments.
        later = [(n, m) for n in range(runs[at].line, end) if (m := _VOCABULARY.search(lines[n]))]
        if later and not any(one.name == "--padded-vocab-size" for one in launch.arguments):
            number, padded = later[0]
            one = Argument("--padded-vocab-size", padded[1], f"{file}, line {number + 1}")
            launch = replace(launch, arguments=(*launch.arguments, one))
        engines = [one for one in found if one.trainer == "deepspeed" and runs[at].line < one.line < end]
        if engines:
            launch = replace(launch, arguments=(*launch.arguments, *engines[-1].read().arguments))
    return launch


# -- Megatron-LM -------------------------------------------------------------------------------------


def _megatron(lines: Sequence[str], first: int, match: re.Match[str], file: str) -> LaunchFile:
    """The dump that `megatron/training/arguments.py` prints between two lines of dashes."""
    before = match["before"]
    entries: dict[str, tuple[str, str]] = {}
    for number in range(first + 1, len(lines)):
        line, place = lines[number], f"{file}, line {number + 1}"
        if len(line) <= MOST_MARK and _LAST.search(line):
            break
        if len(line) <= MOST_MARK and _FIRST.search(line):
            raise _cut(f"{place}: a second dump begins before the one of line {first + 1} ends")
        entry = _ENTRY.fullmatch(line.removeprefix(before).rstrip())
        if entry is None:
            raise _cut(f"{place}: {line.strip()[:60]!r} stands among the arguments and is none")
        entries[entry[1]] = (entry[2], place)
    else:
        raise _cut(f"{file}, line {len(lines)}: the arguments that begin in line {first + 1} do not end")
    missing = [name for name in NEEDED if name not in entries]
    if missing:
        raise _cut(f"{file}, line {first + 1}: the arguments have no {missing[0]}")
    return _of_megatron(entries, f"{file}, line {first + 1}")


def _cut(what: str) -> InputError:
    return InputError(
        f"{what}, so the dump was cut or mixed with other output; give the log of rank 0 as it was printed"
    )


def _of_megatron(entries: Mapping[str, tuple[Any, str]], place: str) -> LaunchFile:
    """The launch of all arguments of Megatron-LM by their names in its code, as in a dump or in W&B."""
    names, (_, known) = _names(), _flags()
    arguments: list[Argument] = []
    counts = {"None or False": 0, "at a default that changes nothing": 0, "derived from others": 0}
    for name, (written, where) in entries.items():
        text = str(written)
        flag = names.named.get(name, name.replace("_", "-"))
        is_copy = name in names.copies and text == str(entries.get(names.copies[name], ("",))[0])
        if is_copy or (name in names.derived and names.derived[name] in (None, text)):
            counts["derived from others"] += 1
        elif name in names.opposite:
            if text == "False":
                arguments.append(Argument(f"--{names.opposite[name]}", None, where))
            else:
                counts["at a default that changes nothing"] += 1
        elif text in ("None", "False") and flag in known:
            counts["None or False"] += 1
        elif text in names.defaults.get(flag, ()):
            counts["at a default that changes nothing"] += 1
        else:
            arguments.append(Argument(f"--{flag}", _value(written), where))
    notes = tuple(f"{place}: {count} arguments are {what}" for what, count in counts.items() if count)
    world = entries.get("world_size", ("", ""))
    environment = {"WORLD_SIZE": str(world[0])} if str(world[0]).isdigit() else {}
    return LaunchFile("megatron-lm", None, tuple(arguments), Machine(), environment, notes)


@lru_cache(maxsize=1)
def _flags() -> tuple[frozenset[str], frozenset[str]]:
    """The arguments of Megatron-LM that decide a plan, and all that are known."""
    text = (resources.files("moesim.simulator") / "data/trainers/megatron-arguments.yaml").read_text("utf-8")
    data = parse_mapping(text, "megatron-arguments.yaml")
    groups = [group for kind in ("irrelevant", "not_priced", "refused") for group in data[kind].values()]
    used = frozenset(data["used"])
    return used, used.union(*(group["arguments"] for group in groups))


def _value(written: Any) -> Value:
    """A value as a command line has it: members of enumerations and formats of PyTorch by their names."""
    if written is True or str(written) == "True":
        return None
    if isinstance(written, list | tuple):
        return tuple(item if isinstance(item, int) else _value(item) or "" for item in written)
    text = str(written)
    if len(text) > MOST_VALUE:
        return text
    if text in FORMATS:
        return FORMATS[text]
    text = _MEMBER.sub(lambda match: match[1] or match[2], text) if re.search(r"[A-Z<]\w*\.", text) else text
    if re.fullmatch(r"\[[^()*+]*\]", text):
        words = re.findall(r"[^\s,\[\]'\"]+", text)
        return tuple(int(word) if re.fullmatch(r"-?\d{1,9}", word) else word for word in words)
    return text


# -- torchtitan, DeepSpeed, Megatron-Bridge ------------------------------------------------------------


def _titan(lines: Sequence[str], first: int, match: re.Match[str], file: str) -> LaunchFile:
    """The configuration that torchtitan logs: JSON since 0.2.1, a dictionary of Python before."""
    return LaunchFile("torchtitan", None, _object(lines, first, match.end(), file, "torchtitan"))


def _deepspeed(lines: Sequence[str], first: int, match: re.Match[str], file: str) -> LaunchFile:
    """The JSON that DeepSpeed logs when its engine starts, and the number of its processes."""
    entries = _object(lines, first, match.end(), file, "DeepSpeed")
    environment: dict[str, str] = {}
    for line in reversed(lines[max(0, first - 200) : first]):
        if world := _WORLD.search(line):
            environment["WORLD_SIZE"] = world[1]
            break
    return LaunchFile("deepspeed", None, entries, Machine(), environment)


def _object(lines: Sequence[str], first: int, at: int, file: str, trainer: str) -> tuple[Argument, ...]:
    """The entries of the JSON object, or of the dictionary of Python, that begins at a place of a log."""
    prefix = re.match(r"\s*(?:\[?\w*\d+\]?: ?)?", lines[first])
    before = prefix[0] if prefix else ""
    rest = [line.removeprefix(before) for line in lines[first + 1 : first + MOST_OBJECT_LINES]]
    text = "\n".join([lines[first][at:], *rest])
    try:
        data, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        try:
            data = ast.literal_eval(lines[first][at:].strip()[: MOST_OBJECT_LINES * 40])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            data = None
    if not isinstance(data, dict) or not data:
        raise InputError(
            f"{file}, line {first + 1}: the configuration of {trainer} does not end, or is mixed with other "
            "output; give the log of one rank as it was printed, or the configuration as a file"
        )
    return flattened(data, YamlLines(text, file, first))


def _bridge(lines: Sequence[str], first: int, match: re.Match[str], file: str) -> LaunchFile:
    """The ConfigContainer that Megatron-Bridge prints as YAML."""
    before = match["before"]
    end = first
    while (
        end < min(len(lines), first + MOST_OBJECT_LINES)
        and lines[end].startswith(before)
        and lines[end].strip() != before.strip()
    ):
        if not re.match(r"[ -]|[A-Za-z_]\w*:", lines[end].removeprefix(before)):
            break
        end += 1
    text = "\n".join(line.removeprefix(before) for line in lines[first:end])
    return bridge_container(parse_mapping(text, file), text, file, first)


def bridge_container(data: Mapping[str, Any], text: str, file: str, above: int = 0) -> LaunchFile:
    """The launch of a ConfigContainer of Megatron-Bridge; `above` counts the lines before it in the file.

    Raises InputError where sections are missing, because the output was cut.
    """
    missing = [name for name in ("ddp", "model", "optimizer", "train") if name not in data]
    if missing:
        raise _cut(f"{file}, line {above + 1}: the configuration has no {missing[0]}")
    lines = YamlLines(text, file, above)
    entries = flattened(_named_objects(data), lines)
    late = [one for one in entries if one.name.startswith(_APPLIED_LATE) and one.value is not None]
    early = [one for one in entries if not one.name.startswith(_APPLIED_LATE)]
    kept = [_of_core(one) for one in (*early, *late) if not one.name.endswith("_target_")]
    arguments = tuple(one for one in kept if one is not None)
    note = f"{file}, line {above + 1}: {len(kept) - len(arguments)} fields are off or at a default"
    return LaunchFile("megatron-bridge", None, arguments, notes=(note,))


_APPLIED_LATE = ("mixed_precision.", "comm_overlap.")
"""Sections whose values Bridge copies over those of the others when it starts (training/setup.py)."""


def _of_core(argument: Argument) -> Argument | None:
    """A field of Megatron-Core by its flag where the names differ; None where it is off or at its default."""
    section, _, name = argument.name.partition(".")
    if section not in ("model", "ddp", "optimizer") or "." in name:
        return argument
    names, value = _names(), argument.value
    flag = names.named.get(name, name.replace("_", "-"))
    if name in names.opposite:
        return replace(argument, name=f"--{names.opposite[name]}", value=None) if value is False else None
    used, known = _flags()
    is_off = value in (None, False, "", ()) and flag in known and flag not in used
    if is_off or str(value) in names.defaults.get(flag, ()):
        return None
    if name in names.named and name != "fp8":
        return replace(argument, name=f"--{flag}") if value not in (None, False) else None
    return argument


def _named_objects(value: Any) -> Any:
    """Objects of Python, which Bridge writes as `_target_`, by their names."""
    if isinstance(value, list):
        return [_named_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_name_" in value:
        return str(value["_name_"])
    if set(value) <= {"_target_", "_call_"} and "_target_" in value:
        return FORMATS.get(str(value["_target_"]), str(value["_target_"]))
    return {key: _named_objects(item) for key, item in value.items()}


# -- W&B ---------------------------------------------------------------------------------------------


def wandb_values(data: Mapping[str, Any], text: str, file: str) -> tuple[dict[str, Any], LaunchFile | None]:
    """The values of a `config.yaml` of W&B, and the launch where they are the arguments of Megatron-LM.

    Raises InputError for an entry without `value`.
    """
    lines = YamlLines(text, file)
    values: dict[str, Any] = {}
    for key, entry in data.items():
        if key in ("wandb_version", "_wandb"):
            continue
        if not isinstance(entry, dict) or "value" not in entry:
            raise InputError(
                f"{lines(str(key))}: {str(key)[:60]!r} has no `value`, as every entry of W&B has"
            )
        values[str(key)] = entry["value"]
    if all(name in values for name in NEEDED):
        return values, _of_megatron({k: (plain(v), lines(k)) for k, v in values.items()}, file)
    return values, None


_READERS = (
    ("megatron-lm", _FIRST, _megatron),
    ("torchtitan", _TITAN, _titan),
    ("deepspeed", _DEEPSPEED, _deepspeed),
    ("megatron-bridge", _BRIDGE, _bridge),
)
