"""Takes the programs that a script starts out of their wrappers: env, srun, docker and bash -c."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading import shell_files
from moesim.simulator.trainers.reading.script_record import QUERIES, Command
from moesim.simulator.trainers.reading.shell_commands import NOT_RUN
from moesim.simulator.trainers.reading.shell_outputs import COMPUTED, cat, computed, tee
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable
from moesim.simulator.trainers.reading.shell_words import ASSIGNMENT
from moesim.simulator.trainers.reading.slurm import header_options
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from moesim.simulator.trainers.reading.shell_follower import ShellFollower

SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ash"])
PLAIN = frozenset(
    [
        "nohup",
        "exec",
        "time",
        "sudo",
        "command",
        "builtin",
        "nice",
        "ionice",
        "setsid",
        "stdbuf",
        "unbuffer",
        "timeout",
        "numactl",
        "taskset",
        "strace",
        "nsys",
        "ncu",
        "rocprof",
        "rocprofv3",
        "catchsegv",
        "env",
        "chrt",
    ]
)
CLUSTER = frozenset(
    [
        "srun",
        "salloc",
        "mpirun",
        "mpiexec",
        "docker",
        "podman",
        "singularity",
        "apptainer",
        "enroot",
        "kubectl",
        "ssh",
        "pdsh",
        "xargs",
    ]
)
INNER = re.compile(
    r"(?:.*/)?(?:bash|sh|zsh|torchrun|python[\d.]*|deepspeed|accelerate|env|nohup|numactl|nsys|ncu|timeout)"
    r"|exec|time"
    r"|.*\.(?:py|sh|slurm)"
)
_SILENT = frozenset(
    [
        "mkdir",
        "cp",
        "mv",
        "rm",
        "ln",
        "chmod",
        "touch",
        "export",
        "cd",
        "wait",
        "kill",
        "sleep",
        "date",
        "module",
        "conda",
        "git",
        "pip",
    ]
)


def start(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """Follow a program that the script would start, down to the one inside its wrappers."""
    name = PurePosixPath(words[0]).name if is_known(words[0]) else ""
    shell.depth += 1
    shell.budget.depth(shell.depth, shell.place)
    shell.scope.status, shell.presumed = None, name not in QUERIES
    if name in SHELLS:
        _shell(shell, words, wrappers)
    elif name == "sbatch":
        _sbatch(shell, words, wrappers)
    elif name == "env":
        _env(shell, words[1:], wrappers)
    elif name in PLAIN or name in CLUSTER:
        at = _inner(shell, words, name)
        if at is None:
            _record(shell, words, wrappers)
        else:
            wrappers = [*wrappers, tuple(words[:at])]
            if words[at] in shell.scope.functions or name in ("exec", "command", "builtin", "time"):
                shell.command(words[at:])
            else:
                start(shell, words[at:], wrappers)
    elif name == "cat":
        cat(shell, words[1:])
    elif name == "tee":
        tee(shell, words[1:])
    elif name in COMPUTED:
        computed(shell, name, words[1:])
    elif shell.scope.written(words[0]) is not None or words[0].endswith((".sh", ".slurm")):
        _script(shell, words, wrappers)
    else:
        _record(shell, words, wrappers)
    shell.depth -= 1


def _inner(shell: ShellFollower, words: list[str], name: str) -> int | None:
    """The position of the command inside a wrapper, or None where none can be told from its options."""
    for at in range(1, len(words)):
        word = words[at]
        known = is_known(word)
        if known and (INNER.fullmatch(word) or word in shell.scope.functions):
            flag = words[at - 1]
            if re.fullmatch(r".*\.(py|sh|slurm)", word) and flag.startswith("--") and "=" not in flag:
                continue
            return at
        if not known and re.search(r"\.(py|sh)$", word) and not words[at - 1].startswith("-"):
            return at
    if name in PLAIN:
        return next((n for n, word in enumerate(words[1:], start=1) if not word.startswith("-")), None)
    return None


def _env(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """`env NAME=value command`."""
    before: dict[str, ShellVariable | None] = {}
    while words:
        match = ASSIGNMENT.match(words[0])
        if match is not None:
            before.setdefault(match[1], shell.scope.variables.get(match[1]))
            shell.scope.set(match[1], words[0][match.end() :], export=True)
            words = words[1:]
        elif words[0] in ("-u", "--unset") and len(words) > 1:
            before.setdefault(words[1], shell.scope.variables.get(words[1]))
            shell.scope.set(words[1], None)
            words = words[2:]
        elif words[0].startswith("-"):
            words = words[1:]
        else:
            break
    if words:
        start(shell, words, wrappers)
    else:
        shell.write(shell.unknowns.mark(Unknown("env", NOT_RUN)))
    for name, variable in before.items():
        if variable is None:
            shell.scope.variables.pop(name, None)
        else:
            shell.scope.variables[name] = variable


def _shell(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """`bash -c TEXT`, `bash SCRIPT`, or `bash` that reads a here-document."""
    at = 1
    text = False
    while at < len(words) and words[at].startswith(("-", "+")) and words[at] != "--":
        if not words[at].startswith("--") and "c" in words[at]:
            text = True
        at += 2 if words[at] in ("-o", "+o", "-O", "--rcfile", "--init-file") else 1
    rest = words[at:]
    if text and rest:
        _inside(shell, rest[0], shell.source.file, shell.line, rest[1:], wrappers)
    elif rest:
        _script(shell, rest, wrappers)
    elif shell.stdin is not None and len(shell.stdin) > 0:
        _inside(shell, shell.stdin, shell.source.file, shell.line, [], wrappers)


def _inside(
    shell: ShellFollower,
    text: str,
    file: str,
    line: int,
    parameters: list[str],
    wrappers: list[tuple[str, ...]],
    *,
    named: bool = True,
    derived: bool = True,
) -> None:
    """Follow shell text as a program of its own, which sees the exported variables only."""
    outer = shell.scope
    inner = Scope({name: v for name, v in outer.variables.items() if v.exported}, files=outer.files)
    if named:  # the first word after `bash -c TEXT` is the name of the program
        inner.name, inner.parameters = (parameters[0] if parameters else "bash"), tuple(parameters[1:])
    else:
        inner.name, inner.parameters = file, tuple(parameters)
    inner.given = True
    shell.use(inner)
    stdin, shell.stdin = shell.stdin, None
    shell.outer_wrappers.append(wrappers)
    shell.run_text(text, file, line, derived=derived)
    shell.outer_wrappers.pop()
    shell.stdin = stdin
    outer.status = inner.status if inner.status is not False else None
    outer.files = shell.scope.files
    shell.use(outer)


def _script(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """`bash SCRIPT ...`: follow a script that the file wrote itself or that lies beside it."""
    name = words[0]
    written = shell.scope.written(name)
    if written is not None and is_known(written[0]):
        _inside(shell, written[0], shell.unknowns.shown(name), 1, words[1:], wrappers, named=False)
        return
    path = shell_files.beside(shell, name)
    if path is None:
        _record(shell, words, wrappers)
        return

    def follow(text: str) -> None:
        _headers(shell, text, path.name)
        _inside(shell, text, path.name, 1, words[1:], wrappers, named=False, derived=False)

    shell_files.read_file(shell, path, follow)


def _headers(shell: ShellFollower, text: str, file: str) -> None:
    shell.reading.headers += header_options(text, file)


def _sbatch(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """`sbatch [options] SCRIPT` or a here-document for sbatch."""
    at = 1
    while at < len(words) and (words[at].startswith("-") or (at > 1 and _takes_value(words[at - 1]))):
        if words[at].startswith("--export="):
            for pair in words[at][len("--export=") :].split(","):
                name, equals, value = pair.partition("=")
                if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                    shell.scope.set(name, value, export=True)
        at += 1
    wrappers = [*wrappers, tuple(words[:at])]
    if at < len(words):
        _script(shell, words[at:], wrappers)
    elif shell.stdin is not None:
        _headers(shell, shell.stdin, shell.source.file)
        _inside(shell, shell.stdin, shell.source.file, shell.line, [], wrappers)


def _takes_value(word: str) -> bool:
    return bool(re.fullmatch(r"-[A-Za-z]|--[a-z-]+", word)) and word not in (
        "-W",
        "--wait",
        "-H",
        "--hold",
        "--parsable",
    )


def _record(shell: ShellFollower, words: list[str], wrappers: list[tuple[str, ...]]) -> None:
    """Keep a program that is started, with the variables that it sees."""
    shell.write(shell.unknowns.mark(Unknown(" ".join(map(shell.unknowns.shown, words))[:100], NOT_RUN)))
    if words[0] in _SILENT:
        return
    outer = [wrapper for level in shell.outer_wrappers for wrapper in level]
    shell.budget.work(len(shell.scope.variables), shell.place)
    shell.reading.commands.append(
        Command(
            tuple(words),
            (*outer, *wrappers),
            {name: variable for name, variable in shell.scope.variables.items() if variable.exported},
            shell.scope.files,
            shell.source.file,
            shell.line,
            shell.last_line,
            "; ".join(shell.conditions[-3:]),
            len(shell.reading.followed),
        )
    )
