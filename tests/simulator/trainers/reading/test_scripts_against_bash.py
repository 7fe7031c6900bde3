"""Scripts of our own with the constructs of published ones start, for us, what bash starts.

bash runs them with functions in place of the programs, which print their words; no program is started.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moesim.simulator.trainers.reading.limits import Budget
from moesim.simulator.trainers.reading.shell_reading import Reading
from moesim.simulator.trainers.reading.shell_scope import Scope, Variable
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
    reading = Reading(Budget("run.sh"))
    shell = Statements(reading, Scope({"KEY": Variable(None)}), None)
    shell.run_text(script, "run.sh", 1)
    assert theirs
    assert [list(command.words) for command in reading.commands] == theirs
