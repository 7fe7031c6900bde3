"""Scripts of our own with the constructs of published ones start, for us, what bash starts.

bash runs them with functions in place of the programs, which print their words; no program is started.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.script_record import ScriptRecord
from moesim.simulator.trainers.reading.shell_scope import Scope, ShellVariable
from moesim.simulator.trainers.reading.shell_statements import Statements

BASH = shutil.which("bash")

STUBS = r"""
shown() { printf '%s\0' "$@" $'\x01' >&3; }
for name in torchrun python deepspeed; do eval "$name() { shown $name \"\$@\"; }"; done
srun() { while [[ ${1:-} == -* ]]; do shift; done; "$@"; }
bash() { command "$REAL" --norc "$@"; }
sh() { command "$REAL" --norc "$@"; }
mkdir() { :; }; tee() { while read -r line; do :; done; }; date() { echo 2026; }
cat() { while IFS= read -r line; do printf '%s\n' "$line"; done; }
export -f shown torchrun python deepspeed srun bash sh mkdir tee date cat
"""

# Arrays with comments, defaults, an optional part (as examples/mixtral of NVIDIA/Megatron-LM).
ARRAYS = r"""
GPUS=8
NNODES=${SLURM_NNODES:-"2"}
D_ARGS=(--nproc_per_node $GPUS --nnodes $NNODES)
M=(
    --use-mcore-models
    --seq-length 4096   # the context
    # --swiglu
    --moe-layer-freq "([0]*3+[1]*58)"
)
P=(--expert-model-parallel-size $((GPUS * NNODES / 2)))
if [ -n "${KEY}" ]; then P+=(--wandb); else P+=(--no-wandb "a  b"); fi
torchrun ${D_ARGS[@]} pretrain_gpt.py "${M[@]}" ${P[@]} --end ${M[*]:0:2}
"""

# Multi-line strings with continuations (as examples/t5 of NVIDIA/Megatron-LM).
STRINGS = """
ARGS="
    --num-layers 12 \\
    --bf16
    --path '/a b' \\
"
torchrun --nnodes 1 p.py \\
    $ARGS \\
    --quoted "$ARGS" \\
    --last x \\
"""

# A command text in an exported variable, run by bash -c (as tr11-176B-ml of bigscience-workshop/bigscience).
EXPORTED = r"""
N=4; CONFIG=./ds.$N.json
cat <<EOT > /dev/null
{"a": $N}
EOT
OPTS=" \
    --lr 6e-5 \
    --partition 'type:transformer|embedding' \
    "
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $N"
export CMD=" \
    pretrain.py \
    $OPTS \
    --deepspeed_config ${CONFIG} \
    "
HIDDEN=1
srun --jobid=1 -l bash -c '$LAUNCHER --node_rank 0 $CMD' 2>&1 | tee -a log
srun bash -c "$LAUNCHER $CMD --x $HIDDEN"
"""

# Positional parameters, conditions and eval (as deepseek_v3 of alibaba/Pai-Megatron-Patch).
EVALUATED = r"""
set -- A37B 4 true
SIZE=$1; TP=$2; SP=${3}
if [ $SIZE = A2B ]; then
    LAYERS=27
elif [ $SIZE = A37B ]; then
    LAYERS=61
    moe=" \
        --num-experts 256 \
        --freq '([0]*3)' \
    "
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then sp=" --sequence-parallel"; elif [ $SP = false ]; then sp=" "; fi
[[ $SIZE =~ ^A[0-9]+B$ && ! $TP -lt 2 ]] && sp="$sp --checked"
NAME="run-$SIZE-tp-${TP}-layers-$(( LAYERS % TP ))"
run_cmd="torchrun --nproc_per_node 8 pretrain.py
 ${moe} ${sp} --num-layers $LAYERS --save \"/o/${NAME}\""
eval ${run_cmd}
"""

# Functions, case, loops, associative arrays and a prefix of variables.
LOOPS = r"""
declare -A WIDTH=([small]=512 [large]="2048 x")
start() {
    local size=$1 extra=("${@:2}")
    case "$size" in
        s*|m*) HEADS=8 ;;
        *) HEADS=$(( ${WIDTH[$size]%% *} / 128 )) ;;
    esac
    TP=$HEADS python train.py --size "$size" --width ${WIDTH[$size]} --heads $HEADS "${extra[@]}"
}
for size in small large; do
    for ((i = 1; i <= 2; i++)); do
        [ $i = 2 ] && [ $size = small ] && continue
        start $size --index $i "two words $i"
    done
done
n=3; until [ $n -le 1 ]; do n=$((n - 1)); deepspeed t.py --n$n="${n}x" --list {a,b}$n; done
( n=9; python sub.py --n $n ); python after.py --n $n --host "$(echo $(echo in"ner") | cat)"
read -r -d '' TEXT <<EOF
--from here $n
--from here $n
EOF
TP=7 bash -c 'python inner.py --tp $TP --zero $0 $1' name first
python text.py $TEXT --word "${TEXT##* }" --ok
"""


def started_by_bash(script: str, folder: Path) -> list[list[str]]:
    """The words of the programs that bash starts."""
    assert BASH is not None
    path = folder / "words"
    text = f"exec 3>>{path}\n{STUBS}\n{script}"
    subprocess.run(
        [BASH, "--norc", "-c", text], env={"PATH": "/nonexistent", "REAL": BASH}, cwd=folder, check=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=20,
    )  # fmt: skip
    records = path.read_text().split("\x01\0")[:-1]
    return [record.split("\0")[:-1] for record in records]


@pytest.mark.skipif(BASH is None, reason="bash is not on this machine")
@pytest.mark.parametrize(
    "script",
    [ARRAYS, STRINGS, EXPORTED, EVALUATED, LOOPS],
    ids=["arrays", "strings", "exported", "evaluated", "loops"],
)
def test_programs_and_words_are_those_of_bash(tmp_path: Path, script: str) -> None:
    theirs = started_by_bash(script, tmp_path)
    reading = ScriptRecord(Budget("run.sh"))
    shell = Statements(reading, Scope({"KEY": ShellVariable(None)}), None)
    shell.run_text(script, "run.sh", 1)
    assert theirs
    assert [list(command.words) for command in reading.commands] == theirs


_value = st.sampled_from(["1", "2", "ab", "a b", ""])
_name = st.sampled_from(["A", "B", "C"])
_test = st.one_of(
    st.tuples(_name, _value).map(lambda t: f'[ "${t[0]}" = "{t[1]}" ]'),
    st.tuples(_name, st.sampled_from(["a*", "[0-9]", '"a b"', "?"])).map(
        lambda t: f"[[ ${t[0]} == {t[1]} ]]"
    ),
    _name.map(lambda name: f'[ -n "${name}" ]'),
    _name.map(lambda name: f"[[ -z ${name} || ${name} != 1 && ! ${name} == 2 ]]"),
    st.tuples(_name, st.sampled_from(["-lt", "-eq", "-ge"])).map(lambda t: f'[ "${{#{t[0]}}}" {t[1]} 2 ]'),
    _name.map(lambda name: f"(( ${{#{name}}} > 1 ))"),
    st.sampled_from(["true", "false"]),
)
_simple = st.one_of(
    st.tuples(_name, _value).map(lambda t: f"{t[0]}='{t[1]}'"),
    st.tuples(_name, _name).map(lambda t: f"{t[0]}=${t[1]}${{{t[0]}:-x}}"),
    st.tuples(_name, _value).map(lambda t: f"{t[0]}+='{t[1]}'"),
    st.tuples(_name, _name).map(lambda t: f'python p.py --{t[0]} ${t[0]} "${t[1]}"'),
    _name.map(lambda name: f"f ${name} 7"),
)


def _blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=2).map("\n".join)
    return st.one_of(
        st.tuples(_test, body).map(lambda t: f"if {t[0]}; then {t[1]}\nfi"),
        st.tuples(_test, body, _test, body, _test, body, body).map(
            lambda t: (
                f"if {t[0]}; then\n{t[1]}\nelif {t[2]}\nthen {t[3]}\n"
                f"elif {t[4]}; then {t[5]}\nelse {t[6]}\nfi"
            )
        ),
        st.tuples(_name, body, body).map(
            lambda t: f"case ${t[0]} in 1|ab) {t[1]};; a*)\n;; *) {t[2]} ;;\nesac"
        ),
        st.tuples(_name, body).map(lambda t: f"for {t[0]} in 1 'a b'; do {t[1]}\ndone"),
        st.tuples(_test, _simple, _simple).map(lambda t: f"{t[0]} && {t[1]} || {t[2]}"),
        st.tuples(_test, _simple).map(lambda t: f"! {t[0]} && {t[1]}"),
        body.map(lambda text: f"( {text} )"),
        body.map(lambda text: f"{{ {text}\n}}"),
        st.tuples(_name, body).map(lambda t: f'while [ "${t[0]}" != 22 ]; do {t[0]}=22; {t[1]}\nbreak; done'),
    )


_program = st.lists(st.recursive(_simple, _blocks, max_leaves=6), min_size=1, max_size=4).map("\n".join)
_FUNCTION = 'A=1; B=; C="a b"\nf() { local A=$1; B=$A$2; if [ -n "$A" ]; then return; fi; C=none; }\n'


@pytest.mark.skipif(BASH is None, reason="bash is not on this machine")
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(_program)
def test_random_control_flow_is_that_of_bash(program: str) -> None:
    script = f'{_FUNCTION}{program}\npython end.py "$A" "$B" "$C"'
    with tempfile.TemporaryDirectory() as folder:
        theirs = started_by_bash(script, Path(folder))
    reading = ScriptRecord(Budget("run.sh"))
    shell = Statements(reading, Scope(), None)
    shell.run_text(script, "run.sh", 1)
    assert [list(command.words) for command in reading.commands] == theirs
