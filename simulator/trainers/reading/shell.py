"""Reads a shell script that starts a training, as bash would understand it, without running any of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine
from moesim.simulator.trainers.reading import slurm
from moesim.simulator.trainers.reading.arguments import arguments_of
from moesim.simulator.trainers.reading.flatten import flattened
from moesim.simulator.trainers.reading.launchers import Started, machine_of, started
from moesim.simulator.trainers.reading.limits import MOST_BYTES, Budget
from moesim.simulator.trainers.reading.script_record import Command, ScriptRecord
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable
from moesim.simulator.trainers.reading.shell_statements import Statements
from moesim.simulator.trainers.reading.shell_syntax import check_text
from moesim.simulator.trainers.reading.trainer_names import trainer_of
from moesim.simulator.trainers.reading.unknowns import MARK, Unknowns, is_known

_MOST_NOTES = 100
_TRAINING = re.compile(r"train|finetune|recipe|sft")
_OTHER_WORK = re.compile(r"conver|parity|eval|generat|infer|process|check|export|test|bench_|download|import")
_UNQUOTED = re.compile(r'(?<!["\w])(\ue000[\d\ue000\ue001]*\ue001)(?!["\w])')
"""Marks of unknown values that stand in JSON text without quotes."""
_CONFIGURED = re.compile(r"config|deepspeed|job")


def read_shell(path: Path, environment: Mapping[str, str], parameters: Sequence[str] = ()) -> LaunchFile:
    """The launch of a shell script, with its `environment` and its positional `parameters`.

    Raises InputError for a file that cannot be read or parsed, that exceeds the limits, or that starts no
    program with arguments.
    """
    text = check_text(read_text(path, MOST_BYTES, "launch script", strict=False), str(path))
    return read_shell_text(text, path.name, path.parent, environment, parameters)


def read_shell_text(
    text: str,
    file: str,
    folder: Path | None,
    environment: Mapping[str, str],
    parameters: Sequence[str] = (),
) -> LaunchFile:
    """The launch of a shell text, whose messages call it `file`; scripts that it calls lie in `folder`."""
    reading = ScriptRecord(Budget(file))
    given = {name: ShellVariable(value, exported=True) for name, value in environment.items()}
    scope = Scope(dict(given), file, tuple(parameters), bool(parameters))
    shell = Statements(reading, scope, folder)
    shell.following += [folder / file] if folder is not None else []
    reading.headers += slurm.header_options(text, file)
    if reading.headers:
        asked: dict[str, str] = {}
        for option, _ in reading.headers:
            asked |= slurm.asked(slurm.header_words(option))
        for name, value in slurm.slurm_variables(asked).items():
            scope.variables.setdefault(name, ShellVariable(value, exported=True))
            given.setdefault(name, ShellVariable(value, exported=True))
    try:
        shell.run_text(text, file, 1)
    except RecursionError:
        raise InputError(f"{file}: nested too deeply; write the arguments out") from None
    return _launch(reading, given, file, shell.scope)


def _launch(reading: ScriptRecord, given: Mapping[str, ShellVariable], file: str, scope: Scope) -> LaunchFile:
    candidates: list[tuple[Command, Started, tuple[Argument, ...]]] = []
    seen = set()
    for command in reading.commands:
        program = started(command, reading.unknowns)
        key = (command.words, command.condition, str(command.environment))
        if program is not None and key not in seen and len(candidates) < 200:
            seen.add(key)
            candidates.append((command, program, arguments_of(program.words, command, reading)))
    started_scripts = [
        one for one in candidates if one[1].program.endswith(".sh") and _set_variables(one[0], given)
    ]
    if not any(arguments for _, _, arguments in candidates) and started_scripts:
        candidates = started_scripts[-1:]
    elif not any(arguments for _, _, arguments in candidates):
        return _variables_only(reading, given, file, scope)
    best = max(range(len(candidates)), key=lambda n: _rank(*candidates[n][1:], -n))
    command, program, arguments = candidates[best]
    machine = machine_of(command, program, reading)
    name = _name(program, reading.unknowns)
    arguments += _written_configuration(program, command, reading)
    environment = {
        key: reading.unknowns.value(_text(variable))
        for key, variable in _set_variables(command, given).items()
    }
    if name.endswith((".sh", ".slurm")):
        reading.notes[f"{command.place}: {name} is a script of its own, which was not read"] = None
    notes = list(reading.notes)
    if command.condition:
        notes.insert(
            0, f"{command.place}: {name} is started only where {reading.unknowns.shown(command.condition)}"
        )
    notes += _others(candidates, best, reading.unknowns)
    notes += [
        f"{place}: #SBATCH {text} is not read" for text, place in reading.headers if not _is_machine(text)
    ]
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"{len(notes) - _MOST_NOTES} more notes are left out"]
    shown = tuple(MARK.sub("...", note) for note in notes)
    launcher = program.launcher
    trainer = trainer_of(name, arguments, launcher)
    return LaunchFile(trainer, name, arguments, machine, environment, shown)


def _variables_only(
    reading: ScriptRecord, given: Mapping[str, ShellVariable], file: str, scope: Scope
) -> LaunchFile:
    """The launch of a file that only sets variables with arguments, such as a model's configuration."""
    if scope.stopped == "exit":
        raise InputError(
            f"{scope.left_at}: the script ends here with exit and starts no training before; give the "
            "variables and parameters with which it goes on"
        )
    command = Command((), (), {}, {}, file, 1, 1, "", len(reading.followed))
    words: list[str] = []
    names: list[str] = []
    for name, variable in scope.variables.items():
        if given.get(name) == variable or variable.value is None or isinstance(variable.value, dict):
            continue
        value = variable.value
        parts = list(value) if isinstance(value, tuple) else value.split()
        if any(part.startswith("--") for part in parts) and " ".join(parts) not in " ".join(words):
            if words and " ".join(words) in " ".join(parts):
                words, names = [], []
            words += parts
            names.append(name)
    if not words:
        raise InputError(
            f"{file}: starts no program with arguments (torchrun, deepspeed, accelerate, python, a .py or "
            ".sh file) and sets no variable with arguments; give the script that starts the training"
        )
    arguments = arguments_of(words, command, reading)
    note = f"{file} starts no training; the arguments of its variables {', '.join(names)} were read"
    environment = {
        key: reading.unknowns.value(_text(variable))
        for key, variable in scope.variables.items()
        if variable.exported and given.get(key) != variable
    }
    notes = tuple(MARK.sub("...", text) for text in [note, *list(reading.notes)[:_MOST_NOTES]])
    return LaunchFile(trainer_of("", arguments), None, arguments, Machine(), environment, notes)


def _set_variables(command: Command, given: Mapping[str, ShellVariable]) -> dict[str, ShellVariable]:
    """The variables that a program sees and the file sets."""
    return {key: variable for key, variable in command.environment.items() if given.get(key) != variable}


def _rank(program: Started, arguments: tuple[Argument, ...], earlier: int) -> tuple[int, int, int]:
    name = "/".join(PurePosixPath(program.program).parts[-2:])
    flags = sum(bool(argument.name) for argument in arguments)
    likely = 2 * bool(_TRAINING.search(name)) + bool(program.launcher) - 2 * bool(_OTHER_WORK.search(name))
    return (-9 if program.is_guess or not flags else likely, flags, earlier)


def _name(program: Started, unknowns: Unknowns) -> str:
    return unknowns.shown(program.program)


def _text(variable: ShellVariable) -> str:
    value = variable.value
    if isinstance(value, str):
        return value
    return " ".join(value.values() if isinstance(value, dict) else value or ())


def _is_machine(text: str) -> bool:
    return bool(slurm.asked(slurm.header_words(text)))


def _others(
    candidates: list[tuple[Command, Started, tuple[Argument, ...]]], best: int, unknowns: Unknowns
) -> list[str]:
    """Sentences on the launches that were not taken."""
    notes = []
    for n, (command, program, arguments) in enumerate(candidates):
        if n != best and arguments:
            only = f", only where {unknowns.shown(command.condition)}" if command.condition else ""
            notes.append(
                f"{command.place}: {_name(program, unknowns)} is started as well, with {len(arguments)} "
                f"arguments{only}; it is not the launch that was read"
            )
    return notes


def _written_configuration(program: Started, command: Command, reading: ScriptRecord) -> tuple[Argument, ...]:
    """The entries of a JSON or YAML file that the script writes itself and gives to the program."""
    words = [*program.words]
    for n, word in enumerate(words):
        name = word.partition("=")[2] if word.startswith("-") and "=" in word else word
        flag = word if "=" in word else words[n - 1] if n else ""
        if name.removeprefix("./") in command.files and _CONFIGURED.search(flag):
            text, place = command.files[name.removeprefix("./")]
            return _entries(text, name, place, reading)
    return ()


def _entries(text: str, name: str, place: str, reading: ScriptRecord) -> tuple[Argument, ...]:
    kind = "x.json" if text.lstrip().startswith("{") else "x.yaml"
    quoted = (
        re.sub(r'(?<!["\w])(\ue000[\d\ue000\ue001]*\ue001)(?!["\w])', r'"\1"', text)
        if kind == "x.json"
        else text
    )
    try:
        data = parse_mapping(quoted, kind)
    except InputError as error:
        reading.notes[
            f"{place}: the text that is written to {reading.unknowns.shown(name)} was not read ({error})"
        ] = None
        return ()
    written = reading.unknowns.shown(name)
    entries = flattened(data, lambda _: f"{place} (written to {written})")
    return tuple(
        replace(entry, value=reading.unknowns.value(entry.value))
        if isinstance(entry.value, str) and not is_known(entry.value)
        else entry
        for entry in entries
    )
