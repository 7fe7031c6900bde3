"""Launchers and wrappers are told from the program; their options give the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import launch_of, values

from moesim.hwmodels.errors import InputError

A = "pretrain_gpt.py --num-layers 2 --micro-batch-size 1"
ARGUMENTS = {"--num-layers": "2", "--micro-batch-size": "1"}


@pytest.mark.parametrize(
    ("script", "nodes", "gpus"),
    [
        (f"torchrun --nproc_per_node 8 --nnodes=4 {A}", 4, 8),
        (f"torchrun --standalone --nproc-per-node=2 --tee 3 {A}", 1, 2),
        (f"python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 2 --use_env {A}", 2, 4),
        (f"deepspeed --num_nodes 3 --num_gpus 8 --no_local_rank --hostfile h {A}", 3, 8),
        (f"accelerate launch --num_machines 2 --num_processes 16 --dynamo_backend no --use_fsdp {A}", 2, 8),
        (f"srun -N 4 --ntasks-per-node=8 -l python -u {A}", 4, 8),
        (f"srun --nodes=2 --gpus-per-node=h100:4 bash -c 'torchrun --nproc_per_node=4 {A}'", 2, 4),
        (f"mpirun -np 16 --map-by ppr:8:node -x PATH python {A}", None, 8),
        (f"docker run --gpus all -v /a:/b image:1 bash -c \"cd /x && python {A}\"", None, None),
        (f"nohup env X=1 numactl --cpunodebind=0 python {A} > log 2>&1 &", None, None),
        (f"CMD=\"torchrun --nproc_per_node 8 {A}\"\necho $CMD\n$CMD 2>&1 | tee log", 1, 8),
        (f"#SBATCH --nodes=16 # a comment\n#SBATCH --gres=gpu:h100:8\n#SBATCH --job-name=x\n"
         f"srun python {A}", 16, 8),
        (f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\n"
         f"torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_NTASKS_PER_NODE {A}",
         2, 4),
        (f"export C='python {A}'\nsrun --nodes=3 sh -c 'exec $C'", 3, None),
        (f"uv run --no-sync python -m torch.distributed.run --nproc_per_node 8 {A}", 1, 8),
        (f"deepspeed --num_gpus 4 {A}", 1, 4),
        (f"deepspeed --hostfile hosts --num_gpus 4 {A}", None, 4),
    ],
)  # fmt: skip
def test_machine_and_arguments_of_launchers(tmp_path: Path, script: str, nodes: Any, gpus: Any) -> None:
    launch = launch_of(tmp_path, script + "\n")
    assert values(launch) == ARGUMENTS
    assert (launch.machine.nodes, launch.machine.gpus_per_node) == (nodes, gpus)
    assert launch.program == "pretrain_gpt.py" and launch.trainer == "megatron-lm"


def test_headers_after_the_first_command_do_not_count(tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=1:00\nX=1\n#SBATCH --nodes=9\npython {A}\n"
    launch = launch_of(tmp_path, text)
    assert launch.machine.nodes == 2 and launch.machine.places == {"nodes": "run.sh, line 2"}


def test_a_launcher_that_differs_from_the_header_is_noted(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, f"#SBATCH --nodes=4\ntorchrun --nnodes 2 --nproc_per_node 8 {A}\n")
    assert launch.machine.nodes == 2
    assert launch.machine.gpus_per_node == 8
    assert any("nodes is 2" in note and "4 at run.sh, line 1" in note for note in launch.notes)


def test_the_prefix_of_a_wrapper_is_its_environment(tmp_path: Path) -> None:
    # The construct of best_practice/deepseek-v3/*.sh of yanring/Megatron-MoE-ModelZoo.
    text = (
        'export MODEL=M\nTP=2 PP=8 bash sbatch.sh \\\n --layout "Et|(tt|)*3L" \\\n --recompute a b\n'
        "TP=4 bash sbatch.sh --z 1\n"
    )
    launch = launch_of(tmp_path, text, run=1)
    assert launch.environment == {"MODEL": "M", "TP": "2", "PP": "8"}
    assert values(launch) == {"--layout": "Et|(tt|)*3L", "--recompute": ("a", "b")}
    assert any("line 5: sbatch.sh is started as well" in note for note in launch.notes)
    assert any("a script of its own, which was not read" in note for note in launch.notes)


def test_a_wrapper_without_arguments_still_gives_its_environment(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "TP=2 PP=8 bash other/run.sh\n")
    assert launch.arguments == () and launch.environment == {"TP": "2", "PP": "8"}


def test_hydra_words_are_arguments_of_their_own(tmp_path: Path) -> None:
    text = (
        "HYDRA_FULL_ERROR=1 python3 launcher_scripts/main.py training=gpt3/5b stages=[training] \\\n"
        " +training.model.x=1 ~a.b \\\n"
    )
    launch = launch_of(tmp_path, text)
    assert values(launch) == {
        "training": "gpt3/5b",
        "stages": "[training]",
        "training.model.x": "1",
        "~a.b": None,
    }
    assert launch.trainer == "nemo"


def test_two_dashes_end_the_words_of_a_flag(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "python train.py -N 1 -- sub --config c -- x\n")
    pairs = [(argument.name, argument.value) for argument in launch.arguments]
    assert pairs == [("-N", "1"), ("--", None), ("", "sub"), ("--config", "c"), ("--", None), ("", "x")]


def test_the_training_is_preferred_over_other_programs(tmp_path: Path) -> None:
    text = (
        "python convert.py --a 1 --b 2 --c 3\npip install --no-deps --x --y --z --w t\n"
        f"python other.py --lr 1\npython {A}\n"
    )
    assert launch_of(tmp_path, text).program == "pretrain_gpt.py"


def test_a_configuration_that_decides_and_is_not_read_is_refused(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file a.toml --training.steps 3\n"
    with pytest.raises(InputError, match=r"run\.sh, line 1: --job.config_file a.toml.*hand in that file"):
        launch_of(tmp_path, text)
