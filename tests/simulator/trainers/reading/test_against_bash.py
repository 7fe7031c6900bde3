"""The words of random safe commands are those of bash, which runs `printf` on our own text only."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown
from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.script_record import ScriptRecord
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable
from moesim.simulator.trainers.reading.shell_statements import Statements

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not on this machine")

SETUP = """A='x y'
B=
N=12
P=/data/run.v1/model.tar.gz
L=(one 'two words' "" four)
E=()
set -- first 'second one'
"""
NAMES = ("A", "B", "N", "P", "L", "UNSET")
_word = st.text("abXZ09._,:/=+@-", min_size=1, max_size=5)
_pattern = st.sampled_from(
    ["*", "?", "*.*", "/*", "x*", "*[0-9]", "m[a-o]d", "*.", "[!/]*", "a", "\\*", '"*"', "[[:digit:]]"]
)


_OPERANDS = ["N", "$N", "3", "(N-2)"]


def _braced(parts: tuple[str, ...]) -> str:
    return f"${{{''.join(parts)}}}"


def _parameter(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    name = st.sampled_from(NAMES)
    return st.one_of(
        name.map("${}".format).map(lambda text: text + "."),
        name.map(lambda n: f"${{{n}}}"),
        name.map(lambda n: f"${{#{n}}}"),
        st.tuples(name, st.sampled_from([":-", "-", ":+", "+"]), inner).map(_braced),
        st.tuples(name, st.sampled_from(["#", "##", "%", "%%"]), _pattern).map(_braced),
        st.tuples(name, st.sampled_from(["/", "//", "/#", "/%"]), _pattern, _word).map(
            lambda t: f"${{{t[0]}{t[1]}{t[2].replace('/', 'e')}/{t[3].replace('/', '_')}}}"
        ),
        st.tuples(name, st.sampled_from(["^^", ",,", "^", ","])).map(lambda t: f"${{{t[0]}{t[1]}}}"),
        st.tuples(st.sampled_from("APN"), st.integers(-4, 4), st.integers(0, 5)).map(
            lambda t: f"${{{t[0]}: {t[1]}:{t[2]}}}"
        ),
        st.sampled_from(
            ["${L[@]}", "${L[*]}", "${L[1]}", "${L[-1]}", "${#L[@]}", "${E[@]}", "$1", "${2}", "$@",
             "$*", "$#",
             "${3:-d}", "${!L[@]}", "${L[@]:1:2}", "${@:2}", "${L[@]%e}"]
        ),
        st.tuples(st.integers(-20, 20), st.sampled_from("+-*"), st.sampled_from(_OPERANDS)).map(
            lambda t: f"$(({t[0]} {t[1]} {t[2]}))"
        ),
        st.sampled_from(["$((N / 5 * 2 % 7))", "$((N > 3 && N < 20 ? N << 2 : 0))", "$((2 ** 3 ** 2))",
             "$((0x1f | 010))"]),
        _word.map(lambda w: f"$(echo {w} $N)"),
        _word.map(lambda w: f"`echo {w}  \"$A\"`"),
    )  # fmt: skip


_plain = st.one_of(
    _word,
    _word.map(lambda w: f"'{w} $A'"),
    _word.map(lambda w: f'"{w} \\$ \\" \'"'),
    st.just("\\ "),
    st.just('""'),
)
_piece = st.recursive(
    _plain,
    lambda inner: st.one_of(_parameter(inner), _parameter(inner).map(lambda text: f'"{text}"'), inner),
    max_leaves=4,
)
_command = st.lists(st.lists(_piece, min_size=1, max_size=3).map("".join), min_size=1, max_size=4)


@cache
def _blank() -> dict[str, str]:
    return {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}


def words_of_bash(text: str) -> list[str] | None:
    """The words that bash makes of a command's text, or None where bash refuses it."""
    assert BASH is not None
    script = f"set -f\n{SETUP}\nprintf '%s\\0' count {text}"
    done = subprocess.run(
        [BASH, "--norc", "-c", script], capture_output=True, env=_blank(), timeout=10, check=False
    )
    return None if done.returncode or done.stderr else done.stdout.decode().split("\0")[1:-1]


def words_of_ours(text: str) -> list[str | Unknown]:
    """The words that our reader makes of the same text; variables that are not set are given as empty."""
    reading = ScriptRecord(Budget("test"))
    shell = Statements(reading, Scope({"UNSET": ShellVariable(None)}), None)
    shell.run_text(SETUP, "test", 1)
    try:
        shell.run_text(f"python x.py {text}", "test", 1)
    except InputError as error:  # the grammar of the syntax tree refuses some rare words, such as `\\ \\ `
        assert "cannot be" in str(error)
        shell.simple(f"python x.py {text}")
    (command,) = reading.commands
    return [reading.unknowns.value(word) for word in command.words[2:]]


@needs_bash
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(_command)
def test_random_words_are_those_of_bash(words: list[str]) -> None:
    text = " ".join(words)
    theirs = words_of_bash(text)
    if theirs is not None:
        assert words_of_ours(text) == theirs


@needs_bash
@pytest.mark.parametrize(
    "text",
    [
        "{1..3} a{b,c}d{e,f} {x} {a..c}x \"{p,q}\" {01..03}",
        "a\\\n b  \\\n   c # comment",
        "\"a\\\nb\" 'c\\\nd'",
        "$'tab\\tx\\n' \"$'no'\"",
        '"${L[@]}"x y"${E[@]}"z "${E[@]}" ${E[@]}',
        '${UNSET:-a "b c" d} "${UNSET:-a "b c" d}"',
        "--flag=\"$A\" --other=$A pre$A",
        "${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/model/x} ${P//a/_}",
        "x\"$@\"y $* \"$*\"",
        "$(echo \"$(echo nested ${A%% *})\") `echo \\`echo back\\``",
    ],
)  # fmt: skip
def test_known_hard_words_are_those_of_bash(text: str) -> None:
    theirs = words_of_bash(text)
    assert theirs is not None
    assert words_of_ours(text) == theirs
