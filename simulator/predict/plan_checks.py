"""Checks a plan beyond the sizes of its layout; each error names key, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.provenance import OWN, sourced_numbers
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.overlap import CUTS_GEMMS
from moesim.simulator.layout.dispatch_limits import check_kernels
from moesim.simulator.layout.gradient_sync import check_gradient_sync
from moesim.simulator.layout.parallel import check_expert_overlap, hides_experts, repeats_experts
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.framework import check_framework
from moesim.simulator.schedules import Schedule, awaiting, build, from_csv, validate

# -- overlap checks ----------------------------------------------------------------------------------
# Refuses overlaps that the plan, the model or the schedule does not allow, with the nearest legal
# choice.

TENSOR_KEY = "software.overlap_tensor_parallel"


def check_overlaps(scenario: Scenario, shape: ModelShape, schedule: Schedule, gpus_per_node: int) -> None:
    """Raise InputError for an overlap that frameworks refuse or cannot run on this plan."""
    _check_tensor(scenario, shape, gpus_per_node)
    _check_experts(scenario, shape)
    _check_data_parallel(scenario, schedule)


def _check_tensor(scenario: Scenario, shape: ModelShape, gpus_per_node: int) -> None:
    plan, recipe = scenario.parallel, scenario.recipe
    overlap = scenario.software.overlap_tensor_parallel
    if recipe.tensor_gather == "fp8" and recipe.linear != "fp8":
        raise InputError(
            f"precision.tensor_gather=fp8 with precision.linear={recipe.linear}: only inputs of FP8 GEMMs "
            "are gathered in FP8; use tensor_gather: bf16",
            key="precision.tensor_gather",
            nearest=("bf16",),
        )
    if overlap not in CUTS_GEMMS or plan.tp == 1:
        return
    if not plan.sequence_parallel:
        raise InputError(
            f"{TENSOR_KEY}={overlap} needs parallel.sequence_parallel: true; without it the activations are "
            "all-reduced, which is not cut into pieces (Megatron-LM turns the overlap off)",
            key="parallel.sequence_parallel",
            nearest=(True,),
        )
    if plan.tp > gpus_per_node:
        raise InputError(
            f"{TENSOR_KEY}={overlap} with parallel.tp={plan.tp} on scale-up domains of {gpus_per_node} GPUs: "
            f"its buffers are mapped by the GPUs of one domain; use tp of at most {gpus_per_node}, or "
            "weight-gradient",
            key=TENSOR_KEY,
            nearest=("weight-gradient",),
        )
    latent = any(isinstance(attention, MLA) for attention in shape.attention_by_name.values())
    if overlap == "userbuffers" and latent:
        raise InputError(
            f"{TENSOR_KEY}=userbuffers with multi-head latent attention: Transformer Engine has buffers for "
            "qkv, proj, fc1 and fc2 only; use weight-gradient",
            key=TENSOR_KEY,
            nearest=("weight-gradient",),
        )


def _check_experts(scenario: Scenario, shape: ModelShape) -> None:
    check_expert_overlap(scenario.schedule, scenario.parallel, routed=shape.moe is not None)
    if hides_experts(scenario.schedule) and repeats_experts(scenario.recompute):
        raise InputError(
            f"schedule={scenario.schedule} hides the transfers of experts, which "
            f"recompute={recompute_label(scenario.recompute)} would run again in the backward; use "
            "recompute: selective, or a list of modules without moe",
            key="recompute",
            nearest=("selective",),
        )


def _check_data_parallel(scenario: Scenario, schedule: Schedule) -> None:
    software = scenario.software
    if software.data_parallel_buckets != "megatron":
        if software.overlap_optimizer:
            raise InputError(
                "software.overlap_optimizer needs software.data_parallel_buckets: megatron, whose first "
                "chunk is gathered beside the update of the others",
                key="software.data_parallel_buckets",
                nearest=("megatron",),
            )
        return
    if len(schedule.routes) > 1:
        raise InputError(
            f"software.data_parallel_buckets=megatron with schedule={schedule.name}: Megatron core has no "
            "bidirectional pipeline; use layer",
            key="software.data_parallel_buckets",
            nearest=("layer",),
        )
    if software.overlap_optimizer and len(schedule.stages_on_rank(0)) == 1:
        raise InputError(
            "software.overlap_optimizer updates a rank's other chunks while the first is gathered, and "
            f"parallel.vpp={scenario.parallel.vpp} leaves one chunk a rank; use vpp of at least 2",
            key="parallel.vpp",
            nearest=(2,),
        )


MAX_SCHEDULE_BYTES = 2_000_000
RANGED_KEYS = (
    "routing.expert_load_cv",
    "routing.load.max_vio",
    "variation.clock_cv",
    "variation.jitter_cv",
)
"""Keys of a scenario whose range intervals use."""
SHIPPED_SECTIONS = (
    *("cluster.", "run.price.buy.", "run.failures.", "run.restart.", "run.checkpoint.storage."),
    "run.preemption.",
)
"""Sections that mostly come from shipped data, whose numbers have ranges."""

_SHARE = "prices take {} times the share that the profile's entries state; change one of these"
UNREAD_FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "node.nic_bandwidth_effective": _SHARE.format("nic_bandwidth") + " (*.nic_fraction)",
        "node.storage_nic_bandwidth": "checkpoints go at the rates of run.checkpoint.storage",
        "node.scale_up_switch": "scale_up describes the links",
        "node.scale_up.fabric.link_bandwidth_effective": _SHARE.format("link_bandwidth")
        + " (*.scale_up_fraction)",
        "node.accelerator.scale_up_bandwidth_achievable": _SHARE.format("scale_up_bandwidth")
        + " (*.scale_up_fraction)",
        "node.accelerator.hbm_bandwidth_achievable": _SHARE.format("hbm_bandwidth"),
        "node.accelerator.peak_sustained": "rates of products are the profile's",
        "node.accelerator.clock": "rates of products are the profile's",
        "node.accelerator.clock_sustained": "rates of products are the profile's",
        "node.accelerator.l2": "rates of products are the profile's",
    }
)
"""Figures of a cluster that describe it, and that no prediction reads, with what it reads in their place."""


def unread_figures(cluster: Cluster) -> list[str]:
    """A sentence for every figure that the user set and that no prediction reads."""
    own = [path for path, figure in sourced_numbers(cluster) if figure.source == OWN]
    return [
        f"cluster.{path} is set and no prediction reads it: {why}"
        for path in own
        for key, why in UNREAD_FIGURES.items()
        if path == key or path.startswith(f"{key}.")
    ]


def load_schedule(scenario: Scenario, count: int) -> Schedule:
    """The named schedule, or the CSV file that the scenario names, for `count` micro-batches."""
    plan = scenario.parallel
    if not scenario.schedule.lower().endswith(".csv"):
        try:
            built = build(scenario.schedule, plan.pp, count, plan.vpp)
            return awaiting(built, scenario.software.awaited_sends)
        except InputError as error:
            if error.key != "microbatches":
                raise
            unit = scenario.batch.sequences // count  # the scenario states sequences, not micro-batches
            near = [unit * value for value in error.nearest if isinstance(value, int)]
            raise InputError(str(error), key="batch.sequences", nearest=near) from None
    path = Path(scenario.path(scenario.schedule))
    schedule = from_csv(read_text(path, MAX_SCHEDULE_BYTES, "schedule"), name=path.stem, source=str(path))
    for key, have, want in (
        ("parallel.pp", schedule.pp, plan.pp),
        ("micro-batches", schedule.microbatches, count),
    ):
        if have != want:
            raise InputError(f"schedule: {path} is for {key}={have}, but the scenario has {want}")
    validate(schedule)
    return schedule


def _check_attention(scenario: Scenario, cluster: Cluster) -> None:
    """Raise InputError for attention in FP8 where no kernel runs it."""
    software, accelerator = scenario.software, cluster.accelerator
    if scenario.recipe.attention == "bf16":
        return
    reason = ""
    if software.attention != "flash":
        reason = f"software.attention={software.attention} has no kernels for it"
    elif software.fp8_scales == "current" and accelerator.architecture == "Hopper":
        reason = f"{accelerator.name} has no kernels with current scales, only software.fp8_scales=delayed"
    if reason:
        raise InputError(
            f"precision.attention=fp8: {reason}; use bf16", key="precision.attention", nearest=("bf16",)
        )


FUSES_EXPERTS = "Blackwell"
"""Architecture that the kernels of the fused grouped MLP are written for (cuDNN's `sm100` wrappers)."""


def check_hardware(scenario: Scenario, cluster: Cluster) -> None:
    """Raise InputError for kernels or switches that the cluster does not have."""
    _check_attention(scenario, cluster)
    chosen, accelerator = scenario.communication.in_network, cluster.accelerator
    recipe, blocks = scenario.recipe, scenario.recipe.linear == "fp8" and scenario.recipe.scaling != "tensor"
    if scenario.software.expert_kernels == "fused" and not (
        blocks and accelerator.architecture.startswith(FUSES_EXPERTS)
    ):
        raise InputError(
            f"software.expert_kernels=fused needs block-scaled FP8 on {FUSES_EXPERTS}, and this is "
            f"{recipe.linear} with scaling={recipe.scaling} on {accelerator.name} "
            f"({accelerator.architecture}); use separate",
            key="software.expert_kernels",
            nearest=("separate",),
        )
    if chosen == "none":
        return
    if load_library().in_switch_share(accelerator.architecture) is None:
        raise InputError(
            f"communication.in_network={chosen}: the switches of {accelerator.name} are not known to add up "
            "all-reduces; use none",
            key="communication.in_network",
            nearest=("none",),
        )
    fabric = cluster.network.fabric
    if chosen == "all" and fabric is not None and "roce" in cluster.network.name.lower():
        raise InputError(
            f"communication.in_network=all: SHARP adds up in InfiniBand switches, and network "
            f"{cluster.network.name} is RoCE; use scale-up",
            key="communication.in_network",
            nearest=("scale-up",),
        )


def check_ranges(scenario: Scenario) -> None:
    """Raise InputError for a range that no interval uses, instead of ignoring it."""
    own = scenario.model_copy(update={"profile": ""})  # profiles may state ranges
    for path, number in sourced_numbers(own):
        if number.between is not None and path not in RANGED_KEYS and not path.startswith(SHIPPED_SECTIONS):
            raise InputError(
                f"{path}: between={list(number.between)} is not used by intervals; of a scenario only "
                f"{', '.join(RANGED_KEYS)} and numbers of its cluster may state a range. Use moesim "
                f"sensitivity --range {path}=LOW,HIGH",
                key=path,
            )


def check_combination(scenario: Scenario, schedule: Schedule, shape: ModelShape, gpus_per_node: int) -> None:
    """Raise InputError for choices that are legal on their own but not together, or not modelled together."""
    check_framework(scenario)
    check_overlaps(scenario, shape, schedule, gpus_per_node)
    kernels, ep = scenario.communication.kernels, scenario.parallel.ep
    check_kernels(kernels, ep, shape, schedule.name, schedule.paired)
    check_gradient_sync(scenario.parallel, scenario.software)
    if scenario.parallel.zero_stage == 3 and schedule.paired:
        raise InputError(
            f"parallel.zero_stage=3 with schedule={schedule.name}: parameter gathers have no slot in an "
            "overlapped pair; use zero_stage 0 to 2, or a schedule without pairs such as 1f1b",
            key="parallel.zero_stage",
            nearest=(2,),
        )
