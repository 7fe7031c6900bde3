"""Launch files that set variables such as TP=2 and start another script, which is not read."""

from __future__ import annotations

from dataclasses import replace

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.launch import LaunchFile, Machine
from moesim.simulator.trainers.meaning.given import StatedArgument, shown_value
from moesim.simulator.trainers.meaning.rows import MeaningRow
from moesim.simulator.trainers.meaning.table import Table

SHORTHAND = {
    "TP": "tensor-model-parallel-size",
    "PP": "pipeline-model-parallel-size",
    "EP": "expert-model-parallel-size",
    "CP": "context-parallel-size",
    "ETP": "expert-tensor-parallel-size",
    "VPP": "num-virtual-stages-per-pipeline-rank",
    "MBS": "micro-batch-size",
    "GBS": "global-batch-size",
    "SEQ_LEN": "seq-length",
}
"""Variables that users of Megatron-LM give to their scripts (yanring/Megatron-MoE-ModelZoo@e8650517)."""

NODES = "NNODES"

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub")
_OFF = ("", "false", "none")


def starts_another_script(launch: LaunchFile) -> bool:
    """Whether the file starts a script instead of a training program, so that it holds a part only."""
    return launch.program is not None and launch.program.lower().endswith(_SCRIPTS)


def with_nodes(launch: LaunchFile, base: Scenario) -> LaunchFile:
    """The launch with the nodes of its variable NNODES, where it names no machine itself."""
    value = launch.environment.get(NODES)
    if (
        launch.machine.nodes is not None
        or not isinstance(value, str)
        or not value.isdigit()
        or len(value) > 7
    ):
        return launch
    gpus = launch.machine.gpus_per_node or base.machines[0].node.n_gpus
    return replace(launch, machine=Machine(int(value), gpus, {"nodes": f"the variable {NODES}"}))


def read_variables(launch: LaunchFile, stated: dict[str, StatedArgument], table: Table) -> list[MeaningRow]:
    """Add the arguments that variables stand for to `stated`, and return rows on all other variables."""
    rows = []
    for name, value in launch.environment.items():
        text = shown_value(value)
        if text.lower() in _OFF or name == NODES:
            continue
        argument = SHORTHAND.get(name)
        if argument is None:
            meaning = f"the direction is unknown: a variable for {launch.program}, which is not read"
            rows.append(MeaningRow(name, text, "not priced", meaning, "environment"))
        elif argument not in stated:
            stated[argument] = StatedArgument(name, value, "environment", table.entries[argument])
    return rows
