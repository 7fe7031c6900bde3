"""Turns a published row into the scenario that was run: plan, precision and framework behaviour."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.network import Network, load_network
from moesim.hwmodels.node import Node, load_node
from moesim.hwmodels.provenance import SourcedFraction
from moesim.hwmodels.validation import nearest
from moesim.simulator.frameworks.registry import NONE
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import MODULES, Recompute, parse_recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.run_plan import RunPlan
from moesim.simulator.scenario.sections import Batch, Communication, Routing, Stages
from moesim.simulator.schedules import SCHEDULES, Awaited, name_from
from moesim.simulator.schedules.interleaved import INTERLEAVED_1F1B, INTERLEAVED_OVERLAPPED, ONE_F_ONE_B
from moesim.simulator.scoring import mlperf
from moesim.simulator.scoring.scoreboard.configurations import differs_from, left_out_of, published_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow
from moesim.simulator.scoring.scoreboard.shapes import left_out_of_shape, shape_of

KEPT_AFTER_FORWARD = re.compile(r"no reshard|without reshard|not reshard|reshard\w*[ =:]+false", re.I)
REPLICATED = re.compile(r"shard=(\d+) x dp (\d+)")
EXPRESSED = ("layernorm", "rmsnorm", "norm", "mla_up_proj", "mla up-proj", "moe_act")
"""Modules that the policy `selective` recomputes: norms, MLA up-projections, product of gate and up."""
OVERLAPPED = re.compile(
    r"(?<!no )(?<!not )(?<!without )(?:\boverlap\w* with (?:the )?(?:a2a|all-to-all)|"
    r"\b(?:a2a|ep|all-to-all)[ -]overlap|a2a_overlap=1)",
    re.I,
)
"""Matches notes that say that expert-parallel all-to-all is hidden behind compute."""


class Sharding(NamedTuple):
    """ZeRO stage of a plan, whether a table names FSDP of PyTorch or JAX, and GPUs of a sharding group."""

    zero_stage: int
    fsdp: bool
    group: int | None = None


def sharding_of(row: OpenRow) -> Sharding:
    """Sharding of a row. Megatron's distributed optimizer is ZeRO 1; FSDP is 3, or 2 without resharding.

    Raises InputError for unknown words.
    """
    text = row.zero_or_fsdp.lower()
    if text in ("", "none", "ddp"):
        return Sharding(0, False)
    fsdp = "fsdp" in text
    if "zero2" in text or "zero-2" in text or KEPT_AFTER_FORWARD.search(text):
        return Sharding(2, fsdp)
    if fsdp or "zero3" in text or "zero-3" in text:
        found = REPLICATED.search(text)
        if found and int(found.group(2)) > 1:
            return Sharding(3, fsdp, group=int(found.group(1)))
        return Sharding(3, fsdp)
    if "zero1" in text or "zero-1" in text or "distopt" in text:
        return Sharding(1, False)
    raise InputError(f"{row.id}: the sharding {row.zero_or_fsdp!r} is not known")


def recompute_of(row: OpenRow) -> tuple[Recompute | None, tuple[str, ...]]:
    """(recompute that a table states, notes on what it does not express); None if it states none.

    Megatron-Core's names of modules are taken as a list; other words stand for the nearest policy.
    Raises InputError for unknown words.
    """
    text = row.recompute.lower().strip()
    if text == "":
        return None, ()
    if text in ("none", "no", "off"):
        return "none", ()
    if text in ("op", "selective (op)", "selective op", "sac (op)"):
        return "op", ()
    if text == "full":
        return "full", ()
    named = re.fullmatch(r"selective(?: *\((.*)\))?", text)
    if named is None:
        raise InputError(f"{row.id}: the recompute policy {row.recompute!r} is not known")
    modules = [word.strip() for word in (named.group(1) or "").split(",") if word.strip()]
    if modules and all(word in MODULES for word in modules):
        return parse_recompute(modules), ()
    other = [word for word in modules if word not in EXPRESSED]
    if not other:
        return "selective", ()
    return "selective", (
        f"recompute of {', '.join(other)} is not expressed: priced as the policy selective (norms, MLA "
        "up-projections, products of gate and up)",
    )


def expert_tp_of(row: OpenRow) -> int:
    """Tensor parallelism of the experts as the notes of a row state it; 1 if they do not."""
    if "ETP==TP" in row.notes:
        return row.tp
    return 4 if "ETP=4" in row.notes else 1


def schedule_of(row: OpenRow) -> str:
    """The pipeline schedule of a row. Raises InputError for an unknown one."""
    text = row.schedule.lower()
    spellings = {
        spelling.lower(): spec
        for spec in SCHEDULES.values()
        for spelling in (spec.name, spec.names_elsewhere.get("torch", spec.name))
    }
    if text and text not in spellings:
        raise InputError(f"{row.id}: the schedule {row.schedule!r} is not known")
    # The stages on a rank decide whether 1F1B is interleaved, whatever the table calls it.
    if not text or "megatron-lm" in spellings[text].names_elsewhere:
        return name_from("megatron-lm", free_vpp=row.vpp > 1)
    return spellings[text].name


def says_overlapped(row: OpenRow) -> bool:
    """Whether the notes of a row say that all-to-alls run behind the compute of another micro-batch."""
    return OVERLAPPED.search(row.notes) is not None


class RowMachine(NamedTuple):
    """Names of a node, of the network between nodes, and of the profile that prices them."""

    node: str
    network: str
    profile: str


MACHINES: dict[str, RowMachine] = {
    "A100-80GB-SXM": RowMachine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "A100-40GB-SXM": RowMachine("hgx-a100", "ft3-ib-400g", "a100-layers"),
    "H100-SXM": RowMachine("hgx-h100", "ft3-ib-400g", "h100-products"),
    "A800-80GB-SXM": RowMachine("hgx-a800", "ft3-ib-400g", "a100-layers"),
    "H200-SXM": RowMachine("hgx-h200", "ft3-ib-400g", "h200-products"),
    "H800-SXM": RowMachine("hgx-h800", "ft3-ib-400g", "h800-from-h200"),
    "H100-SXM-96GB-HBM2e": RowMachine("hgx-h100-hbm2e", "ft3-ib-400g", "h100-hbm2e-products"),
    "B200-SXM": RowMachine("hgx-b200", "ft3-ib-400g", "b200-layers"),
    "B300-SXM": RowMachine("hgx-b300", "ft3-roce-800g", "b300-layers"),
    "GB200": RowMachine("gb200-nvl72-64", "ft3-ib-400g", "gb200-layers"),
    "GB300": RowMachine("gb300-nvl72-64", "ft3-roce-800g", "gb300-layers"),
}
"""Machine of each accelerator; its profile is the best one from kernels of that accelerator, not from any
training step."""

HBM2E = "H100-SXM-96GB-HBM2e"
VARIANT = re.compile(r"HBM2e|\b96 ?GB\b", re.I)
POWER = re.compile(r"\b(\d{3,4}) ?W\b")
LIMITS = {"H100-SXM": 700, HBM2E: 500}
"""Power limit (W) of an accelerator's description."""

JEAN_ZAY_NIC = {
    "value": 3.19e9,
    "kind": "derived",
    "source": "bigscience-workshop/bigscience@9e64edec experiments/bandwidth/all_reduce_bench-a100-n4.txt: "
    "NCCL 2.10.3 on 4 nodes of 8 A100 moves 40.8 Gb/s through one of a node's 4 Omni-Path adapters, by way "
    "of host memory (V100 nodes: 42.4 Gb/s an adapter); half of that for each of an adapter's two GPUs, over "
    "the 0.8 of this rate that prices take",
    "date": "2022-01-28",
}
A100_40GB = {
    "value": 1.555e12,
    "kind": "spec",
    "source": "NVIDIA A100 datasheet: 1,555 GB/s for the 40 GB part",
    "date": "2021-06",
}


def hardware_of(row: OpenRow) -> str:
    """The name of the accelerator of a row; power and memory variants have their own names.

    Raises InputError for hardware, a memory or a power limit without a description.
    """
    text, name = f"{row.hardware} {row.notes}", row.hardware
    if name.startswith("H100") and VARIANT.search(text):
        name = HBM2E
    if name not in MACHINES:
        raise InputError(
            f"{row.id}: no machine for {row.hardware}{nearest(row.hardware, list(MACHINES))}; there "
            f"are machines for {', '.join(MACHINES)}"
        )
    limit = POWER.search(text)
    if limit and int(limit.group(1)) != LIMITS.get(name, int(limit.group(1))):
        if name == "H100-SXM" and int(limit.group(1)) == LIMITS[HBM2E]:
            return HBM2E
        raise InputError(f"{row.id}: no description of {row.hardware} at {limit.group(1)} W")
    return name


def left_out_of_machine(row: OpenRow) -> tuple[str, ...]:
    """Notes on facts of a row's machine that are not priced."""
    if row.hardware in MACHINES and hardware_of(row) == HBM2E:
        return ("the rates that this accelerator holds at 500 W were not published: products as at 700 W",)
    return ()


def machine_of(row: OpenRow) -> tuple[Cluster, str]:
    """(cluster, profile name) of a row. Raises InputError for hardware without a machine here."""
    hardware = hardware_of(row)
    slow_network = row.group == "bloom-a100"
    profile = published_of(row).profile
    if profile is None or hardware == HBM2E:
        profile = MACHINES[hardware].profile
    return _cluster(hardware, row.n_gpus, slow_network), profile


@lru_cache(maxsize=256)
def _cluster(hardware: str, n_gpus: int, slow_network: bool) -> Cluster:
    machine = MACHINES[hardware]
    node = load_node(machine.node)
    if n_gpus < node.n_gpus:
        node = _resized(node, n_gpus)
    if hardware == "A100-40GB-SXM":
        node = _smaller_memory(node)
    if slow_network:
        node = Node.model_validate({**_fields(node), "nic_bandwidth": JEAN_ZAY_NIC})
    if n_gpus % node.n_gpus:
        raise InputError(f"{n_gpus} GPUs do not fill nodes of {node.n_gpus}")
    nodes = n_gpus // node.n_gpus
    network: Network = load_network("single-node" if nodes == 1 else machine.network)
    return Cluster(name=f"{hardware}-{n_gpus}", title=hardware, node=node, nodes=nodes, network=network)


def _fields(part: Node) -> dict[str, object]:
    return {name: getattr(part, name) for name in type(part).model_fields}


def _resized(node: Node, n_gpus: int) -> Node:
    """The node with only the `n_gpus` that a job uses."""
    gpus = node.gpus.model_copy(update={"value": float(n_gpus), "note": "the GPUs of the job"})
    return node.model_copy(update={"gpus": gpus, "scale_up": None})


def _smaller_memory(node: Node) -> Node:
    part = node.accelerator
    hbm = part.hbm.model_copy(update={"value": 40 * 2.0**30}) if part.hbm else None
    bandwidth = type(part.hbm_bandwidth).model_validate(A100_40GB) if part.hbm_bandwidth else None
    accelerator = part.model_copy(update={"hbm": hbm, "hbm_bandwidth": bandwidth})
    return node.model_copy(update={"accelerator": accelerator})


ONE_FORWARD_ONE_BACKWARD = (INTERLEAVED_1F1B.name, ONE_F_ONE_B.name)
EXPOSED = ("all-to-all runs behind the compute of another micro-batch (1F1B overlap); priced as exposed",)

BALANCED = SourcedFraction(
    value=0.0,
    kind="assumed",
    source="benchmarks force balanced routing, or the row says nothing of its load",
    date="2026-11-20",
)
POSTED_SENDS = ("NVIDIA-NeMo/Automodel", "pytorch/torchtitan")
"""Sources whose pipelines are PyTorch's, which posts sends and goes on."""
AWAITED_SENDS = (
    "Narayanan et al. 2021",
    "Korthikanti et al. 2022",
    "Smith et al. 2022",
    "bigscience-workshop",
)
"""Sources of Megatron-LM before `overlap_p2p_comm` (2023), which waited for every send. Megatron core since
then waits for those of warm-up and flush unless `overlap_p2p_comm_warmup_flush` is set, which no published
configuration does."""
LEAST_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Policies to try in order if neither a row nor its configuration states one; the first that fits is used."""


def policies_of(row: OpenRow) -> tuple[Recompute, ...]:
    """Recompute policies to try in order; only one if the row or its configuration states it."""
    if row.unread:
        raise InputError(f"{row.id}: {row.unread}")
    if mlperf.is_run(row.id, row.n_gpus, row.gbs_seqs):
        return (mlperf.scenario_of(row.id).recompute,)
    published = published_of(row)
    stated, _ = recompute_of(row)
    if stated == "selective" and published.selective_means is not None:
        return (published.selective_means,)
    policy = stated or published.recompute
    return LEAST_RECOMPUTE if policy is None else (policy,)


def missing_from(row: OpenRow) -> str:
    """First input of a prediction that neither the row nor its configuration states; empty if none."""
    needed = {
        "the sequence length": row.seq,
        "the global batch": row.gbs_seqs,
        "the number of GPUs": row.n_gpus,
        "the precision": row.precision,
        "the degree of expert parallelism": row.arch == "dense" or row.ep or published_of(row).ep,
        "the micro-batch": row.mbs,
    }
    for what, known in needed.items():
        if not known:
            return f"{what} is not stated"
    if row.published_step_s is not None:
        return ""
    what = "an MFU without its" if row.metric == "mfu" else "FLOP/s without their"
    return f"{what} count of FLOPs was published; notes that say causal or full attention give it"


def unstated_of(row: OpenRow) -> str:
    """What an incomplete row leaves open beyond `missing_from`; empty if nothing."""
    if row.complete == "yes":
        return ""
    if "vpp" in row.schedule or "vpp" in row.notes:
        return "the number of virtual stages is not stated"
    stated = recompute_of(row)[0] or published_of(row).recompute
    return "" if stated and row.complete == "partial" else "the source describes the run in part"


def scenario_of(row: OpenRow, recompute: Recompute) -> Scenario:
    """The scenario of a row with one recompute policy. Raises InputError for a row that has none."""
    missing = missing_from(row)
    if missing:
        raise InputError(f"{row.id}: {missing}")
    if mlperf.is_run(row.id, row.n_gpus, row.gbs_seqs):
        return mlperf.scenario_of(row.id)
    precision = precision_of(row)
    shape = shape_of(row)
    cluster, profile = machine_of(row)
    unstated = unstated_of(row)
    if unstated:
        raise InputError(f"{row.id}: {unstated}")
    return Scenario(
        name=row.id,
        description=row.source,
        model=shape,
        cluster=cluster,
        profile=profile,
        precision=precision,
        parallel=plan_of(row),
        schedule=_schedule_of(row),
        batch=Batch(sequences=row.gbs_seqs, sequence_length=row.seq),
        stages=stages_of(row, shape),
        communication=communication_of(row),
        recompute=recompute,
        routing=Routing(expert_load_cv=BALANCED),
        run=RunPlan(tokens=float(row.gbs_seqs * row.seq)),
        software=software_of(row),
    )


def left_out(row: OpenRow) -> tuple[str, ...]:
    """Notes on what the row and its configurations state and the prediction does not express."""
    exposed = says_overlapped(row) and _schedule_of(row) != INTERLEAVED_OVERLAPPED.name
    notes = (
        *row.remarks,
        *left_out_of(row),
        *left_out_of_shape(row),
        *recompute_of(row)[1],
        *(EXPOSED if exposed else ()),
    )
    return tuple(dict.fromkeys((*notes, *differs_from(row), *left_out_of_machine(row))))


def _schedule_of(row: OpenRow) -> str:
    """The pipeline schedule; pairs of overlapped micro-batches where all-to-alls hide behind compute."""
    name = schedule_of(row)
    hidden = published_of(row).overlap_expert_parallel or says_overlapped(row)
    # Megatron core pairs interleaved stages, and micro-batches of a run without a pipeline.
    paired = row.arch == "moe" and hidden and (row.vpp > 1 or row.pp == 1)
    return INTERLEAVED_OVERLAPPED.name if paired and name in ONE_FORWARD_ONE_BACKWARD else name


def _margin_of(row: OpenRow) -> int | None:
    """SMs that GEMMs leave free: none in Megatron's overlap, whose scripts set a margin for norms only.

    Source: NVIDIA-NeMo/Megatron-Bridge v0.1.0rc4 to v0.6.0, scripts/performance: NVTE_FWD_LAYERNORM_SM_MARGIN
    and its backward twin are set, NVTE_EXT_MARGIN_SM is not.
    """
    return 0 if _schedule_of(row) == INTERLEAVED_OVERLAPPED.name else None


def plan_of(row: OpenRow) -> ParallelPlan:
    """Degrees of parallelism and sharding as published."""
    published = published_of(row)
    zero = sharding_of(row).zero_stage if published.zero_stage is None else published.zero_stage
    split, stated = published.sequence_parallel, sharding_of(row).group
    group = published.shard_group or stated
    return ParallelPlan(
        tp=row.tp,
        pp=row.pp,
        ep=row.ep or published.ep or 1,
        cp=row.cp,
        vpp=row.vpp,
        microbatch=published.run_mbs or row.mbs,
        zero_stage=zero,
        shard_group=None if group == row.n_gpus // row.pp else group,
        # Where a table names the replicas of a shard, they hold its optimizer states too.
        shard_optimizer_over_groups=stated is None and published.shard_optimizer_over_groups is not False,
        sequence_parallel=row.tp > 1 and split is not False,
        expert_tp=published.expert_tp or expert_tp_of(row),
    )


def precision_of(row: OpenRow) -> Precision:
    """Formats of a row. FP16 counts as BF16; FP8 is scaled by tiles or tensors, and keeps BF16 activations.

    MXFP8 and NVFP4 have their scales by blocks. Raises InputError for an unknown precision.
    """
    published, text = published_of(row), row.precision
    if "fp8" not in text and text not in ("bf16", "fp16", "nvfp4"):
        raise InputError(f"{row.id}: precision {text!r} is not known")
    fp8 = "fp8" in text
    scaling: Literal["tile", "tensor", "mx"] = "tensor" if fp8 else "tile"
    if fp8 and ("mx" in text or published.fp8_scales == "mx"):
        scaling = "mx"
    elif fp8 and ("block" in text or published.fp8_scales == "tile"):
        scaling = "tile"
    rows = "rowwise" in text
    return Precision(
        linear="fp4" if text == "nvfp4" else "fp8" if fp8 else "bf16",
        scaling=scaling,
        attention=published.attention_format or "bf16",
        loss="bf16" if published.software.loss == "fused" else "fp32",
        parameters=published.parameters or "bf16",
        master_weights=published.master_weights or "fp32",
        moments=published.moments or "fp32",
        gradients=published.gradients or "fp32",
        gradients_twice=bool(published.gradients_twice),
        # Transformer Engine's modules gather the inputs and gradients that they have quantised.
        # torchtitan gathers in BF16 where a row has a scale (models/llama3/infra/parallelize.py).
        tensor_gather=published.tensor_gather or ("fp8" if fp8 and not rows else "bf16"),
        gradient_reduce=published.gradient_reduce or "fp32",
        # Parameters of MXFP8 are gathered in BF16, in the gradients' buffer, and quantised afterwards
        # (NVIDIA/Megatron-LM@d98e8a64dd param_and_grad_buffer.py:303; Megatron-Bridge asserts its flag).
        parameter_gather="bf16" if scaling == "mx" else published.parameter_gather or "bf16",
    )


def stages_of(row: OpenRow, shape: ModelShape) -> Stages:
    """Layers as published, else spread evenly as Megatron-LM does; balanced if they do not divide evenly."""
    n, published = row.pp * row.vpp, published_of(row)
    if published.stages is not None:
        return Stages(layers=published.stages)
    if published.embedding_as_layers and shape.n_layers % n and not (shape.n_layers + 2) % n:
        each = (shape.n_layers + 2) // n
        return Stages(layers=(each - 1, *(each,) * (n - 2), each - 1))
    if n == 1 or shape.n_layers % n:
        return Stages()
    return Stages(layers=(shape.n_layers // n,) * n)


def communication_of(row: OpenRow) -> Communication:
    """The dispatcher and its SMs, where a configuration states their number."""
    published = published_of(row)
    stated = {} if published.dispatcher_sms is None else {"sms": published.dispatcher_sms}
    return Communication(
        kernels=dispatcher_of(row),
        library_sms=published.library_sms,
        gemm_margin=_margin_of(row),
        **stated,
    )


def dispatcher_of(row: OpenRow) -> str:
    """DeepEP if the row or its configuration names it, else NCCL's all-to-all."""
    return published_of(row).dispatcher or ("deepep-2025-04" if "DeepEP" in row.notes else "nccl")


def software_of(row: OpenRow) -> Software:
    """Behaviour of the framework, from the configurations behind a row, with no release's own answers.

    The defaults are fused kernels, collectives of data and context parallelism that hide behind compute, and
    those of tensor parallelism as Transformer Engine runs them without user buffers.
    """
    published = published_of(row)
    current = published.fp8_scales is None and row.precision in ("fp8-cs", "fp8-rowwise")
    usual = {
        "framework": NONE,
        "weight_gradients": "written" if sharding_of(row).fsdp else "accumulated",
        "parameters_copied": row.zero_or_fsdp.startswith("fsdp2"),
        "overlap_tensor_parallel": "weight-gradient",
        "overlap_context_parallel": True,
        "ring_attention": "pieces",
        "overlap_data_parallel": True,
    }
    always = {
        "fp8_scales": "current" if published.fp8_scales == "current" or current else "delayed",
        "tied_tables_reduced": True,
        "end_collectives": True,
        "awaited_sends": _awaited_sends(row),
    }
    stated = published.software.model_dump(exclude_unset=True)
    return Software.model_validate(usual | stated | always | launching_of(row))


HOSTS = {"GB": "grace-gb200", "A100": "epyc-7742", "MI": "epyc-9004"}
"""Hosts by the beginning of an accelerator's name: of an NVL72 tray, a DGX A100 and an Instinct node. A host
without published launch times is assumed to be as fast as that of a DGX H100."""
OTHER_HOST = "xeon-8480c"
MEGATRON_SOURCES = ("MoE Parallel Folding", "NVIDIA/NeMo")
"""Beginnings of sources whose runs are Megatron core's, where no configuration says so."""


def launching_of(row: OpenRow) -> dict[str, Any]:
    """The switches of kernel launches: the host, the module library and the CUDA graphs of a row."""
    stated = published_of(row).software
    megatron = stated.layer_kernels == "megatron-te" or row.source.startswith(MEGATRON_SOURCES)
    usual = "megatron-core" if megatron else "transformer-engine"
    return {
        "host": next((host for begin, host in HOSTS.items() if row.hardware.startswith(begin)), OTHER_HOST),
        "modules": stated.modules if "modules" in stated.model_fields_set else usual,
        "cuda_graphs": stated.cuda_graphs,
    }


def _awaited_sends(row: OpenRow) -> Awaited:
    if row.source.startswith(POSTED_SENDS):
        return "schedule"
    return "all" if row.source.startswith(AWAITED_SENDS) else "edges"
