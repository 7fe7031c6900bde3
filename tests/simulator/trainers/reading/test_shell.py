"""Shell scripts are read as bash understands them; what no text decides is unknown, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import launch_of, values

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Unknown

END = "\npython pretrain_gpt.py $A\n"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # Multi-line strings, which the old reader refused (as in examples/t5 of NVIDIA/Megatron-LM).
        ('A="\n    --num-layers 12 \\\n    --bf16\n    --lr 1e-4 \\\n"',
         {"--num-layers": "12", "--bf16": None, "--lr": "1e-4"}),
        ("A=(--x 1 # a comment with 'quote\n  # --y 2\n  --z \"a b\")\nset -- \"${A[@]}\"\nA=\"$*\"",
         {"--x": "1", "--z": ("a", "b")}),
        ("N=8\nA=\"--world $((N * 1)) --half $((N/2 + 1))\"", {"--world": "8", "--half": "5"}),
        ("TP=2\nlet PP=TP*4\n((EP = PP * 8, EP += 1))\nA=\"--pp $PP --ep $EP\"", {"--pp": "8", "--ep": "65"}),
        ("M=llama-3.1-8b\nA=\"--a ${M%%-*} --b ${M##*-} --c ${M/llama/x} --d ${#M} --e ${M^^}\"",
         {"--a": "llama", "--b": "8b", "--c": "x-3.1-8b", "--d": "12", "--e": "LLAMA-3.1-8B"}),
        ("B=A1; A1=--x; A=${!B}", {"--x": None}),
        ("A=--x=1; A+=' --y=2'; A=\"$A --no-z\"", {"--x": "1", "--y": "2", "--no-z": None}),
        ("declare -A C=([s]=1 [l]=\"8 9\")\nA=\"--n ${C[l]}\"", {"--n": ("8", "9")}),
        ("f() { local x=$1; A=\"--f $x --n $#\"; x=2; }\nx=7\nf one two\nA=\"$A --x $x\"",
         {"--f": "one", "--n": "2", "--x": "7"}),
        ("g() { echo $(($1 * 2)); }\nA=\"--g $(g 4) --h `echo hi`\"", {"--g": "8", "--h": "hi"}),
        ("A=; for i in 1 2 3; do A=\"$A --l$i $i\"; done", {"--l1": "1", "--l2": "2", "--l3": "3"}),
        ("for ((i = 0; i < 2; i++)); do A+=\" --l$i\"; done", {"--l0": None, "--l1": None}),
        ("n=3\nwhile [ $n -gt 0 ]; do A+=\" --n$n\"; n=$((n - 1)); [ $n = 1 ] && break; done",
         {"--n3": None, "--n2": None}),
        ("S=7B\nif [ $S = 1B ]; then A='--a 1'; elif [[ $S == 7* && -n $S ]]; then A='--b 2'; else A=; fi",
         {"--b": "2"}),
        ("S=4\nif [ $S = 1 ]; then A=--a; elif [ $S = 2 ]; then A=--b; elif [ $S = 3 ]; then A=--c\n"
         "elif [ $S = 4 ]; then # four\n A=--d; else A=--e; fi", {"--d": None}),
        ("S=9\nif false; then A=--a; elif [ $S = 2 ]; then A=--b; elif [ $S = 3 ]; then A=--c\n"
         "else A=--e; fi",
         {"--e": None}),
        ("S=xl\ncase $S in s|m) A=--small;; x*) A=--large;; *) A=--other;; esac", {"--large": None}),
        ("test 3 -lt 10 && A=--yes || A=--no", {"--yes": None}),
        ("read -r -d '' A <<EOF || true\n--x 1\n--y $((2+3))\nEOF", {"--x": "1", "--y": "5"}),
        ("A=$(cat <<'EOF'\n--x '$HOME'\nEOF\n)", {"--x": "'$HOME'"}),
        ("IFS=, read -r X Y <<< '4,5'\nA=\"--x $X --y $Y\"", {"--x": "4", "--y": "5"}),
        ("A=\"--x $(basename /a/b.json .json) --y $(expr 6 \\* 7)\"", {"--x": "b", "--y": "42"}),
        ("A=; ( A=--inner ); A=\"$A --outer\"", {"--outer": None}),
        ("A=--x\nA='--y' true\nunset B; A=\"$A --b [${B}]\"", {"--x": None, "--b": "[]"}),
        ("A='--a \\'; B=1", {"--a": "\\"}),
        ("mkdir -p out && cp a b && A=--copied || A=--lost", {"--copied": None}),
    ],
)  # fmt: skip
def test_arguments_of_known_text(tmp_path: Path, script: str, expected: dict[str, Any]) -> None:
    assert values(launch_of(tmp_path, script + END)) == expected


def test_places_are_the_lines_of_the_flags(tmp_path: Path) -> None:
    text = (
        "N=4\nARGS=(\n  --num-layers $N\n  # --num-layers 9\n  --bf16\n)\ntorchrun p.py \\\n"
        '  "${ARGS[@]}" \\\n  --lr 1\n'
    )
    places = {argument.name: argument.place for argument in launch_of(tmp_path, text).arguments}
    assert places == {"--num-layers": "run.sh, line 3", "--bf16": "run.sh, line 5", "--lr": "run.sh, line 9"}


def test_quoted_arrays_keep_their_words_and_duplicates_their_order(tmp_path: Path) -> None:
    text = "L=(--x 'a b' --x c)\npython p.py \"${L[@]}\" --y ${L[*]}"
    pairs = [(argument.name, argument.value) for argument in launch_of(tmp_path, text).arguments]
    assert pairs == [("--x", "a b"), ("--x", "c"), ("--y", None), ("--x", ("a", "b")), ("--x", "c")]


def test_a_comment_between_continued_lines_ends_the_command(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "python train.py \\\n  --a 1 \\\n  # --b 2 \\\n  --c 3\n")
    assert values(launch) == {"--a": "1"}


@pytest.mark.parametrize(
    ("script", "value", "reason"),
    [
        ("python p.py --x $D", "$D", "the variable D is not set"),
        ("python p.py --x a/$D/b", "a/$D/b", "the variable D is not set"),
        ("python p.py --x ${1}", "${1}", "the parameter $1 of the script is not given"),
        ("python p.py --x $(nvidia-smi -L | wc -l)", "$(nvidia-smi -L | wc -l)", "never run"),
        ("python p.py --x `hostname`", "$(hostname)", "never run"),
        ("N=$(hostname)\npython p.py --x $((N * 2))", "$((N * 2))", "never run"),
        ("((n = 8)); ((n += UNSET)); python p.py --x $n", "$((n += UNSET))", "is not known"),
        ("D=<path to the data>/x\npython p.py --x $D", "<path to the data>/x", "placeholder"),
        ("X=${Y:?set it}\npython p.py --x $X", "${Y:?set it}", "the variable Y is not set"),
        ("for f in $(ls); do N=$f; done\npython p.py --x $N", "$N ($(ls))", "it is set in the loop over f"),
        ("M=1\nwhile read -r l; do M=2; done < list\npython p.py --x $M", "$M (2)",
         "the loop while read -r l"),
        ("if [ $S = a ]; then N=1; else N=2; fi\npython p.py --x $N", "1 or 2", "the condition [ $S = a ]"),
        ("N=1\nif python check.py; then N=2; fi\npython p.py --x $N", "2 or 1",
         "the condition python check.py"),
        ("N=1\necho a | grep -q b && N=2\npython p.py --x $N", "2 or 1", "the condition echo a | grep -q b"),
        ("N=1\n[ -f data.bin ] && N=2\npython p.py --x $N", "2 or 1", "the condition [ -f data.bin ]"),
    ],
)  # fmt: skip
def test_what_no_text_decides_is_unknown(tmp_path: Path, script: str, value: str, reason: str) -> None:
    (argument,) = launch_of(tmp_path, script).arguments
    assert isinstance(argument.value, Unknown)
    assert argument.value.text == value
    assert reason in argument.value.reason


def test_optional_arguments_of_an_undecided_branch_are_unknown_and_the_others_known(tmp_path: Path) -> None:
    text = (
        "ARGS=(--a 1 --b 2)\nS='--s 1'\nif [ $FP8 = true ]; then ARGS+=(--fp8-format e4m3); "
        'S="$S --extra"; fi\n'
        "python p.py ${ARGS[@]} --c 3 $S\n"
    )
    assert values(launch_of(tmp_path, text)) == {
        "--a": "1",
        "--b": "2",
        "--fp8-format": "?--fp8-format e4m3 or nothing",
        "--c": "3",
        "--s": "1",
        "--extra": "?--extra or nothing",
    }
    known = values(launch_of(tmp_path, text, environment={"FP8": "true"}))
    assert known["--fp8-format"] == "e4m3" and known["--extra"] is None


def test_every_branch_of_an_undecided_chain_is_named(tmp_path: Path) -> None:
    text = (
        "if [ $S = 1 ]; then N=10; O=' '; elif [ $S = 2 ]; then N=20; O=' '; elif [ $S = 3 ]; then "
        "N=30; O='--x 3'\nelse N=40; fi\npython p.py --n $N $O\n"
    )
    expected = {"--n": "?10 or 20 or 30 or 40", "--x": "?--x 3 or nothing"}
    assert values(launch_of(tmp_path, text)) == expected
    assert values(launch_of(tmp_path, text, environment={"S": "3"})) == {"--n": "30", "--x": "3"}


def test_words_beside_an_undecided_part_stay_apart(tmp_path: Path) -> None:
    text = (
        'X="--a 1 "\nif [ $S = 1 ]; then X+="--b 2 "; fi\nif [ $S = 2 ]; then X+=" -c 3 "; fi\n'
        'X+="--d 4"\nif [ $S = 3 ]; then Y=" --e"; fi\npython p.py "--z" $X$Y --f x\n'
    )
    assert values(launch_of(tmp_path, text)) == {
        "--z": None, "--a": "1", "--b": "?--b 2 or nothing", "-c": "?-c 3 or nothing", "--d": "4",
        "--e": "?--e or nothing", "--f": "x",
    }  # fmt: skip


def test_unknown_parts_of_names_and_files_are_shown_as_they_are_written(tmp_path: Path) -> None:
    text = (
        "cat > $D/run.sh <<'EOF'\npython train.py --a 1 $*\nEOF\nif [ $J ]; then X=--job=$J; fi\n"
        "if [ -f x ]; then Y=--id=$I; fi\nbash $D/run.sh $X --$N 3 $Y\n"
    )
    launch = launch_of(tmp_path, text)
    assert values(launch) == {"--a": "?1 $X", "--$N": "3", "--id": "?--id=$I or nothing"}
    assert launch.arguments[0].place == "$D/run.sh, line 1"


def test_defaults_and_assumptions_are_noted(tmp_path: Path) -> None:
    text = (
        'TP=${TP:-2}\n: ${PP:=4}\nif [ -z "$EP" ]; then EP=8; fi\n'
        "python p.py --tp $TP --pp $PP --ep $EP ${Q:+--q}\n"
    )
    launch = launch_of(tmp_path, text)
    assert values(launch) == {"--tp": "2", "--pp": "4", "--ep": "8"}
    assert any("TP is not set: its default '2'" in note for note in launch.notes)
    assert any('[ -z "$EP" ]' in note and "taken as true" in note for note in launch.notes)
    given = launch_of(tmp_path, text, environment={"TP": "16", "EP": "1", "Q": "x"})
    assert values(given) == {"--tp": "16", "--pp": "4", "--ep": "1", "--q": None}
    assert not any("TP is not set" in note for note in given.notes)


def test_a_check_that_would_end_the_script_is_passed_over_with_a_note(tmp_path: Path) -> None:
    text = 'if [ $# -lt 2 ]; then echo usage; exit 1; fi\npython p.py --x "${1}" --n $2\n'
    launch = launch_of(tmp_path, text)
    assert values(launch) == {"--x": "?${1}", "--n": "?$2"}
    assert any("would end the script" in note for note in launch.notes)
    assert values(launch_of(tmp_path, text, parameters=("a b", "3"))) == {"--x": "a b", "--n": "3"}


def test_a_script_that_ends_before_its_launch_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2: the script ends here with exit"):
        launch_of(tmp_path, "S=1\n[ $S = 1 ] && exit 1\npython p.py --x\n")


def test_sourced_and_called_scripts_are_read_beside_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL=(--layers 4)\nexport SEEN=$1\n")
    (tmp_path / "inner.sh").write_text(
        'python p.py --tp ${TP:-1} --first $1 --hidden "$UNEXPORTED" ${MODEL[@]}\n'
    )
    text = (
        'UNEXPORTED=7\nsource $(dirname $0)/model.sh arg\nTP=8 bash inner.sh "${MODEL[@]}"\n'
        "source ../model.sh\n"
    )
    launch = launch_of(tmp_path, text)
    assert values(launch)["--tp"] == "8"
    assert values(launch)["--hidden"] == "?$UNEXPORTED"
    assert launch.environment["SEEN"] == "arg"
    assert any("../model.sh does not lie beside" in note for note in launch.notes)


def test_a_script_that_calls_itself_ends(tmp_path: Path) -> None:
    assert values(launch_of(tmp_path, "bash run.sh\nsource ./run.sh\npython p.py --x 1\n")) == {"--x": "1"}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 20, "30,000 characters"),
        ("A=(a a a a)\n" + 'A+=("${A[@]}")\n' * 30, "limit of 5,000"),
        ("f() { f; }\nf\n", "nested more than"),
        ("for i in {1..900}; do for j in {1..900}; do x=1; done; done\n", "20,000 statements"),
        ("python p.py --x 'open\n", "line 1"),
        ("echo $(( " + "(" * 4000 + "1", "line 1"),
        ("python p.py > log --x 1\n", "words follow a redirection"),
        ("echo hello\n", "starts no program"),
        ("A='\ue000'\npython p.py --x 1\n", "private character"),
    ],
)  # fmt: skip
def test_hostile_or_unreadable_text_is_refused(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        launch_of(tmp_path, script)


@pytest.mark.parametrize(
    "script", ["while true; do x=1; done", "A=$((9**9**9**9))", "case $X in " + "a) b=1;; " * 300 + "esac"]
)
def test_work_without_end_is_bounded(tmp_path: Path, script: str) -> None:
    try:
        assert values(launch_of(tmp_path, script + "\npython p.py --x 1\n"))["--x"] == "1"
    except InputError as error:
        assert "limit" in str(error) or "nested" in str(error)


def test_a_file_of_variables_alone_gives_their_arguments(tmp_path: Path) -> None:
    launch = launch_of(
        tmp_path, 'export MODEL=x\nMODEL_ARGS=" --num-layers 61 \\\n --moe-layer-freq [0]*3+[1]*58 "\n'
    )
    assert values(launch) == {"--num-layers": "61", "--moe-layer-freq": "[0]*3+[1]*58"}
    assert launch.program is None and launch.environment == {"MODEL": "x"}
    assert "MODEL_ARGS" in launch.notes[0]


def test_set_a_exports_and_the_environment_of_the_caller_is_not_repeated(tmp_path: Path) -> None:
    launch = launch_of(
        tmp_path,
        "set -a\nX=1\nset +a\nY=2\nexport Z\nW=3 python p.py --a\n",
        environment={"Z": "9", "V": "1"},
    )
    assert launch.environment == {"X": "1", "W": "3"}
