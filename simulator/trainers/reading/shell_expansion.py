"""Expands raw words of the shell into fields: quotes, substitutions, word splitting and braces."""

from __future__ import annotations

import re

from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.shell_arithmetic import UnknownNumber, arithmetic
from moesim.simulator.trainers.reading.shell_braces import braces
from moesim.simulator.trainers.reading.shell_parameters import parameter
from moesim.simulator.trainers.reading.shell_scope import Scope, Substitution
from moesim.simulator.trainers.reading.shell_word_parts import WordPart
from moesim.simulator.trainers.reading.shell_words import (
    ShellTextError,
    skip_dollar,
    skip_parentheses,
    skip_piece,
)
from moesim.simulator.trainers.reading.unknowns import Unknowns, is_known

_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
}
_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)",
    re.ASCII,
)
SPACES = " \t\n"


class Expander:
    """Expands words in a scope; `substitute` gives the output of commands, `notes` gets what was assumed."""

    def __init__(
        self,
        scope: Scope,
        unknowns: Unknowns,
        budget: Budget,
        substitute: Substitution,
        notes: dict[str, None],
    ) -> None:
        """Takes the scope, and what collects unknown values, work, output and notes."""
        self.scope, self.unknowns, self.budget = scope, unknowns, budget
        self.substitute, self.notes = substitute, notes
        self.depth = 0

    def fields(self, raw: str) -> list[str]:
        """The words that one raw word becomes."""
        words: list[str] = []
        for one in braces(raw):
            words += self._assembled(self.pieces(one))
        for word in words:
            self.budget.text(len(word), raw)
        return words

    def text(self, raw: str) -> str:
        """The text of a raw word that is not split, as in an assignment."""
        parts = self.pieces(raw)
        text = "".join(" " if part.between else part.text for part in parts)
        self.budget.text(len(text), raw)
        return text

    def within(self, body: str) -> str:
        """The text of a here-document or an arithmetic expression, where quotes are plain characters."""
        text = "".join(" " if p.between else p.text for p in self.quoted(body, document=True))
        self.budget.text(len(text), body[:40])
        return text

    def pattern(self, raw: str) -> list[tuple[str, bool]]:
        """The pieces of a pattern, each with whether it was quoted."""
        return [(part.text, part.quoted) for part in self.pieces(raw)]

    def pieces(self, raw: str) -> list[WordPart]:
        """The parts of a raw word, expanded but not split."""
        self.depth += 1
        self.budget.depth(self.depth, self.budget.file)
        parts: list[WordPart] = []
        at = 0
        while at < len(raw):
            char = raw[at]
            end = skip_piece(raw, at)
            if char == "\\":
                escaped = raw[at + 1 : end]
                if escaped != "\n":
                    parts.append(WordPart(escaped or "\\", quoted=bool(escaped)))
            elif char == "'":
                parts.append(WordPart(raw[at + 1 : end - 1], quoted=True))
            elif char == '"':
                parts += self.quoted(raw[at + 1 : end - 1]) or ()
            elif raw.startswith(('$"',), at):
                at, end = at + 1, skip_piece(raw, at + 1)
                parts += self.quoted(raw[at + 1 : end - 1])
            elif raw.startswith("$'", at):
                parts.append(WordPart(_unescaped(raw[at + 2 : end - 1]), quoted=True))
            elif char in "$`":
                parts += self._expansion(raw[at:end], quoted=False)
            elif raw.startswith(("<(", ">("), at):
                end = skip_parentheses(raw, at + 1)
                parts.append(
                    WordPart(self._unknown(raw[at:end], "the output of a command, which is never run"))
                )
            elif char == "~" and at == 0 and raw[1:2] in ("", "/"):
                home = self.scope.text("HOME")
                parts.append(
                    WordPart(
                        home if home is not None else self._unknown("~", "the variable HOME is not set"), True
                    )
                )
            else:
                parts.append(WordPart(char))
            at = end
        self.depth -= 1
        return parts

    def quoted(self, body: str, *, document: bool = False) -> list[WordPart]:
        """The parts of text between double quotes; empty quotes are one empty part."""
        parts: list[WordPart] = []
        at = plain = 0
        while at < len(body):
            char = body[at]
            if char == "\\" and at + 1 < len(body):
                if body[at + 1] in ("$`\\\n" if document else '$`"\\\n'):
                    parts.append(WordPart(body[plain:at] + body[at + 1].replace("\n", ""), quoted=True))
                    plain = at + 2
                at += 2
            elif char in "$`":
                end = skip_dollar(body, at, quoted=True) if char == "$" else skip_piece(body, at)
                if end == at + 1:
                    at = end
                    continue
                parts.append(WordPart(body[plain:at], quoted=True))
                parts += self._expansion(body[at:end], quoted=True)
                at = plain = end
            else:
                at += 1
        parts.append(WordPart(body[plain:], quoted=True))
        some = [part for part in parts if part.text or part.between or part.expanded]
        array = any(part.between for part in some) or re.fullmatch(r"\$(@|\{(@|\w+\[@\])[^}]*\})", body)
        return some if some or array else [WordPart("", quoted=True)]

    def _expansion(self, raw: str, *, quoted: bool) -> list[WordPart]:
        """The parts of one `$...` or backtick substitution."""
        if raw == "$":
            return [WordPart("$", quoted=quoted)]
        if (raw.startswith("$((") and raw.endswith("))")) or raw.startswith("$["):
            inner = raw[3:-2] if raw.startswith("$((") else raw[2:-1]
            return [WordPart(self.number(inner, raw), quoted, True)]
        if raw.startswith("$("):
            return [WordPart(self.substitute(raw[2:-1]), quoted, True)]
        if raw.startswith("`"):
            command = re.sub(r"\\([$`\\])", r"\1", raw[1:-1])
            return [WordPart(self.substitute(command), quoted, True)]
        return parameter(self, raw[2:-1] if raw.startswith("${") else raw[1:], raw, quoted)

    def number(self, expression: str, shown: str) -> str:
        """The value of an arithmetic expression as text, or the mark of an unknown one."""
        text = self.within(expression)
        if not is_known(text):
            self.spoil(text)
            return self._unknown(self.unknowns.shown(shown), self.unknowns.reason(text))
        try:
            return str(self.integer(text))
        except UnknownNumber as error:
            name = str(error)
            self.spoil(text)
            value = self.scope.text(name)
            reason = f"the variable {name} is not set" if value is None else self.unknowns.reason(value)
            return self._unknown(self.unknowns.shown(shown), reason)
        except ShellTextError as error:
            return self._unknown(self.unknowns.shown(shown), str(error))

    def integer(self, expression: str) -> int:
        """The value of an arithmetic expression; raises UnknownNumber where it has none."""
        return arithmetic(expression, self._number_text, lambda name, value: self.scope.set(name, str(value)))

    def spoil(self, expression: str) -> None:
        """Make the variables unknown that an expression assigns, where it has no value itself."""
        reason = "it is computed from a value that is not known"
        for match in _ASSIGNED.finditer(expression):
            name = match[1] or match[2] or match[3]
            shown = self.unknowns.shown(f"$(({expression.strip()}))")
            self.scope.set(name, self._unknown(shown[:200], reason))

    def count(self, work: int) -> None:
        """Count the work of a pattern; raises InputError beyond the limit."""
        self.budget.work(work, self.budget.file)

    def _number_text(self, name: str) -> str | None:
        self.count(50)  # reading a number in a variable takes as long as so many steps of a pattern
        variable = self.scope.variables.get(name)
        if variable is not None and variable.value is None:
            return "0"
        text = self.scope.text(name)
        return text if text is None or is_known(text) else None

    def _unknown(self, text: str, reason: str) -> str:
        return self.unknowns.mark(Unknown(text, reason))

    def separator(self) -> str:
        """The characters that split unquoted text."""
        ifs = self.scope.text("IFS")
        return SPACES if ifs is None or not is_known(ifs) else ifs

    def _assembled(self, parts: list[WordPart]) -> list[str]:
        """The fields of a word's parts, unquoted expansions split."""
        words: list[str] = []
        current: str | None = None
        separator = self.separator()
        for part in parts:
            if part.between:
                if current is not None:
                    words.append(current)
                current = None
            elif part.quoted or not part.expanded:
                current = (current or "") + part.text
            else:
                split, opens, closes = split_fields(part.text, separator)
                if opens and current is not None:
                    words.append(current)
                    current = None
                for n, field in enumerate(split):
                    if n:
                        words.append(current or "")
                        current = None
                    current = (current or "") + field
                if closes and current is not None and split:
                    words.append(current)
                    current = None
            self.budget.words(len(words), self.budget.file)
        return words if current is None else [*words, current]


def split_fields(text: str, separator: str) -> tuple[list[str], bool, bool]:
    """The fields of unquoted text, and whether separators stand before the first and after the last one."""
    blank = "".join(char for char in separator if char in SPACES)
    other = "".join(char for char in separator if char not in SPACES)
    if not separator or not text:
        return ([text] if text else []), False, False
    opens = text[0] in blank
    stripped = text.strip(blank) if blank else text
    if not stripped:
        return [], True, True
    closes = text[-1] in blank or stripped[-1] in other
    if not other:
        return re.split(f"[{re.escape(blank)}]+", stripped), opens, closes
    around = f"[{re.escape(blank)}]*" if blank else ""
    rule = f"{around}[{re.escape(other)}]{around}" + (f"|[{re.escape(blank)}]+" if blank else "")
    fields = re.split(rule, stripped)
    return (fields[:-1] if not fields[-1] else fields), opens, closes


def _unescaped(text: str) -> str:
    """The text of `$'...'`."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x":
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, "\\" + code)

    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|.)", one, text, flags=re.DOTALL)
