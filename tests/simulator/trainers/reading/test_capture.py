"""Stand-ins note what a script starts; what they noted is the launch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launches import values

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.reading import read_launch
from moesim.simulator.trainers.reading.capture import NOTED, write_stand_ins


def captured(folder: Path, script: str, run: int | None = None, **variables: str) -> LaunchFile:
    """The launch that stand-ins note where bash runs a script with them first in PATH."""
    stand_ins = folder / "stand-ins"
    write_stand_ins(stand_ins)
    (folder / "run.sh").write_text(script)
    path = f"{stand_ins}:/usr/bin:/bin"
    subprocess.run(["bash", "run.sh"], cwd=folder, env={"PATH": path, **variables}, check=True)
    return read_launch(stand_ins, run=run)


LOGIC = """set -e
layers() { echo $(($1 * 2)); }
if [ "$SIZE" = large ]; then N=$(layers 30); else N=2; fi
for flag in swiglu bf16; do FLAGS+=" --$flag"; done
cat > ds.json <<EOF
{"zero_optimization": {"stage": $((N / 30))}}
EOF
export CMD="pretrain_gpt.py --num-layers $N $FLAGS --micro-batch-size 1 --deepspeed_config ds.json"
export LAUNCHER="python -m torch.distributed.launch --nnodes 4 --nproc_per_node 8"
srun --jobid 1 bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' | tee log
"""


def test_a_script_with_logic_is_noted_with_variables_and_files(tmp_path: Path) -> None:
    launch = captured(tmp_path, LOGIC, SIZE="large", SECRET_TOKEN="hidden")
    assert values(launch) == {
        "--num-layers": "60", "--swiglu": None, "--bf16": None, "--micro-batch-size": "1",
        "--deepspeed_config": "ds.json", "zero_optimization.stage": 2,
    }  # fmt: skip
    assert (launch.machine.nodes, launch.machine.gpus_per_node) == (4, 8)
    assert launch.arguments[0].place == f"stand-ins/{NOTED}, line 1"
    assert "hidden" not in (tmp_path / "stand-ins" / NOTED).read_text()


def test_several_trainings_are_named_and_one_is_chosen(tmp_path: Path) -> None:
    script = "".join(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {n} --micro-batch-size 1\n" for n in (2, 4)
    )
    with pytest.raises(InputError, match=r"holds 2 runs.*--run 1: .*line 2 .*--run 2: .*line 3 "):
        captured(tmp_path, "python tools/preprocess.py --input x\n" + script)
    again = read_launch(tmp_path / "stand-ins" / NOTED, run=2)
    assert values(again)["--num-layers"] == "4"


def test_the_output_of_python_is_not_taken_as_empty(tmp_path: Path) -> None:
    script = "N=$(python -c 'print(4)')\ntorchrun pretrain_gpt.py --num-layers 2 --seq-length 4096 $N\n"
    with pytest.raises(InputError, match="was asked for its output, which a stand-in leaves empty"):
        captured(tmp_path, script)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "nothing is noted"),
        ("{\n", "line 1: no note of a stand-in"),
        ('{"words": []}\n', "`words` is missing"),
        (json.dumps({"words": ["sbatch", "run.sh"]}), "none starts a training"),
        (json.dumps({"words": ["torchrun", "--nnodes", "--master_port", "--lr", "1", "a.py"]}),
         "--lr is no option of torchrun"),
        (json.dumps({"words": ["torchrun", "--nnodes", "2", "7", "a.py", "--lr", "1"]}),
         "which is no .py file"),
        (json.dumps({"words": ["srun", "bash", "-c", "if x; then y; fi"]}), "starts no program"),
    ],
)  # fmt: skip
def test_damaged_notes_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / NOTED).write_text(text)
    with pytest.raises(InputError, match=expected):
        read_launch(tmp_path)


def test_stand_ins_do_not_fall_into_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="holds something else"):
        write_stand_ins(tmp_path)
