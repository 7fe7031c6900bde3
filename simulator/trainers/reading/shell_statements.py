"""Follows the statements of a shell script, running nothing, and collects what it would start."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading import shell_commands, shell_flow
from moesim.simulator.trainers.reading.script_record import ScriptRecord
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber
from moesim.simulator.trainers.reading.shell_branches import merged_scope
from moesim.simulator.trainers.reading.shell_builtins import BUILTINS
from moesim.simulator.trainers.reading.shell_conditions import ShellConditions
from moesim.simulator.trainers.reading.shell_expansion import Expander
from moesim.simulator.trainers.reading.shell_programs import start
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable
from moesim.simulator.trainers.reading.shell_syntax import ShellSource, parse
from moesim.simulator.trainers.reading.shell_words import ASSIGNMENT, ShellTextError, scan
from moesim.simulator.trainers.reading.unknowns import is_known

if TYPE_CHECKING:
    from tree_sitter import Node

_COMMAND_END = re.compile(r"(?:[ \t]|\\\n)*(?:\Z|[\n;&|)}#`]|\d*[<>]|-[ \t]*<<)|(?:[ \t]|\\\n)+in\b")
_SIMPLE = frozenset(
    ["command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"]
)


class Statements:
    """Follows statements in a scope; every method may raise InputError for text beyond the limits."""

    def __init__(self, reading: ScriptRecord, scope: Scope, folder: Path | None) -> None:
        """Takes what collects the results, the variables, and the folder of the script."""
        self.reading, self.folder = reading, folder
        self.unknowns, self.budget, self.notes = reading.unknowns, reading.budget, reading.notes
        self.scope = scope
        self.expander = Expander(scope, self.unknowns, self.budget, self._substitute, self.notes)
        self.source = ShellSource(b"", reading.budget.file, 1)
        self.conditions: list[str] = []
        self.output: list[str] | None = None
        self.stdin: str | None = None
        self.line = self.last_line = 1
        self.depth = 0
        self.presumed = False  # whether the last command is a program that counts as successful in a list
        self.following: list[Path] = []
        self.outer_wrappers: list[list[tuple[str, ...]]] = []
        self._locals: list[dict[str, ShellVariable | None]] = []

    @property
    def place(self) -> str:
        """File and line of the statement that is being followed."""
        return f"{self.source.file}, line {self.line}"

    def use(self, scope: Scope) -> None:
        """Go on in another scope, whose variables were copied or merged."""
        self.budget.work(len(scope.variables), self.place)
        self.scope = self.expander.scope = scope

    # -- texts ---------------------------------------------------------------------------------------

    def run_text(self, text: str, file: str, line: int, *, derived: bool = False) -> None:
        """Follow a whole shell text, which stands in `file` from `line` on or, `derived`, was made there."""
        self.depth += 1
        self.budget.depth(self.depth, self.place)
        before = self.source, self.line, self.last_line
        try:
            self.source, root = parse(text, file, self.unknowns, line, derived=derived)
            self.block(root.children)
        except ShellTextError as error:
            raise InputError(f"{self.place}: {error}") from None
        self.source, self.line, self.last_line = before
        self.depth -= 1

    def block(self, nodes: Sequence[Node]) -> None:
        """Follow statements one after the other until one of them leaves."""
        for node in nodes:
            if self.scope.stopped:
                return
            if node.is_named and node.type != "comment":
                self.statement(node)

    def statement(self, node: Node) -> None:
        """Follow one statement."""
        self.depth += 1
        self.line, self.last_line = self.source.lines(node)
        self.budget.step(self.place)
        self.presumed = False
        self.budget.depth(self.depth, self.place)
        kind = node.type
        text = self.source.text(node)
        if kind in _SIMPLE:
            self._check_end(node)
            self.simple(text)
        elif kind == "test_command" or (kind == "compound_statement" and text.startswith("((")):
            self.scope.status = self.tested(text)
        elif kind in shell_flow.HANDLERS:
            shell_flow.HANDLERS[kind](self, node)
        else:
            raise InputError(
                f"{self.place}: the shell construct {kind.replace('_', ' ')!r} is not read; leave it out"
            )
        self.depth -= 1

    def _check_end(self, node: Node) -> None:
        """Check that the tree gives a whole command: a word that it leaves out would be lost in silence."""
        after = self.source.data[node.end_byte : node.end_byte + 400].decode(errors="replace")
        if not _COMMAND_END.match(after):
            near = after.strip().splitlines()[0][:60]
            raise InputError(
                f"{self.place}: the words of this command cannot be told apart near {near!r}; put the "
                "words in quotes"
            )

    # -- conditions ----------------------------------------------------------------------------------

    def tested(self, text: str) -> bool | None:
        """The result of `[ ]`, `[[ ]]` or `(( ))`, noting what was assumed for it."""
        conditions = ShellConditions(self.expander)
        if text.startswith("(("):
            result = conditions.arithmetic(text[2:-2])
        elif text.startswith("[["):
            result = conditions.bracket(text[2:-2])
        else:
            words = [field for raw in scan(text[1:-1]).words for field in self.expander.fields(raw)]
            result = self.tested_words(conditions, words)
        self.assumed = conditions.assumed + (["the script has no parameters"] if self._counts(text) else [])
        return result

    def tested_words(self, conditions: ShellConditions, words: list[str]) -> bool | None:
        """The result of `[ words ]`; one that the shell refuses counts as false, which is noted."""
        try:
            return conditions.test(words)
        except ShellTextError as error:  # the shell reports it and goes on; the condition counts as false
            self.notes[f"{self.place}: {error} and counts as false"] = None
            return False

    def _counts(self, text: str) -> bool:
        return not self.scope.given and bool(re.search(r"\$#|\$\{#\}|\$\{#[@*]\}|\$[@*]", text))

    assumed: list[str] = []  # noqa: RUF012 - replaced, never changed in place

    def status_of(self, nodes: Sequence[Node]) -> tuple[bool | None, list[str]]:
        """The result of the statements of a condition, and what was assumed for it."""
        self.assumed = []
        self.scope.status = None
        self.block(nodes)
        return self.scope.status, self.assumed

    def either(self, condition: str, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Follow two branches of a condition that is not decided, and merge what they leave."""
        base = self.scope
        states = []
        for branch, text in ((first, condition), (second, f"not {condition}")):
            self.use(base.copy())
            self.conditions.append(text)
            branch()
            self.conditions.pop()
            states.append(self.scope)
        self.use(merged_scope(states[0], states[1], condition, self.unknowns))
        if bool(states[0].stopped) != bool(states[1].stopped):
            ended = states[0].stopped or states[1].stopped
            self.notes[f"{condition}: the branch that ends with {ended} is left out"] = None

    # -- simple commands -----------------------------------------------------------------------------

    def simple(self, text: str) -> None:
        """Follow assignments, a declaration or a command."""
        self.budget.work(len(text), self.place)
        if not self.source.derived:
            self.reading.followed.append((self.source.file, self.line, text))
        scanned = scan(text)
        self.redirected(scanned.redirects, lambda: self._words(list(scanned.words)))
        if scanned.rest.strip():
            first = scanned.rest.strip().splitlines()[0]
            if not first.startswith("#"):
                self.notes[
                    f"{self.place}: a comment or empty line ends the command, so {first[:60]!r} is not "
                    "part of it"
                ] = None
            line = self.line + text[: len(text) - len(scanned.rest)].count("\n")
            self.run_text(scanned.rest, self.source.file, line, derived=self.source.derived)

    def _words(self, raws: list[str]) -> None:
        prefix: list[str] = []
        while raws and ASSIGNMENT.match(raws[0]):
            prefix.append(raws.pop(0))
        if not raws:
            self.scope.status = True
            for raw in prefix:
                shell_commands.assign(self, raw)
            return
        if raws[0] in shell_commands.DECLARATIONS:
            shell_commands.declare(self, raws[0], raws[1:])
            self.scope.status = True
            return
        if raws[0] == "let":
            self.scope.status = self._let([self.expander.text(raw) for raw in raws[1:]])
            return
        words = [field for raw in raws for field in self.expander.fields(raw)]
        self.budget.words(len(words), self.place)
        if not words:
            self.scope.status = True
            return
        if not prefix:
            self.command(words)
            return
        before = {
            match[1]: self.scope.variables.get(match[1]) for raw in prefix if (match := ASSIGNMENT.match(raw))
        }
        for raw in prefix:
            shell_commands.assign(self, raw, export=True)
        self.command(words)
        for name, variable in before.items():
            if variable is None:
                self.scope.variables.pop(name, None)
            else:
                self.scope.variables[name] = variable

    def _let(self, expressions: list[str]) -> bool | None:
        value = 0
        for expression in expressions:
            try:
                if not is_known(expression):
                    raise UnknownNumber(expression)
                value = self.expander.integer(expression)
            except UnknownNumber:
                self.expander.spoil(expression)
                return None
        return value != 0

    def command(self, words: list[str]) -> None:
        """Follow a command whose words are expanded: a function, a command of the shell, or a program."""
        name = words[0]
        if name in self.scope.functions:
            self.call(name, words[1:])
        elif name in BUILTINS:
            BUILTINS[name](self, words[1:])
        else:
            start(self, words, [])

    def call(self, name: str, parameters: list[str]) -> None:
        """Call a function of the script."""
        source, body = self.scope.functions[name]
        self.depth += 1
        self.budget.depth(self.depth, self.place)
        before = self.source, self.line, self.last_line
        kept = self.scope.parameters, self.scope.given
        self.scope.parameters, self.scope.given = tuple(parameters), True
        self.source = source
        self._locals.append({})
        self.scope.status = True
        self.statement(body)
        if self.scope.stopped == "return":
            self.scope.stopped = ""
        for variable, value in self._locals.pop().items():
            if value is None:
                self.scope.variables.pop(variable, None)
            else:
                self.scope.variables[variable] = value
        self.scope.parameters, self.scope.given = kept
        self.source, self.line, self.last_line = before
        self.depth -= 1

    def localise(self, name: str) -> None:
        """Restore a variable when the function that is being followed returns."""
        if self._locals:
            self._locals[-1].setdefault(name, self.scope.variables.get(name))

    def subshell(self, action: Callable[[], None]) -> None:
        """Follow an action whose changes of variables end with it."""
        outer = self.scope
        self.use(outer.copy())
        action()
        outer.status, outer.files = self.scope.status, self.scope.files
        self.use(outer)

    # -- input and output ----------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Add text to the output where it is captured."""
        if self.output is not None:
            self.output.append(text)
            self.budget.text(sum(map(len, self.output[-50:])), "output")

    def captured(self, action: Callable[[], None]) -> str:
        """The output of an action."""
        before, self.output = self.output, []
        action()
        text, self.output = "".join(self.output), before
        self.budget.text(len(text), "output")
        return text

    def redirected(self, redirects: Sequence[tuple[str, str]], action: Callable[[], None]) -> None:
        """Follow an action with its input and output redirected."""
        before = self.stdin
        target = None
        for operator, raw in redirects:
            if operator == "<<<":
                self.stdin = self.expander.text(raw) + "\n"
            elif operator in ("<", "0<"):
                name = self.expander.text(raw)
                written = self.scope.written(name)
                self.stdin = None if written is None else written[0]
            elif operator in (">", ">>", "1>", "1>>", ">|"):
                target = (operator.endswith(">>"), self.expander.text(raw))
        if target is None:
            action()
        else:
            text = self.captured(action)
            more, name = target
            old = (self.scope.written(name) or ("", ""))[0] if more else ""
            self.scope.write_file(name, old + text, self.place)
        self.stdin = before

    def _substitute(self, text: str) -> str:
        """The output of the command of `$( )`."""
        stripped = text.strip()
        if stripped.startswith("<") and not stripped.startswith("<("):
            return self.unknowns.mark(
                Unknown(f"$({stripped})", "the text of another file, which is not read")
            )
        self.depth += 1
        self.budget.depth(self.depth, self.place)
        commands = len(self.reading.commands)
        before = self.line, self.last_line
        try:
            output = self.captured(
                lambda: self.subshell(lambda: self.run_text(text, self.source.file, self.line, derived=True))
            )
        except InputError as error:
            if "limit" in str(error):
                raise
            output = self.unknowns.mark(Unknown(f"$({stripped})", shell_commands.NOT_RUN))
        del self.reading.commands[commands:]  # a command whose output is read is not the training
        self.line, self.last_line = before
        self.depth -= 1
        if not is_known(output):
            return self.unknowns.mark(Unknown(f"$({stripped[:120]})", self.unknowns.reason(output)))
        return output.rstrip("\n")
