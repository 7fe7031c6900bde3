"""Measured training steps by dispatcher: the same plan with NCCL, DeepEP over UCCL and DeepEP over NVSHMEM.

The shipped rows are those that awsome-distributed-ai published for B300 and H100 over EFA
(`data/published/moe-dispatchers-efa.csv`); `validate --rows` reads others with the same columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest, validate_model
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules.interleaved import INTERLEAVED_1F1B, INTERLEAVED_OVERLAPPED, ONE_F_ONE_B
from moesim.simulator.scoring import file_records, published_records
from moesim.simulator.scoring.order import OrderScore, TimedPlan, order_score

FILE = "moe-dispatchers-efa.csv"
KERNELS = {"nccl-alltoall": "nccl", "deepep-uccl": "uccl-ep", "deepep-nvshmem": "deepep-2025-04"}
"""Our dispatcher for each of the table's."""
NODES = {
    "B300-SXM, EFA 16 x 400 Gb/s a node": "aws-p6-b300",
    "B200-SXM, EFA 8 x 400 Gb/s a node": "aws-p6-b200",
    "H200-SXM, EFA 16 x 200 Gb/s a node": "aws-p5en",
    "H100-SXM, EFA 32 x 100 Gb/s a node": "aws-p5",
}
"""Our node for an accelerator and its fabric."""
UNSTATED, BALANCED = "on, kind not stated", "forced balance"
RECOMPUTE: dict[str, Any] = {"none": "none", "selective": ["core_attn"], "full": "full", UNSTATED: "full"}
"""Megatron core's selective recompute without a list of modules repeats the core attention
(NVIDIA/Megatron-LM@core_v0.17.1 megatron/core/transformer/transformer_config.py:1373). A kind that is not
stated is full, as in the recipe of the only rows with one (`CampaignRecipe`)."""
FRAMEWORKS = {
    "Megatron-Bridge 0.4": "megatron-bridge-0.4",
    "Megatron Core 0.17": "megatron-core-0.17",
    "Megatron Core 0.16": "megatron-core-0.16",
}
"""Our release for words of the column `software`; the first that occurs counts."""


class CampaignRecipe(NamedTuple):
    """What a recipe of Megatron-Bridge 0.4 sets beyond its release, where the campaign left it."""

    recompute: str = "none"
    """That of a row without overlap whose switch RECOMPUTE was empty, which the table calls none."""
    precision: Mapping[str, str] = MappingProxyType({})
    ends_as_layers: bool = False
    """Whether embedding and head count as a layer each, without virtual stages."""
    of_rank: int = 0
    """Layers of every rank but the last, which has the rest; 0: as many on all."""


_LOW = MappingProxyType({"gradients": "bf16", "gradient_reduce": "bf16", "moments": "bf16"})
RECIPES = {
    "qwen3-30b-a3b": CampaignRecipe(recompute="full"),
    "qwen3-235b-a22b": CampaignRecipe(ends_as_layers=True),
    "deepseek-v3": CampaignRecipe(precision=_LOW, of_rank=8),
}
"""Recipes of the campaign (NVIDIA-NeMo/Megatron-Bridge@v0.4.2 src/megatron/bridge/recipes,
`qwen/qwen3_moe.py`, `deepseek/deepseek_v3.py`). Its scripts (awslabs/awsome-distributed-ai, megatron-bridge,
`bench_qwen3_pretrain.py`, `bench_dsv3_pretrain.py`) set recompute only where RECOMPUTE names a kind, and
with expert overlap turn recompute and `delay_wgrad_compute` off."""
COLUMNS = frozenset({"dispatcher", "iteration_s", "fabric", "ep_overlap"})
"""Columns that tell this table from others."""


def _known(names: Mapping[str, object]) -> BeforeValidator:
    def check(text: object) -> object:
        if text not in names:
            raise ValueError(
                f"{text!r} is not known{nearest(str(text), list(names))}; known: {', '.join(names)}"
            )
        return text

    return BeforeValidator(check)


class DispatcherRow(Frozen):
    """One measured step; the fields are the columns of the table."""

    id: str
    model: str
    hardware: str
    n_gpus: PositiveInt
    gpus_per_node: PositiveInt
    fabric: str
    tp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt
    ep: PositiveInt
    dp: PositiveInt
    microbatch: PositiveInt
    global_batch: PositiveInt
    sequence: PositiveInt
    precision: str
    recompute: Annotated[str, _known(RECOMPUTE)]
    dispatcher: Annotated[str, _known(KERNELS)]
    ep_overlap: Literal["on", "off"]
    routing: str
    software: str
    iteration_s: PositiveFloat
    model_tflops_per_gpu: str = ""
    campaign: str = ""
    remark: str = ""

    @property
    def layers(self) -> int | None:
        """Layers that the remark states in place of the model's."""
        stated = re.search(r"(\d+) layers", self.remark)
        return int(stated[1]) if stated else None

    @property
    def family(self) -> tuple[str, ...]:
        """What stays the same among rows that are compared; overlapped rows are compared among themselves."""
        depth = f"{self.layers} layers" if self.layers else "all layers"
        return (
            self.model, depth, self.hardware, f"{self.n_gpus} GPUs", f"sequence {self.sequence}",
            f"batch {self.global_batch}", self.precision, f"overlap {self.ep_overlap}",
        )  # fmt: skip


def dispatcher_rows(file: Path | None = None) -> tuple[DispatcherRow, ...]:
    """The shipped rows, or those of a file. Raises InputError for a malformed row."""
    records = published_records(FILE) if file is None else file_records(file)
    return tuple(
        validate_model(DispatcherRow, record, f"{file.name if file else FILE}:{n}")
        for n, record in enumerate(records, 2)
    )


def scenario_of(row: DispatcherRow) -> Scenario:
    """The scenario of a row, on the trainer release that it names. Raises InputError for an unknown one."""
    framework = next((name for words, name in FRAMEWORKS.items() if words in row.software), None)
    if framework is None:
        raise InputError(f"{row.id}: no trainer release for {row.software!r}; known: {', '.join(FRAMEWORKS)}")
    if row.n_gpus % row.gpus_per_node:
        raise InputError(f"{row.id}: {row.n_gpus} GPUs do not fill nodes of {row.gpus_per_node}")
    if row.tp * row.pp * row.dp != row.n_gpus:
        raise InputError(f"{row.id}: tp x pp x dp = {row.tp * row.pp * row.dp} are not its {row.n_gpus} GPUs")
    if row.routing != BALANCED:
        raise InputError(f"{row.id}: routing {row.routing!r} has no expert load here; known: {BALANCED}")
    machine = f"{row.hardware}, {row.fabric}"
    if machine not in NODES:
        raise InputError(
            f"{row.id}: no node is known for {machine}{nearest(machine, list(NODES))}; known: "
            f"{'; '.join(NODES)}"
        )
    one = INTERLEAVED_1F1B if row.vpp > 1 else ONE_F_ONE_B
    fields: dict[str, Any] = {
        "name": row.id,
        "model": row.model,
        "cluster": {"node": NODES[machine], "nodes": row.n_gpus // row.gpus_per_node},
        "parallel": {
            "tp": row.tp, "pp": row.pp, "vpp": row.vpp, "ep": row.ep, "microbatch": row.microbatch,
            "zero_stage": 1, "sequence_parallel": row.tp > 1,
        },
        "schedule": (INTERLEAVED_OVERLAPPED if row.ep_overlap == "on" else one).name,
        "batch": {"sequences": row.global_batch, "sequence_length": row.sequence},
        "precision": row.precision,
        "recompute": RECOMPUTE[row.recompute],
        "communication": {"kernels": KERNELS[row.dispatcher]},
        "routing": {"expert_load_cv": 0.0},
        "software": {"framework": framework},
        "run": {"tokens": float(row.global_batch * row.sequence)},
    }  # fmt: skip
    if (recipe := recipe_of(row)) is not None:
        fields |= _as_recipe(row, recipe)
    if row.layers is not None:
        fields["model"] = load_model(row.model).model_dump() | {"n_layers": row.layers}
    scenario = load_scenario(fields)
    if scenario.machine.node.n_gpus != row.gpus_per_node:
        raise InputError(
            f"{row.id}: nodes of {row.gpus_per_node} GPUs, where ours of {row.hardware} have "
            f"{scenario.machine.node.n_gpus}"
        )
    return scenario


def recipe_of(row: DispatcherRow) -> CampaignRecipe | None:
    """The recipe behind a row of the campaign; None for rows of others and models without one here."""
    return RECIPES.get(row.model) if row.campaign and "Megatron-Bridge 0.4" in row.software else None


def _as_recipe(row: DispatcherRow, recipe: CampaignRecipe) -> dict[str, Any]:
    """Fields of a scenario that a recipe decides."""
    fields: dict[str, Any] = {
        "software": {"framework": "megatron-bridge-0.4", "loss": "fused"},
        "communication": {"kernels": KERNELS[row.dispatcher], "delay_weight_gradients": False},
    }
    if row.precision in PRECISIONS:
        fields["precision"] = PRECISIONS[row.precision].model_dump() | dict(recipe.precision)
    if row.recompute == "none" and row.ep_overlap == "off":
        fields["recompute"] = recipe.recompute
    layers, stages = row.layers or load_model(row.model).n_layers, row.pp * row.vpp
    ends = int(recipe.ends_as_layers and row.vpp == 1)
    each = recipe.of_rank // row.vpp or (layers + 2 * ends) // stages
    last = layers - each * (stages - 1) + ends
    if row.pp > 1 and 0 < last <= each:
        fields["stages"] = {"layers": (each - ends, *(each,) * (stages - 2), last)}
    return fields


def left_out(row: DispatcherRow) -> tuple[str, ...]:
    """What a row states and its prediction does not express."""
    recipe = recipe_of(row)
    if recipe and recipe.recompute != "none" and (row.recompute, row.ep_overlap) == ("none", "off"):
        return (f"no recompute, which its recipe turns on and no switch off: priced as {recipe.recompute}",)
    return ("recompute of a kind that is not stated: priced as full",) if row.recompute == UNSTATED else ()


class ScoredDispatcherRow(Frozen):
    """A row beside its prediction; `relative_error` = predicted / measured - 1, None where it was refused."""

    id: str
    dispatcher: str
    measured_s: float
    predicted_s: float | None = None
    relative_error: float | None = None
    lower_bound_s: float | None = None
    upper_bound_s: float | None = None
    left_out: tuple[str, ...] = ()
    """What the row states and the prediction does not express."""
    refused: str = ""


def score_dispatcher_row(row: DispatcherRow) -> ScoredDispatcherRow:
    """Predict and score one row."""
    common = {"id": row.id, "dispatcher": row.dispatcher, "measured_s": row.iteration_s}
    try:
        step = simulate(scenario_of(row)).step
    except (InputError, InfeasibleError) as error:
        return ScoredDispatcherRow(**common, refused=str(error))
    return ScoredDispatcherRow(
        **common,
        predicted_s=step.time_s,
        relative_error=step.time_s / row.iteration_s - 1.0,
        lower_bound_s=step.lower_bound_s,
        upper_bound_s=step.upper_bound_s,
        left_out=left_out(row),
    )


def dispatcher_order(
    rows: Sequence[DispatcherRow], scored: Sequence[ScoredDispatcherRow]
) -> list[OrderScore]:
    """The order of all plans, and of the dispatchers alone with everything else the same."""
    plans, alone = [], []
    for row, one in zip(rows, scored, strict=True):
        if one.predicted_s is not None:
            steps = row.iteration_s, one.predicted_s
            degrees = (row.tp, row.pp, row.vpp, row.ep)
            plans.append(TimedPlan(row.id, row.family, (row.dispatcher, row.microbatch, *degrees), *steps))
            same = (*row.family, f"micro-batch {row.microbatch}", f"EP{row.ep}", f"TP{row.tp} PP{row.pp}")
            alone.append(TimedPlan(row.id, same, row.dispatcher, *steps))
    scores = order_score("over EFA, plans", plans), order_score("over EFA, dispatchers alone", alone)
    return [score for score in scores if score is not None]
