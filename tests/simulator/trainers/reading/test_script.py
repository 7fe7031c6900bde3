"""Scripts of literal words and plain assignments are read as bash reads them; all else is refused."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from launches import launch_of, values

from moesim.hwmodels.errors import InputError

LAUNCH = "\npython train.py $A\n"

PLAIN = [
    ("A='--x 1 --y a'", {"--x": "1", "--y": "a"}),
    ("A=\"--x 1 \\\n  --y 2\"", {"--x": "1", "--y": "2"}),
    ("TP=2\nA=\"--tp $TP --pp ${TP}0\"", {"--tp": "2", "--pp": "20"}),
    ("A=--x; A+=' 1'; A=\"$A --y\"", {"--x": "1", "--y": None}),
    ("export A=--x B=2\nA=\"$A $B\"", {"--x": "2"}),
    ("A=\"--x ${N:-4} --y ${M-5} --z ${E:-}\"\n", {"--x": "4", "--y": "5", "--z": None}),
    ("N=\nA=\"--x ${N:-$K}\"; K=3; A=--x", {"--x": None}),
    ("mkdir -p a && cd a; echo hi > log 2>&1\nA=--x || true", {"--x": None}),
    ("A='--x 1' # a comment with ' and $(x)\n", {"--x": "1"}),
    ("if_x=1\nA=--x\\ 1", {"--x": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), PLAIN)
def test_plain_assignments_are_filled_in(tmp_path: Path, script: str, expected: dict[str, str]) -> None:
    assert values(launch_of(tmp_path, script + LAUNCH)) == expected


def test_arrays_keep_their_words_and_lines(tmp_path: Path) -> None:
    text = (
        'N=8\nA=(\n  --x 1 # a comment with \'quote\n  # --y 2\n  --z "a b" --n $N\n)\nA+=( --w )\n'
        'torchrun --nproc_per_node 8 train.py "${A[@]}" --last ${B[@]:-} ${A[@]} \\\n  --end\n'
    ).replace("${B[@]:-} ${A[@]}", "1")
    launch = launch_of(tmp_path, text)
    assert values(launch) == {"--x": "1", "--z": "a b", "--n": "8", "--w": None, "--last": "1", "--end": None}
    assert [one.place.rpartition(" ")[2] for one in launch.arguments] == ["3", "5", "5", "7", "8", "9"]


def test_parameters_and_variables_are_given(tmp_path: Path) -> None:
    text = "python train.py --x $1 --y ${2} --z $Z\n"
    launch = launch_of(tmp_path, text, parameters=("a", "b"), environment={"Z": "c"})
    assert values(launch) == {"--x": "a", "--y": "b", "--z": "c"}


WORDS = ["--a", "1", "a b", "", "$X", "${X}", '"$X y"', "'$X'", r"\$X", "x$X", '"q"z', "a=b", "--n=$X", "'#'"]


def test_words_mean_the_same_to_bash(tmp_path: Path) -> None:
    """Random command lines of quotes and variables become the words that bash makes of them."""
    rng = random.Random(33)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(150)]
    shown = "\n".join(f"printf '%s\\0' {line}; printf '\\1'" for line in lines)
    out = subprocess.run(
        ["bash", "-c", f'X="p  q"\n{shown}'], capture_output=True, check=True, text=True
    ).stdout
    for line, words in zip(lines, out.split("\1"), strict=False):
        launch = launch_of(tmp_path, f'X="p  q"\npython train.py --first {line} --last\n')
        ours = [
            text
            for one in launch.arguments
            for text in (one.name, *(one.value if isinstance(one.value, tuple) else (one.value,)))
            if isinstance(text, str)
        ]
        theirs = [
            part for word in words.split("\0")[:-1] for part in word.partition("=")[::2] if part or word == ""
        ]
        kept = [word for word in ours if word not in ("--first", "--last")]
        assert [w for w in kept if w] == [w for w in theirs if w], line


@pytest.mark.parametrize(
    ("script", "line", "what"),
    [
        ("X=1\nA=$(hostname)", 2, "the output of a command is not known"),
        ("A=`hostname`", 1, "the output of a command is not known"),
        ("A=$((2 * 4))", 1, "arithmetic is not computed"),
        ("A=${X%%-*}", 1, "this form of a variable needs a shell"),
        ("A=${#X}", 1, "this form of a variable needs a shell"),
        ("python train.py --x {a,b}", 1, "braces that a shell expands"),
        ("A=--x\nif true; then A=--y; fi", 2, "a condition"),
        ("[ -f x ] && A=--x", 1, "a condition"),
        ("\nfor i in 1 2; do A+=--x; done", 2, "a loop"),
        ("while true; do x=1; done", 1, "a loop"),
        ("case $S in a) A=1;; esac", 1, "a condition"),
        ("f() { A=--x; }", 1, "a function"),
        ("source other.sh", 1, "another file"),
        (". other.sh", 1, "another file"),
        ("eval \"$X\"", 1, "eval"),
        ("cat <<EOF > x\nA=--x\nEOF", 1, "a here-document"),
        ("false || A=--x", 1, "a command behind ||"),
        ("set -- 1 2", 1, "set --"),
        ("( A=--x )", 1, "a block"),
        ("A=\"--x $D\"", 1, "the variable D is not set by plain text; give --env D=VALUE"),
        ("A=$2", 1, "takes its parameter $2"),
    ],
)  # fmt: skip
def test_what_needs_a_shell_is_refused_with_line_and_remedy(
    tmp_path: Path, script: str, line: int, what: str
) -> None:
    with pytest.raises(InputError) as raised:
        launch_of(tmp_path, script + LAUNCH)
    message = str(raised.value)
    assert f"run.sh, line {line}" in message and what in message and "--capture" in message


def test_a_placeholder_is_no_redirection(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: <path to.*placeholder"):
        launch_of(tmp_path, "python train.py --data <path to data> --x 1\n")


@pytest.mark.parametrize(
    "text", ['A="x\npython a.py\n', "A='x\n", "A=(1 2\n", "A=${X\n", "A=$(x\n", "A=`x\n"]
)
def test_an_open_quote_or_bracket_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"run\.sh, line 1: .* is not closed"):
        launch_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f'A{n}="$A{n + 1} $A{n + 1}"\n' for n in range(30, 0, -1)).replace("A31", "X"), "parts"),
        ("bash -c '" * 9 + "python t.py --x 1", "closed"),
        ("A=${Y:-" + "${Y:-" * 3000 + "}" * 3001 + "\npython train.py --x $A", "this form of a variable"),
        ("A+='--x 1 '\n" * 9000, "more than 1,000,000 parts"),
        ("pip install x\n", "starts no program"),
        ("A=--x\nB=--y\n", "none holds all arguments"),
        ("\x00", "not a text file"),
    ],
)
def test_hostile_and_empty_scripts_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        launch_of(
            tmp_path,
            "X='--x 1'\n" * (expected == "parts") + text + "\npython train.py $A1\n" * (expected == "parts"),
        )


def test_a_file_of_one_variable_gives_its_arguments(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, 'TOKENIZER=x\nMODEL_ARGS="\n  --num-layers 2 \\\n  --hidden-size 8\n"\n')
    assert values(launch) == {"--num-layers": "2", "--hidden-size": "8"}
    assert launch.arguments[1].place == "run.sh, line 4"
    assert "starts no training; the arguments of its variable MODEL_ARGS" in launch.notes[0]
