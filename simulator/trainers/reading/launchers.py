"""Tells launchers (torchrun, deepspeed, srun) from the program and its arguments, and counts its GPUs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from itertools import zip_longest
from pathlib import PurePosixPath

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown
from moesim.simulator.trainers.reading.configuration import entries_of_text
from moesim.simulator.trainers.reading.script import Command, Word
from moesim.simulator.trainers.reading.trainer_names import trainer_of

FILE = "data/trainers/launchers.yaml"


class _Launcher(Section):
    """Names and options of a launcher."""

    names: tuple[str, ...]
    nodes: str
    gpus: str = ""
    flags: tuple[str, ...]
    values: tuple[str, ...] | None = None


@lru_cache(maxsize=1)
def _launchers() -> dict[str, _Launcher]:
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    return {name: validate_model(_Launcher, data, FILE) for name, data in parse_mapping(text, FILE).items()}


def _launcher_named(name: str) -> str | None:
    """The launcher that a program or module is."""
    return next((launcher for launcher, known in _launchers().items() if name in known.names), None)


_PYTHON = re.compile(r"python[\d.]*")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub")
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
_SLURM = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
}
_ASKED = ("nodes", "ntasks-per-node", "gpus-per-node", "gres", "gpus")
_OTHER_WORK = re.compile(r"conver|parity|eval|generat|infer|process|check|export|test|bench_|download|import")
_FLAG = re.compile(r"--?[A-Za-z][\w.+-]*(\[[^\]=]*\])?(=.*)?", re.DOTALL)
_PAIR = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_OF_DEEPSPEED = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
_OF_CONFIGURATION = (
    *_OF_DEEPSPEED, "--job.config_file", "--job.config-file", "--config-file", "--config_file", "--config",
)  # fmt: skip


class Started(Struct):
    """A program and its words, what started it, and what the options before it say."""

    launcher: str | None
    program: Word
    words: list[Word]
    options: dict[str, Word] = field(default_factory=dict)
    wrappers: list[Word] = field(default_factory=list)


def started(command: Command) -> Started | None:
    """The program that a command starts with its arguments, or None for a command that is no launch."""
    words = list(command.words)
    for at, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        following = [one.text for one in words[at + 1 : at + 3]]
        found: Started | None = None
        if name in ("torchrun", "deepspeed", "ft_launcher"):
            found = _launched(str(_launcher_named(name)), words[at + 1 :])
        elif name == "accelerate" and following[:1] == ["launch"]:
            found = _launched("accelerate", words[at + 2 :])
        elif _PYTHON.fullmatch(name):
            found = _python(words[at + 1 :])
        elif name in ("bash", "sh") and following and following[0].endswith(_SCRIPTS):
            found = Started(None, words[at + 1], words[at + 2 :])
        elif word.text.endswith(".py") or (at == 0 and word.text.endswith(_SCRIPTS)):
            found = Started(None, word, words[at + 1 :])
        else:
            continue
        if found is not None:
            found.wrappers = words[:at]
        return found
    return None


def _python(words: list[Word]) -> Started | None:
    while words:
        text = words[0].text
        if text == "-m" and len(words) > 1:
            launcher = _launcher_named(words[1].text)
            return _launched(launcher, words[2:]) if launcher else Started(None, words[1], words[2:])
        if text == "-c" or (not words[1:] and text.startswith("-")):
            return None
        if text.startswith("-"):
            words = words[2:] if text in ("-X", "-W") else words[1:]
        elif re.search(r"(^|/)torch/distributed/(run|launch)\.py$", text):
            return _launched("torchrun", words[1:])
        else:
            return Started(None, words[0], words[1:])
    return None


def _launched(launcher: str, words: list[Word]) -> Started | None:
    """The program behind the options of a launcher; a value never begins with a dash."""
    options: dict[str, Word] = {}
    known = _launchers()[launcher]
    is_module = False
    at = 0
    while at < len(words):
        word = words[at]
        if not word.text.startswith("-"):
            break
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        at += 1
        if name in ("m", "module"):
            is_module = True
            break
        is_open = known.values is None or name.startswith("ft_")
        if not is_open and name not in (*(known.values or ()), *known.flags):
            raise InputError(
                f"{word.place}: {word.text[:60]} is no option of {launcher}, and its program comes later: a "
                "value before it is missing, or the program; write them out"
            )
        options[name] = Word(value, word.place)
        takes = not equals and name not in known.flags and at < len(words)
        if takes and not words[at].text.startswith("-"):
            options[name] = words[at]
            at += 1
    if at >= len(words):
        return None
    program, rest = words[at], words[at + 1 :]
    if not is_module and "no_python" not in options and not re.search(r"\.(py|sh)$", program.text):
        raise InputError(
            f"{program.place}: {launcher} starts {program.text[:60]!r}, which is no .py file: a value "
            "before it has a word too many, or none; write it out"
        )
    if "no_python" in options and _PYTHON.fullmatch(PurePosixPath(program.text).name):
        inner = _python(rest)
        if inner is not None:
            program, rest = inner.program, inner.words
    return Started(launcher, program, rest, options)


def chosen_launch(
    commands: Sequence[Command],
    name: str,
    headers: Sequence[tuple[dict[str, str], str]] = (),
    files: Mapping[str, str] | None = None,
    run: int | None = None,
) -> LaunchFile | None:
    """The launch of the training among commands, or None where none starts a training.

    `headers` are options of `#SBATCH` lines with their places, and `files` texts of configuration files by
    the name that an argument has for them. Raises InputError where several trainings are started and `run`
    names none of them, with the place of each.
    """
    found: list[tuple[Command, Started]] = []
    seen: set[tuple[str, ...]] = set()
    for command in commands:
        program = started(command)
        if program is None or _OTHER_WORK.search("/".join(PurePosixPath(program.program.text).parts[-2:])):
            continue
        options = sorted((name, word.text) for name, word in program.options.items() if name != "node_rank")
        key = (str(options), str(command.environment), program.program.text, *(w.text for w in program.words))
        is_script = program.program.text.endswith(_SCRIPTS)
        takes = any(_FLAG.fullmatch(word.text) or _PAIR.fullmatch(word.text) for word in program.words)
        if key not in seen and (takes or is_script):
            seen.add(key)
            found.append((command, program))
    if not found:
        return None
    found = [one for one in found if _trainer(one[1]) is not None] or found
    at = chosen_run(name, [f"{c.place} ({p.program.text[-40:]})" for c, p in found], run)
    command, program = found[at]
    arguments = arguments_of(program.words)
    for argument in arguments:
        if argument.name in _OF_CONFIGURATION and isinstance(argument.value, str):
            text = (files or {}).get(argument.value)
            if text is not None:
                entries = entries_of_text(text, argument.value)
                ours = argument.name in _OF_DEEPSPEED
                arguments = (*arguments, *entries) if ours else (*entries, *arguments)
                break
            if argument.name.startswith("--job.config"):
                raise InputError(
                    f"{argument.place}: {argument.name} {argument.value[:80]} decides the plan and is not "
                    "read from here; hand in that file, the configuration that torchtitan logs, or a capture"
                )
    notes: list[str] = []
    if program.program.text.endswith(_SCRIPTS):
        notes.append(f"{command.place}: {program.program.text} is a script of its own, which was not read")
    notes += [
        f"{c.place}: {p.program.text} is started as well; it is not the launch that was read"
        for n, (c, p) in enumerate(found)
        if n != at
    ]
    machine = machine_of(program, command.place, headers, notes)
    return LaunchFile(
        _trainer(program), program.program.text, arguments, machine, dict(command.environment), tuple(notes)
    )


def _trainer(program: Started) -> str | None:
    return trainer_of(program.program.text, arguments_of(program.words), program.launcher)


def chosen_run(name: str, places: Sequence[str], run: int | None) -> int:
    """The index of the run to read; raises InputError, naming all places, where it is not clear."""
    if run is None and len(places) == 1:
        return 0
    shown = "; ".join(f"--run {n}: {place}" for n, place in enumerate(places[:12], start=1))
    shown += f"; and {len(places) - 12} more" if len(places) > 12 else ""
    if run is None:
        raise InputError(f"{name} holds {len(places)} runs, so say which one: {shown}")
    if not 1 <= run <= len(places):
        raise InputError(f"--run {run}: {name} holds {len(places)}: {shown}")
    return run - 1


def arguments_of(words: Sequence[Word]) -> tuple[Argument, ...]:
    """The arguments of a program from its words, in order.

    A flag takes the words up to the next flag: `--flag` alone has the value None, several words are a tuple.
    `key=value` words are arguments of their own. Words before the first flag have the name "".
    """
    pairs: list[tuple[str, list[str], str]] = []
    is_open = False
    for word in words:
        text = word.text
        pair = _PAIR.fullmatch(text)
        if _FLAG.fullmatch(text) and not re.fullmatch(r"-[eE]\d+", text):
            name, equals, value = text.partition("=")
            pairs.append((name, [value] if equals else [], word.place))
            is_open = not equals
        elif pair is not None:
            pairs.append((("~" if pair[1] == "~" else "") + pair[2], [pair[3]], word.place))
            is_open = False
        elif is_open and text != "--":
            pairs[-1][1].append(text)
        elif text == "--" or re.fullmatch(r"~[A-Za-z_][\w.@/-]*", text):
            pairs.append((text, [], word.place))
            is_open = False
        else:
            pairs.append(("", [text], word.place))
    return tuple(
        Argument(name, None if not values else values[0] if len(values) == 1 else tuple(values), place)
        for name, values, place in pairs
    )


# -- machine -----------------------------------------------------------------------------------------


def header_options(text: str, file: str) -> list[tuple[dict[str, str], str]]:
    """The `#SBATCH` options of a batch script before its first command, each with its place."""
    options: list[tuple[dict[str, str], str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#SBATCH"):
            words = re.split(r"\s#", stripped[len("#SBATCH") :])[0]
            try:
                parts = shlex.split(words)
            except ValueError:
                parts = words.split()
            options.append((asked(parts), f"{file}, line {number}"))
        elif stripped and not stripped.startswith("#"):
            break
    return options


def asked(words: Sequence[str]) -> dict[str, str]:
    """What the words of srun or a header ask for, by the long name of each option."""
    found: dict[str, str] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in _ASKED:
                found[name] = value if equals else following
        elif len(word) > 1 and word[0] == "-" and word[1] in _SHORT:
            found[_SHORT[word[1]]] = word[2:].removeprefix("=") or following
        elif word.lstrip("-") in ("npernode", "ppn"):
            found["ntasks-per-node"] = following
        elif match := re.fullmatch(r"ppr:(\d+):node(:.*)?", word):
            found["ntasks-per-node"] = match[1]
    return found


def slurm_variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm sets for a batch script with these options."""
    numbers = {key: text for key, text in options.items() if key == "gpus-per-node" or text.isdigit()}
    return {variable: numbers[key] for variable, key in _SLURM.items() if key in numbers}


def _gpus_of(options: Mapping[str, str]) -> str | None:
    if "gpus-per-node" in options:
        return options["gpus-per-node"].rsplit(":", 1)[-1]
    match = re.search(r"gpu(?::[\w.-]+)?:([^,()]+)|gpu$", options.get("gres", ""))
    if match:
        return match[1] or "1"
    return options["gpus"].rsplit(":", 1)[-1] if options.get("nodes") == "1" and "gpus" in options else None


def machine_of(
    program: Started,
    place: str,
    headers: Sequence[tuple[dict[str, str], str]],
    notes: list[str],
) -> Machine:
    """The nodes and GPUs of a node that launcher, wrappers and headers ask for; the innermost one counts."""
    nodes: list[tuple[str, str]] = []
    gpus: list[tuple[str, str]] = []
    launcher, options = program.launcher, program.options
    if launcher is not None:
        known = _launchers()[launcher]
        for counts, option in ((nodes, known.nodes), (gpus, known.gpus)):
            if option in options:
                counts.append((options[option].text, options[option].place))
        total = options["num_processes"].text if "num_processes" in options else ""
        count = options["num_machines"].text if "num_machines" in options else "1"
        if launcher == "accelerate" and total.isdigit() and count.isdigit() and int(count) and len(total) < 8:
            gpus.append((str(int(total) // int(count)), place))
    tasks: list[tuple[str, str]] = []
    wrapper = (asked([word.text for word in program.wrappers]), place)
    for wanted, where in [wrapper, *reversed(headers)]:
        nodes += [(wanted["nodes"], where)] if "nodes" in wanted else []
        per_node = _gpus_of(wanted)
        gpus += [(per_node, where)] if per_node is not None else []
        tasks += [(wanted["ntasks-per-node"], where)] if "ntasks-per-node" in wanted else []
    gpus += tasks if launcher is None else []
    if not nodes and launcher in ("torchrun", "deepspeed") and gpus and "hostfile" not in options:
        nodes.append(("1", f"{place}, where {launcher} starts one node by default"))
    places: dict[str, str] = {}
    first: dict[str, int | Unknown] = {}
    for name, candidates in (("nodes", nodes), ("gpus_per_node", gpus)):
        for text, at in candidates:
            is_whole = re.fullmatch(r"\d{1,7}", text)
            number = int(text) if is_whole else Unknown(text, f"{name} is not a whole number")
            taken = first.setdefault(name, number)
            places.setdefault(name, at)
            if isinstance(number, int) and isinstance(taken, int) and number != taken:
                notes.append(f"{name} is {taken} at {places[name]}, but {number} at {at}; the first is taken")
    return Machine(first.get("nodes"), first.get("gpus_per_node"), places)
