"""Reads scripts whose arguments are literal words and plain `NAME=value`; refuses whatever needs a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError

REMEDY = (
    "let the shell run it with the stand-ins of --capture, or hand in the arguments that the trainer prints"
)
MOST_PIECES = 1_000_000
"""Most pieces of text of all words whose variables are filled in."""
MOST_NESTED = 5
"""Most levels of `bash -c` and of `${NAME:-${OTHER}}`."""

_PLAIN = re.compile(r"[^\s'\"\\$`;&|<>()#]+")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*|\d|@", re.ASCII)
_BRACED = re.compile(r"([A-Za-z_]\w*|\d{1,2}|@)(?:\[([@*])\])?(?:(:?-)(.*))?", re.ASCII | re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_BLOCKS = {
    "if": "a condition", "case": "a condition", "for": "a loop", "while": "a loop", "until": "a loop",
    "select": "a loop", "function": "a function", "{": "a block", "[[": "a condition", "[": "a condition",
    "test": "a condition", "source": "another file", ".": "another file", "eval": "eval", "shift": "shift",
    "read": "read", "alias": "an alias", "mapfile": "mapfile", "readarray": "readarray",
    "getopts": "getopts", "exit": "the end of the script",
}  # fmt: skip
_DECLARE = ("export", "declare", "readonly", "typeset", "local")


class ScriptPiece(Struct, frozen=True):
    """A text that stands on one line; `problem` says why it has no value."""

    text: str
    line: int
    problem: str = ""


Text = tuple[ScriptPiece, ...]


class Word(Struct, frozen=True):
    """A word of a command and the place where it is written."""

    text: str
    place: str


class Command(Struct, frozen=True):
    """A command of a script: its words, and the variables that it sees and the script sets."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    place: str


class _WordPart(Struct):
    """A part of a word as it is written: a text, a variable or an array."""

    kind: str  # "text", "variable", "array" or "problem"
    text: str
    line: int
    quoted: bool
    default: list[_WordPart] | None = None


class _Statement(Struct):
    """Words as they are written, the arrays that are assigned, and the operator behind them."""

    line: int
    words: list[list[_WordPart]] = field(default_factory=list)
    arrays: dict[int, list[list[_WordPart]]] = field(default_factory=dict)
    end: str = "\n"
    before: str = "\n"


class _HereDocumentError(Exception):
    """Raised at a here-document; its text is the place."""


class _Lexer:
    """Cuts a script into statements; what only a shell can evaluate becomes a problem with its line."""

    def __init__(self, text: str, file: str, line: int = 1, depth: int = 0) -> None:
        self.text, self.file, self.line, self.depth, self.at = text, file, line, depth, 0

    def statements(self) -> Iterator[_Statement]:
        """The statements up to the end of the text."""
        before = "\n"
        while self.at < len(self.text):
            statement = _Statement(self.line, before=before)
            self._words(statement, statement.words, "\n")
            before = statement.end
            if statement.words:
                yield statement
            elif before == "(":
                yield _Statement(statement.line, [[_WordPart("text", "{", statement.line, False)]])

    def _words(self, statement: _Statement, words: list[list[_WordPart]], stop: str) -> None:
        """Read words up to an operator, or up to `)` where `stop` is one."""
        word: list[_WordPart] | None = None
        while self.at < len(self.text):
            char, start = self.text[self.at], self.at
            if self.text.startswith("\\\n", start):
                self._step(2)
                continue
            if char in " \t\r" or (char == "\n" and stop == ")"):
                self._step(1)
                word = None
                continue
            if char == "#" and word is None:
                end = self.text.find("\n", start)
                self.at = len(self.text) if end < 0 else end
                continue
            if char == stop == ")":
                self._step(1)
                return
            if char in "\n;&|<>()" and not (char in "<>" and self._redirected(statement, word)):
                if char == "(" and word is not None and self._array(statement, words, word):
                    word = None
                    continue
                operator = re.match(r"&&|\|\||;;|\|&|.", self.text[start : start + 2], re.DOTALL)
                statement.end = operator[0] if operator else char
                self._step(len(statement.end))
                return
            if char in "<>":
                word = None
                continue
            if word is None:
                if not words:
                    statement.line = self.line
                word = []
                words.append(word)
            self._part(word)
        if stop == ")":
            raise InputError(f"{self.file}, line {statement.line}: a parenthesis is not closed; close it")

    def _redirected(self, statement: _Statement, word: list[_WordPart] | None) -> bool:
        """Pass over a redirection, whose file is no argument; a here-document is a problem."""
        if self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
            raise _HereDocumentError(f"{self.file}, line {self.line}")
        if self.text[self.at + 1 : self.at + 2] == "(":
            return False
        if re.match(r"<[^<&]", self.text[self.at : self.at + 2]):
            statement.words.append(
                [_WordPart("problem", self.text[self.at : self.at + 20].split("\n")[0], self.line, False)]
            )
        if word and statement.words and word is statement.words[-1] and _plain(word).isdigit():
            statement.words.pop()
        self._step(1)
        match = re.compile(r"[<>&|]*[ \t]*").match(self.text, self.at)
        self._step(len(match[0]) if match else 0)
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|<>()":
            self._part([])
        return True

    def _array(self, statement: _Statement, words: list[list[_WordPart]], word: list[_WordPart]) -> bool:
        if len(word) != 1 or not _ASSIGNMENT.fullmatch(word[0].text) or words is not statement.words:
            return False
        self._step(1)
        items: list[list[_WordPart]] = []
        self._words(statement, items, ")")
        statement.arrays[len(words) - 1] = items
        return True

    def _part(self, word: list[_WordPart]) -> None:
        """Read the next part of a word."""
        char, line = self.text[self.at], self.line
        if char == "'":
            word.append(_WordPart("text", self._until("'"), line, True))
        elif char == '"':
            self._step(1)
            word.append(_WordPart("text", "", line, True))
            self._quoted(word)
        elif char == "\\":
            word.append(_WordPart("text", self.text[self.at + 1 : self.at + 2], line, True))
            self._step(2)
        elif char in "$`":
            self._dollar(word, quoted=False)
        else:
            match = _PLAIN.match(self.text, self.at) or re.compile(r"[#()<>]").match(self.text, self.at)
            text = match[0] if match else char
            self._step(len(text))
            problem = _expands(text) and (word or not _ASSIGNMENT.match(text))
            word.append(_WordPart("problem" if problem else "text", text, line, False))

    def _quoted(self, word: list[_WordPart]) -> None:
        """Read the inside of double quotes."""
        first = self.line
        while self.at < len(self.text):
            char, line = self.text[self.at], self.line
            if char == '"':
                self._step(1)
                return
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`\n'):
                following = self.text[self.at + 1]
                word.append(_WordPart("text", "" if following == "\n" else following, line, True))
                self._step(2)
            elif char in "$`":
                self._dollar(word, quoted=True)
            else:
                match = re.compile(r"\n|[^\"\\$`\n]+|\\").match(self.text, self.at)
                text = match[0] if match else char
                word.append(_WordPart("text", text, line, True))
                self._step(len(text))
        raise InputError(f"{self.file}, line {first}: a double quote is not closed; close it")

    def _dollar(self, word: list[_WordPart], quoted: bool) -> None:
        """Read a variable, or pass over what only a shell can evaluate."""
        line, start = self.line, self.at
        name = _VARIABLE.match(self.text, start + 1) if self.text[start] == "$" else None
        if name is not None:
            self._step(1 + len(name[0]))
            word.append(_WordPart("array" if name[0] == "@" else "variable", name[0], line, quoted))
        elif self.text[start] == "`":
            word.append(_WordPart("problem", f"`{self._until('`')}`", line, quoted))
        elif self.text.startswith("${", start):
            self._balanced("{", "}")
            word.append(self._braced(self.text[start + 2 : self.at - 1], line, quoted))
        elif self.text.startswith("$(", start):
            self._balanced("(", ")")
            word.append(_WordPart("problem", self.text[start : self.at], line, quoted))
        elif re.match(r"\$['\"?$!#*-]", self.text[start : start + 2]) and not (
            quoted and self.text[start + 1 : start + 2] == '"'
        ):
            self._step(2)
            word.append(_WordPart("problem", self.text[start : start + 2], line, quoted))
        else:
            self._step(1)
            word.append(_WordPart("text", "$", line, quoted))

    def _braced(self, body: str, line: int, quoted: bool) -> _WordPart:
        match = _BRACED.fullmatch(body)
        if match is None or (match[2] and match[3]) or self.depth >= MOST_NESTED:
            return _WordPart("problem", f"${{{body}}}", line, quoted)
        if match[2] or match[1] == "@":
            return _WordPart("array", match[1], line, quoted)
        default: list[_WordPart] | None = None
        if match[3]:
            inner = _Lexer(match[4], self.file, line, self.depth + 1)
            default = []
            while inner.at < len(inner.text):
                if inner.text[inner.at] in " \t\n;&|<>()#":
                    default.append(_WordPart("text", inner.text[inner.at], inner.line, quoted))
                    inner._step(1)
                else:
                    inner._part(default)
        return _WordPart("variable", match[1], line, quoted, default)

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise InputError(f"{self.file}, line {self.line}: {quote} is not closed; close it")
        text = self.text[self.at + 1 : end]
        self._step(end + 1 - self.at)
        return text

    def _balanced(self, opening: str, closing: str) -> None:
        level, first = 0, self.line
        special = re.compile(rf"[\\'{re.escape(opening + closing)}]")
        while (match := special.search(self.text, self.at)) is not None:
            char = match[0]
            self._step(match.start() - self.at)
            if char == "'" and opening == "(":
                self._until("'")
                continue
            level += (char == opening) - (char == closing)
            self._step(2 if char == "\\" else 1)
            if level == 0 and char == closing:
                return
        raise InputError(f"{self.file}, line {first}: {opening!r} is not closed; close it")

    def _step(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count


class Script:
    """Follows the plain statements of a script; `commands` are its programs, `stopped` where it ended."""

    def __init__(
        self, file: str, variables: Mapping[str, str], parameters: Sequence[str] = (), depth: int = 0
    ) -> None:
        """Takes the name of the file, the variables of the environment and the parameters `$1`, `$2`, ..."""
        self.file, self.depth = file, depth
        self.given = dict(variables)
        self.values: dict[str, list[Text]] = {
            name: [(ScriptPiece(value, 0),)] for name, value in variables.items()
        }
        self.values |= {str(n): [(ScriptPiece(value, 0),)] for n, value in enumerate(parameters, start=1)}
        self.values["@"] = [(ScriptPiece(value, 0),) for value in parameters]
        self.exported: set[str] = set(variables)
        self.commands: list[Command] = []
        self.stopped = ""
        self._left = MOST_PIECES

    def follow(self, text: str, line: int = 1) -> None:
        """Follow a text up to its end or to the first statement that needs a shell."""
        try:
            for statement in _Lexer(text, self.file, line).statements():
                what = self._stops(statement)
                if what:
                    first = _plain(statement.words[0])
                    self.stopped = f"{self.file}, line {statement.line}: {what} ({first[:40]})"
                    return
                self._statement(statement)
        except RecursionError:
            raise InputError(f"{self.file}: nested too deeply; {REMEDY}") from None
        except _HereDocumentError as error:
            self.stopped = f"{error}: a here-document (<<)"

    def _stops(self, statement: _Statement) -> str:
        """What makes a statement one that only a shell can follow, or ""."""
        first = _plain(statement.words[0])
        if statement.before == "||":
            return "" if first in ("true", "echo", ":") else "a command behind ||"
        if statement.end == "(":
            return "a function or subshell"
        if first == "set" and any(_plain(word) == "--" for word in statement.words):
            return "set --"
        return _BLOCKS.get(first, "")

    def words_of(self, name: str) -> list[tuple[str, str]]:
        """The words of a variable, split at blanks, each with its place."""
        pieces = _spaced(self.values[name])
        words = [tuple(word) for word in _split(pieces)]
        return [(self._text(word), f"{self.file}, line {_line(word, 1)}") for word in words]

    def _statement(self, statement: _Statement) -> None:
        words = list(enumerate(statement.words))
        declares = _plain(words[0][1]) in _DECLARE
        exports = declares and _plain(words[0][1]) == "export"
        prefix: dict[str, str] = {}
        at = 1 if declares else 0
        while at < len(words):
            number, word = words[at]
            match = _ASSIGNMENT.match(word[0].text) if word[0].kind == "text" and not word[0].quoted else None
            if match is None:
                if not declares:
                    break
                if exports and _NAME.fullmatch(_plain(word)):
                    self.exported.add(_plain(word))
                at += 1
                continue
            value = [_WordPart("text", word[0].text[match.end() :], word[0].line, False), *word[1:]]
            if number in statement.arrays:
                texts = [text for item in statement.arrays[number] for text in self._expanded(item)]
            else:
                texts = [self._joined(value)]
            old = self.values.get(match[1], []) if match[2] else []
            self._count(sum(map(len, old)), statement.line)
            if match[2] and number not in statement.arrays:
                texts = [(*(old[0] if old else ()), *texts[0])]
            elif match[2]:
                texts = [*old, *texts]
            at += 1
            if declares or (at >= len(words) and not prefix):
                self.values[match[1]] = texts
                if exports or match[1] in self.given:
                    self.exported.add(match[1])
            elif at < len(words) or prefix:
                prefix[match[1]] = self._text(texts[0]) if texts else ""
                if at >= len(words):
                    for name, text in prefix.items():
                        self.values[name] = [(ScriptPiece(text, statement.line),)]
        if at < len(words) and not declares:
            self._command(statement, [word for _, word in words[at:]], prefix)

    def _command(self, statement: _Statement, words: list[list[_WordPart]], prefix: dict[str, str]) -> None:
        expanded = [text for word in words for text in self._expanded(word)]
        place = f"{self.file}, line {statement.line}"
        name = _shown(expanded[0]) if expanded else ""
        if not is_program(name) and not any(is_program(_shown(text)) for text in expanded):
            return
        self._count(sum(len(text) for name in self.exported for text in self.values.get(name, ())), 0)
        environment = {
            name: text
            for name in sorted(self.exported)
            if name in self.values
            and self.values[name]
            and not any(piece.problem for piece in self.values[name][0])
            and (text := _shown(self.values[name][0])) != self.given.get(name)
        } | prefix
        plain = tuple(
            Word(self._text(text), f"{self.file}, line {_line(text, statement.line)}") for text in expanded
        )
        self.commands += inner_commands(Command(plain, environment, place), self.file, self.given, self.depth)

    def _joined(self, word: list[_WordPart]) -> Text:
        """The text of an assignment, which is not split into words."""
        return tuple(piece for part in word for texts in [self._of(part)] for piece in _spaced(texts))

    def _expanded(self, word: list[_WordPart]) -> list[Text]:
        """The words that one word becomes: unquoted variables are split at blanks, arrays are several."""
        done: list[list[ScriptPiece]] = []
        is_open = False
        for part in word:
            texts = self._of(part)
            if part.quoted and part.kind != "array":
                groups = [list(_spaced(texts))]
                first_joins = last_joins = True
            elif part.kind == "text" or part.kind == "problem":
                groups, first_joins, last_joins = [list(_spaced(texts))], True, True
            elif part.quoted:
                groups, first_joins, last_joins = [list(text) for text in texts], True, True
            else:
                flat = _spaced(texts)
                groups = _split(flat)
                raw = "".join(piece.text or "x" for piece in flat)
                first_joins, last_joins = not raw[:1].isspace(), not raw[-1:].isspace()
            for n, group in enumerate(groups):
                if n == 0 and is_open and first_joins:
                    done[-1] += group
                else:
                    done.append(group)
            is_open = is_open if not groups else last_joins
        return [tuple(text) for text in done]

    def _of(self, part: _WordPart) -> list[Text]:
        """The texts that a part stands for: several for an array."""
        self._left -= 1
        if part.kind == "text":
            return [(ScriptPiece(part.text, part.line),)]
        if part.kind == "problem":
            return [(ScriptPiece(part.text, part.line, _why(part.text)),)]
        texts = self.values.get(part.text)
        if part.kind == "array" and texts is not None:
            chosen = texts
        elif texts and not (part.default is not None and not _shown(texts[0])):
            chosen = texts[:1]
        elif part.default is not None:
            chosen = [self._joined(part.default)]
        elif texts is not None:
            chosen = [()]
        else:
            problem = (
                f"the script takes its parameter ${part.text}, so give --parameter"
                if part.text.isdigit() or part.text == "@"
                else f"the variable {part.text} is not set by plain text; give --env {part.text}=VALUE"
            )
            return [(ScriptPiece(f"${part.text}", part.line, problem),)]
        self._count(sum(map(len, chosen)), part.line)
        return [tuple(p if p.line else ScriptPiece(p.text, part.line) for p in text) for text in chosen]

    def _count(self, pieces: int, line: int) -> None:
        """Count the pieces that are looked at; raises InputError beyond the limit."""
        self._left -= pieces
        if self._left < 0:
            raise InputError(
                f"{self.file}, line {line}: all variables together have more than {MOST_PIECES:,} parts; "
                "write the arguments out"
            )

    def _text(self, text: Text) -> str:
        """A text whose every piece has a value; raises InputError with line and remedy else."""
        for piece in text:
            if piece.problem:
                raise InputError(
                    f"{self.file}, line {piece.line}: {piece.text[:80]}: {piece.problem}; {REMEDY}"
                )
        return _shown(text)


_FIRST_TASK = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
"""Variables that srun sets for the first of the tasks that it starts."""


def inner_commands(command: Command, file: str, given: Mapping[str, str], depth: int = 0) -> list[Command]:
    """The commands of a `bash -c TEXT` in a command, each with the wrappers before; else the command."""
    texts = [word.text for word in command.words]
    for at, text in enumerate(texts[:-1]):
        options = texts[at + 1 : at + 3]
        if text.rpartition("/")[2] in ("bash", "sh") and options and re.fullmatch(r"-\w*c", options[0]):
            if depth >= MOST_NESTED:
                raise InputError(f"{command.place}: more than {MOST_NESTED} levels of bash -c; {REMEDY}")
            inner = Script(file, {**_FIRST_TASK, **given, **command.environment}, (), depth + 1)
            line = re.search(r"line (\d+)$", command.place)
            inner.follow(options[-1], int(line[1]) if line else 1)
            if not inner.commands:
                raise InputError(
                    f"{command.place}: {text} -c starts no program that can be read"
                    + (f"; it ends at {inner.stopped}" if inner.stopped else "")
                    + f"; {REMEDY}"
                )
            before = command.words[:at]
            return [
                Command((*before, *one.words), {**command.environment, **one.environment}, command.place)
                for one in inner.commands
            ]
    return [command]


_PROGRAM = re.compile(
    r"(.*/)?(torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|ft_launcher|python[\d.]*|bash|sh)|.*\.(py|sh|slurm|sbatch|sub)"
)


def is_program(word: str) -> bool:
    """Whether a word names a launcher, an interpreter, a Python program or a script."""
    return bool(_PROGRAM.fullmatch(word))


def _plain(word: list[_WordPart]) -> str:
    return "".join(part.text for part in word if part.kind == "text")


def _shown(text: Text) -> str:
    return "".join(piece.text for piece in text)


def _line(text: Text, default: int) -> int:
    return next((piece.line for piece in text if piece.text.strip() and piece.line), default)


def _spaced(texts: list[Text]) -> list[ScriptPiece]:
    """The pieces of several texts with blanks between them."""
    pieces: list[ScriptPiece] = []
    for n, text in enumerate(texts):
        pieces += [ScriptPiece(" ", 0)] if n else []
        pieces += text
    return pieces


def _split(pieces: list[ScriptPiece]) -> list[list[ScriptPiece]]:
    """The words of a text that is not quoted."""
    words: list[list[ScriptPiece]] = []
    is_open = False
    for piece in pieces:
        if piece.problem:
            words = [*words[:-1], [*words[-1], piece]] if is_open else [*words, [piece]]
            is_open = True
            continue
        for run in re.findall(r"\s+|\S+", piece.text):
            if run.isspace():
                is_open = False
            elif is_open:
                words[-1].append(ScriptPiece(run, piece.line))
            else:
                words.append([ScriptPiece(run, piece.line)])
                is_open = True
    return words


def _expands(text: str) -> bool:
    """Whether a text has braces of which a shell makes several words."""
    return any("," in inner or ".." in inner for inner in re.findall(r"\{([^{}]*)\}", text))


def _why(text: str) -> str:
    if text.startswith("<"):
        return "is a redirection or a placeholder; write the value in its place"
    if text.startswith("$(("):
        return "arithmetic is not computed"
    if text.startswith(("$(", "`")):
        return "the output of a command is not known"
    if _expands(text) and not text.startswith("$"):
        return "braces that a shell expands are not read"
    return "this form of a variable needs a shell"
