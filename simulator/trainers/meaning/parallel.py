"""Meaning of the arguments on GPUs, degrees of parallelism, batch, sharding and pipeline stages."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import hides_experts, repeats_experts
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES, name_from
from moesim.simulator.schedules.interleaved import INTERLEAVED_OVERLAPPED, per_round
from moesim.simulator.trainers.jobs import MOST_GPUS_OF_A_HOST
from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.meaning.given import FIRST, LAST, LAYERS, LAYOUT, STAGES, Given, unknown_value
from moesim.simulator.trainers.meaning.table import MeaningRow
from moesim.simulator.trainers.megatron.layout import expand_layout, layers_of_layout, mtp_stage_of_layout

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage of each value of --data-parallel-sharding-strategy."""

NEWEST_STRATEGY = "optim_grads_params"
"""Default of --data-parallel-sharding-strategy in Megatron-LM@d98e8a64; core_v0.14.0 had no_shard."""

_KEYS = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
}


class Degrees(Struct, frozen=True):
    """Degrees of parallelism. `dp` is the data-parallel degree of `n_gpus` GPUs."""

    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int
    dp: int
    n_gpus: int
    microbatch: int


def read_degrees(given: Given, base: Scenario, n_gpus: int, experts: bool, like_base: bool) -> Degrees:
    """Set parallel, batch and sharding keys; what is absent is Megatron-LM's default, or the base's.

    Raises InputError where the data-parallel degree or the number of micro-batches is no whole number.
    """
    sizes = {}
    for name, key in _KEYS.items():
        default = getattr(base.parallel, key) if like_base and (key != "ep" or experts) else 1
        sizes[key] = given.integer(name, default, most=1_000_000)
        if key != "ep" or experts or given.has(name):
            given.set(f"parallel.{key}", sizes[key], name)
    tp, pp, cp, ep = sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"]
    if n_gpus % (tp * pp * cp):
        places = "; ".join(given.place(name) for name in _KEYS if given.has(name))
        raise InputError(
            f"{n_gpus} GPUs are no multiple of tp x pp x cp = {tp} x {pp} x {cp} = {tp * pp * cp}, so the "
            f"data-parallel degree is no whole number; change the GPUs or a degree ({places or 'the base'})"
        )
    dp = n_gpus // (tp * pp * cp)
    expert_tp = 1
    if experts:
        default = base.parallel.expert_tp if like_base else sizes["tp"]
        expert_tp = given.integer("expert-tensor-parallel-size", default)
        note = "" if given.has("expert-tensor-parallel-size") or like_base else "as the tensor-parallel size"
        given.set("parallel.expert_tp", expert_tp, "expert-tensor-parallel-size", note=note)
        if tp * cp * dp % (ep * expert_tp):
            raise InputError(
                f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {expert_tp} does not "
                f"divide the {tp * cp * dp} GPUs of a pipeline rank (tp x cp x dp); change one of them"
            )
    elif ep > 1:
        raise InputError(
            f"{given.place('expert-model-parallel-size')}: the model has no experts (--num-experts)"
        )
    wanted = given.flag("sequence-parallel")
    if like_base and not given.has("sequence-parallel"):
        wanted = base.parallel.sequence_parallel
    note = "Megatron-LM drops it where the tensor-parallel size is 1" if wanted and tp == 1 else ""
    given.set("parallel.sequence_parallel", wanted and tp > 1, "sequence-parallel", note=note)
    microbatch = _batch(given, base, pp, dp, like_base)
    _sharding(given, base, like_base)
    return Degrees(**sizes, expert_tp=expert_tp, dp=dp, n_gpus=n_gpus, microbatch=microbatch)


def _batch(given: Given, base: Scenario, pp: int, dp: int, like_base: bool) -> int:
    """Set micro-batch, global batch and sequence length, and return the micro-batch."""
    name = "micro-batch-size"
    if given.has("local-batch-size"):  # torchtitan cuts its local batch up for pipelines only
        name = "local-batch-size" if pp == 1 else "pipeline-microbatch-size"
    microbatch = given.integer(name, base.parallel.microbatch if name == "micro-batch-size" else 1)
    if given.has(name) or like_base:
        given.set("parallel.microbatch", microbatch, name)
    elif not base.parallel.model_fields_set:
        raise InputError(
            f"--{name} is missing, and the base states no parallel.microbatch; state one of them"
        )
    else:
        _from_base(given, name, "parallel.microbatch", microbatch)
    batch = _global_batch(given, base, microbatch, dp, like_base)
    length_name = "encoder-seq-length" if given.has("encoder-seq-length") else "seq-length"
    length = given.integer(length_name, base.batch.sequence_length)
    if given.has(length_name) or like_base:
        given.set("batch.sequence_length", length, length_name)
    else:
        _from_base(given, length_name, "batch.sequence_length", length)
    if batch % (microbatch * dp):
        stated = [given.place(one) for one in ("global-batch-size", name) if given.has(one)]
        raise InputError(
            f"the global batch of {batch} sequences is no multiple of micro-batch {microbatch} x "
            f"data-parallel degree {dp} ({'; '.join(stated) or 'the base'}); change the batch or the GPUs"
        )
    return microbatch


def _global_batch(given: Given, base: Scenario, microbatch: int, dp: int, like_base: bool) -> int:
    one = microbatch * dp
    default, note = one, "one micro-batch for every pipeline"
    names: tuple[str, ...] = ("global-batch-size",)
    if like_base:
        default, note = base.batch.sequences, ""
    for factor, name in ((one, "gradient-accumulation-steps"), (dp, "local-batch-size")):
        if given.has(name):
            names, default = (*names, name), factor * given.integer(name, 1)
            break
    batch = given.integer("global-batch-size", default)
    given.set("batch.sequences", batch, *names, note="" if given.has(*names) else note)
    return batch


def _from_base(given: Given, name: str, key: str, value: int) -> None:
    given.keys[key] = value
    given.explain(
        name, "base", f"{key} = {value}, from the base: Megatron-LM has no default and the file none"
    )


def _sharding(given: Given, base: Scenario, like_base: bool) -> None:
    names = ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2", "zero-stage")
    strategy = "data-parallel-sharding-strategy"
    if like_base and not given.has(*names, strategy):
        given.set("parallel.zero_stage", base.parallel.zero_stage, names[0])
        return
    if given.has("zero-stage"):
        stage, note = given.integer("zero-stage", 0, least=0, most=3), ""
        if stage == 0 and given.flag("bf16") and given.keys.get("parallel.pp", 1) > 1:
            # deepspeed/runtime/bf16_optimizer.py, which DeepSpeed takes for BF16 in a pipeline.
            stage, note = 1, "with BF16, DeepSpeed's pipeline shards the optimizer states at stage 0 too"
        given.set("parallel.zero_stage", stage, "zero-stage", note=note)
    elif given.flag("use-megatron-fsdp"):
        chosen = given.text(strategy, NEWEST_STRATEGY, STRATEGIES)
        note = "" if given.has(strategy) else f"{strategy} is {NEWEST_STRATEGY} unless stated"
        given.set("parallel.zero_stage", STRATEGIES[chosen], "use-megatron-fsdp", strategy, note=note)
    elif given.flag("use-torch-fsdp2"):
        kept = "torch-fsdp2-no-reshard-after-forward"
        note = "parameters stay gathered from forward to backward" if given.flag(kept) else ""
        given.set("parallel.zero_stage", 2 if given.flag(kept) else 3, "use-torch-fsdp2", kept, note=note)
    else:
        given.set("parallel.zero_stage", int(given.flag(names[0])), names[0])
    if given.has(strategy) and not given.flag("use-megatron-fsdp"):
        given.explain(strategy, "irrelevant", "Megatron-LM reads it only with --use-megatron-fsdp")


WORLD_SIZE = "WORLD_SIZE"
"""Environment variable with the number of processes."""

MOST_GPUS = 10_000_000

_DISAGREES = re.compile(r"(nodes|gpus_per_node) is (\d+ at .+?), but (\d+ at .+); the first is taken")
"""Note of the reader on two places that ask for different machines."""


def read_machine(given: Given, launch: LaunchFile, base: Scenario, gpus: int | None = None) -> int:
    """Number of GPUs that the file asks for, or the base's; sets `cluster` where the base has others.

    `gpus` replaces the file's number.

    Raises InputError where the file contradicts itself, and where the base's cluster cannot have as many.
    """
    sizes = [(machine.nodes, machine.node.n_gpus) for machine in base.machines]
    own = sum(nodes * gpus for nodes, gpus in sizes)
    asked, place = _asked(launch, base) if gpus is None else (gpus, "--gpus of this command")
    if asked is None or asked == own:
        text = f"{own} GPUs: "
        text += "the file does not say how many" if asked is None else "as many as asked for"
        given.rows.append(MeaningRow("GPUs", "" if asked is None else str(asked), "base", text, place))
        return own
    if base.fleet is not None:
        raise InputError(
            f"{place}: asks for {asked} GPUs, and the base's fleet has {own}; give another --base"
        )
    per_node = sizes[0][1]
    if asked % per_node or asked < per_node:
        few = asked < per_node
        how = f"fewer than the {per_node} of one" if few else f"no multiple of the {per_node} of a"
        raise InputError(
            f"{place}: asks for {asked} GPUs, {how} node of the base's cluster {base.machine.name}; give "
            "another --base"
        )
    nodes = asked // per_node
    given.keys["cluster"] = _cluster_with(base, nodes, f"{place}: asks for {asked} GPUs")
    given.rows.append(
        MeaningRow("GPUs", str(asked), "key", f"cluster.nodes = {nodes} (the base has {own} GPUs)", place)
    )
    return asked


def _cluster_with(base: Scenario, nodes: int, asked: str) -> Any:
    """Data of the base's cluster with another number of nodes, on a larger network if it needs one."""
    machine = base.machine
    kept = {"node": machine.node, "price_per_gpu_hour": machine.price_per_gpu_hour}
    outline: dict[str, Any] = {
        key: part.model_dump(mode="json", exclude_none=True) for key, part in kept.items() if part is not None
    }
    first: InputError | None = None
    for whole in (False, True):
        try:
            if whole:
                changed = base.replace(cluster=outline | {"nodes": nodes})
            else:
                changed = base.overridden(f"cluster.nodes={nodes}")
            changed.machine.topology()
        except InputError as error:
            first = first or error
        else:
            return changed.to_dict()["cluster"]
    raise InputError(f"{asked}, which the base's cluster {base.machine.name} cannot have: {first}")


def _asked(launch: LaunchFile, base: Scenario) -> tuple[int | None, str]:
    """GPUs that launcher and environment ask for, and where; None where they do not say.

    Nodes whose GPUs the file does not state have those of a node of the base, where that is one host.
    """
    for note in launch.notes:
        if disagreement := _DISAGREES.fullmatch(note):
            what = {"nodes": "nodes", "gpus_per_node": "GPUs of a node"}[disagreement[1]]
            raise InputError(
                f"the file asks for different numbers of {what}: {disagreement[2]} and {disagreement[3]}; "
                "correct one, or give --gpus"
            )
    machine, answers, said = launch.machine, [], launch.machine.places
    nodes, gpus = machine.nodes, machine.gpus_per_node
    if isinstance(nodes, Unknown):
        raise InputError(unknown_value("the number of nodes", nodes, said.get("nodes", "launcher")))
    if isinstance(gpus, Unknown):
        place = said.get("gpus_per_node", "launcher")
        raise InputError(unknown_value("the number of GPUs of a node", gpus, place))
    if nodes is not None and gpus is not None:
        places = [said[key] for key in ("nodes", "gpus_per_node") if key in said]
        answers.append((nodes * gpus, " and ".join(dict.fromkeys(places)) or "the launcher"))
    elif nodes is not None:
        place, per_node = said.get("nodes", "the launcher"), base.machines[0].node.n_gpus
        if per_node > MOST_GPUS_OF_A_HOST:
            raise InputError(
                f"{place}: asks for {nodes} nodes and does not say how many GPUs each has; a node of the "
                f"base's cluster is a scale-up domain of {per_node} GPUs on several hosts, so give --gpus N"
            )
        answers.append((nodes * per_node, place))
    world = launch.environment.get(WORLD_SIZE)
    if isinstance(world, str) and world.isascii() and world.isdigit() and len(world) < 9:
        answers.append((int(world), WORLD_SIZE))
    if len({count for count, _ in answers}) > 1:
        parts = " and ".join(f"{place} {count}" for count, place in answers)
        raise InputError(f"the file asks for different numbers of GPUs: {parts}; correct one")
    if not answers:
        return None, ""
    count, place = answers[0]
    if not 0 < count <= MOST_GPUS:
        raise InputError(f"{place}: {count} GPUs are outside the limits 1 to {MOST_GPUS}")
    return count, place


EMBEDDING = "account-for-embedding-in-pipeline-split"
LOSS = "account-for-loss-in-pipeline-split"
ROUND = "microbatch-group-size-per-virtual-pipeline-stage"

STAGE_ARGUMENTS = ("pipeline-model-parallel-size", STAGES, LAYERS, LAYOUT, FIRST, LAST, EMBEDDING, LOSS)
"""Arguments by which a file says something about its pipeline stages."""


def read_stages(given: Given, shape: ModelShape, pp: int, in_part: bool = False) -> None:
    """Set parallel.vpp, schedule and stages as Megatron-LM spreads the layers over the pipeline.

    `in_part` says that the file holds a part of the arguments: layers that do not divide are balanced then.

    Raises InputError where layers do not divide as Megatron-LM needs it.
    """
    if given.has(LAYOUT):
        text = given.text(LAYOUT, "").strip("'\"")
        vpp, stages = _of_layout(given, shape, pp, text)
        if given.integer(STAGES, vpp) != vpp:
            raise InputError(
                f"{given.place(STAGES)} and {given.place(LAYOUT)} contradict each other: the layout has "
                f"{vpp} stages a rank; correct one"
            )
        given.set("parallel.vpp", vpp, LAYOUT, STAGES)
        for key, value in stages.items():
            given.set(f"stages.{key}", value, LAYOUT)
    else:
        vpp = _virtual_stages(given, shape.n_layers, pp)
        given.set("parallel.vpp", vpp, STAGES, LAYERS)
        names = [name for name in (FIRST, LAST, EMBEDDING, LOSS) if given.has(name)]
        if in_part and not names and shape.n_layers % (pp * vpp):
            text = (
                "the direction is unknown: the file does not say which layers a stage has; they are balanced"
            )
            given.explain(FIRST, "not priced", text)
        elif pp > 1:
            layers = list(_uneven(given, shape.n_layers, pp, vpp))
            note = "" if names else "Megatron-LM spreads layers evenly"
            given.set("stages.layers", layers, *(names or (FIRST,)), note=note)
    if vpp > 1 and pp == 1:
        name = next(name for name in (LAYOUT, STAGES, LAYERS) if given.has(name))
        raise InputError(f"{given.place(name)}: virtual stages need --pipeline-model-parallel-size above 1")
    if not given.has("schedule"):
        arguments = ("pipeline-model-parallel-size", STAGES, LAYERS)
        given.set("schedule", name_from("megatron-lm", free_vpp=vpp > 1), *arguments)


def read_schedule(given: Given) -> None:
    """Set the schedule that a name of torch.distributed.pipelining stands for; InputError for another."""
    if given.has("schedule"):
        known = {spec.names_elsewhere.get("torch"): spec.name for spec in SCHEDULES.values()}
        names = [name for name in known if name is not None]
        given.set("schedule", known[given.text("schedule", "", names)], "schedule")


OVERLAP, DELAY, EARLY = (
    "overlap-moe-expert-parallel-comm",
    "delay-wgrad-compute",
    "ep-overlap-early-attn-memory-release",
)


SHARED = "moe-shared-expert-overlap"


def read_expert_overlap(given: Given, base: Scenario, shape: ModelShape) -> None:
    """Set schedule, order and weight gradients of expert overlap, and the overlap of shared experts.

    It runs after recompute and dispatcher. Raises InputError, with the nearest legal arguments, where
    Megatron core refuses it (transformer_config.py of 0.14 to d98e8a64).
    """
    keys, plan = given.keys, base.parallel
    if given.has(SHARED) or base.communication.overlap_shared_experts:
        on = given.flag(SHARED) if given.has(SHARED) or not given.in_part else True
        given.set("communication.overlap_shared_experts", on, SHARED)
    schedule: str = keys.get("schedule", base.schedule)
    vpp, pp, ep = (keys.get(f"parallel.{key}", getattr(plan, key)) for key in ("vpp", "pp", "ep"))
    if given.has(OVERLAP) and not given.flag(OVERLAP) and hides_experts(schedule):
        schedule = keys["schedule"] = name_from("megatron-lm", free_vpp=vpp > 1)
    if not given.flag(OVERLAP):
        for name in (DELAY, EARLY):
            if given.flag(name) and not hides_experts(schedule):
                raise InputError(f"{given.place(name)}: needs --{OVERLAP} too; add it, or leave this out")
        if not hides_experts(schedule) or not given.has(DELAY, EARLY):
            return
    recompute = keys.get("recompute", base.recompute)
    problems = (
        (ep == 1, "no tokens leave a GPU with expert-parallel size 1; leave it out"),
        (pp > 1 and vpp == 1, f"needs virtual stages with a pipeline: add --{STAGES} 2"),
        (
            keys.get("communication.kernels", base.communication.kernels) == "nccl-allgather",
            "needs --moe-token-dispatcher-type alltoall or flex",
        ),
        (
            repeats_experts(recompute),
            "recompute may not run the experts again: use --recompute-granularity selective without moe",
        ),
        (shape.mtp_layers > 1, f"takes one MTP module at most, and the model has {shape.mtp_layers}"),
    )
    wrong = next((text for holds, text in problems if holds), None)
    if wrong is not None and given.flag(OVERLAP):
        raise InputError(f"{given.place(OVERLAP)}: {wrong}")
    given.set("schedule", INTERLEAVED_OVERLAPPED.name, OVERLAP)
    order = "megatron-early-attention" if given.flag(EARLY) else "schedule"
    given.set("communication.overlap", order, EARLY, OVERLAP)
    given.set("communication.delay_weight_gradients", given.flag(DELAY), DELAY)


def read_rounds(given: Given, pp: int, microbatches: int) -> None:
    """Explain the micro-batches of a round of interleaved stages: those that are simulated, or others."""
    if not given.has(ROUND):
        return
    simulated = per_round(pp, max(1, microbatches))
    if given.integer(ROUND, pp) == simulated:
        given.explain(ROUND, "key", f"a round has {simulated} micro-batches, as moesim simulates it")
    else:
        text = f"the direction is unknown: moesim simulates rounds of {simulated}"
        given.explain(ROUND, "not priced", text)


def _accounted(given: Given) -> tuple[int, int]:
    return int(given.flag(EMBEDDING)), int(given.flag(LOSS))


def _virtual_stages(given: Given, n_layers: int, pp: int) -> int:
    if given.has(STAGES):
        return given.integer(STAGES, 1, most=1000)
    if not given.has(LAYERS):
        return 1
    each, total = given.integer(LAYERS, 1, most=1000), n_layers + sum(_accounted(given))
    if total % (pp * each):
        raise InputError(
            f"{given.place(LAYERS)}: {total} layers over {pp} pipeline ranks do not divide into virtual "
            f"stages of {each}; Megatron-LM refuses this"
        )
    return total // (pp * each)


def _uneven(given: Given, n_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of every stage in order: all ranks of the first virtual stage, then those of the next."""
    ends = {0: given.integer(FIRST, 0) if given.has(FIRST) else None}
    ends[pp - 1] = given.integer(LAST, 0) if given.has(LAST) else None
    fixed = {rank: n for rank, n in ends.items() if n is not None}
    before, after = _accounted(given)
    total = n_layers + (before if 0 not in fixed else 0) + (after if pp - 1 not in fixed else 0)
    others, left = pp - len(fixed), total - sum(fixed.values())
    if left < 0 or (others and left % (others * vpp)) or (not others and left):
        raise InputError(
            f"{left} layers do not divide over {others} pipeline ranks with {vpp} virtual stages each, which "
            f"Megatron-LM needs; state --{STAGES}, --{LAYOUT}, or other sizes"
        )
    ranks = [fixed.get(rank, left // others if others else 0) for rank in range(pp)]
    for rank, layers in fixed.items():
        if layers % vpp:
            raise InputError(
                f"{given.place(FIRST if rank == 0 else LAST)}: {layers} layers do not divide into {vpp} "
                "virtual stages"
            )
    stages = [ranks[rank] // vpp for _ in range(vpp) for rank in range(pp)]
    stages[0] -= before if 0 not in fixed else 0
    stages[-1] -= after if pp - 1 not in fixed else 0
    return tuple(stages)


def _of_layout(given: Given, shape: ModelShape, pp: int, text: str) -> tuple[int, dict[str, Any]]:
    """Virtual stages, and keys of the scenario's section stages."""
    letters = expand_layout(text)
    n_stages, layers = layers_of_layout(text)
    if n_stages % pp:
        raise InputError(
            f"{given.place(LAYOUT)}: has {n_stages} stages, not a multiple of "
            f"--pipeline-model-parallel-size {pp}"
        )
    for letter, count, what in (
        ("t", shape.n_layers, "decoder layers (t)"),
        ("m", shape.mtp_layers, "multi-token-prediction modules (m)"),
        ("E", 1, "embedding (E)"),
        ("L", 1, "loss (L)"),
    ):
        if letters.count(letter) != count:
            raise InputError(
                f"{given.place(LAYOUT)}: has {letters.count(letter)} of {what}, and the model {count}"
            )
    vpp = n_stages // pp
    if layers is not None:
        mtp = mtp_stage_of_layout(text)
        return vpp, {"layers": list(layers)} | ({} if mtp is None else {"mtp": mtp})
    note = (
        "moesim keeps the embedding on the first stage, the loss on the last and all MTP modules on one "
        f"behind the layers, so the {n_stages} stages are balanced instead"
    )
    given.explain(LAYOUT, "not priced", f"the direction is unknown: {note}")
    return vpp, {}
