"""Meaning of the arguments on degrees of parallelism, batch and sharding of optimizer and parameters."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.meaning.given import Given

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


@dataclass(frozen=True, slots=True)
class Degrees:
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
    dp = _data_parallel(given, sizes["tp"], sizes["pp"], sizes["cp"], n_gpus)
    expert_tp = 1
    if experts:
        default = base.parallel.expert_tp if like_base else sizes["tp"]
        expert_tp = given.integer("expert-tensor-parallel-size", default)
        note = "" if given.has("expert-tensor-parallel-size") or like_base else "as the tensor-parallel size"
        given.set("parallel.expert_tp", expert_tp, "expert-tensor-parallel-size", note=note)
        _check_experts(given, sizes, expert_tp, dp)
    elif sizes["ep"] > 1:
        raise InputError(
            f"{given.place('expert-model-parallel-size')}: the model has no experts (--num-experts)"
        )
    _sequence_parallel(given, sizes["tp"], base, like_base)
    microbatch = _batch(given, base, sizes["pp"], dp, like_base)
    _sharding(given, base, like_base)
    return Degrees(**sizes, expert_tp=expert_tp, dp=dp, n_gpus=n_gpus, microbatch=microbatch)


def _data_parallel(given: Given, tp: int, pp: int, cp: int, n_gpus: int) -> int:
    if n_gpus % (tp * pp * cp):
        places = "; ".join(given.place(name) for name in _KEYS if given.has(name))
        raise InputError(
            f"{n_gpus} GPUs are no multiple of tp x pp x cp = {tp} x {pp} x {cp} = {tp * pp * cp}, so the "
            f"data-parallel degree is no whole number; change the GPUs or a degree ({places or 'the base'})"
        )
    return n_gpus // (tp * pp * cp)


def _check_experts(given: Given, sizes: dict[str, int], expert_tp: int, dp: int) -> None:
    share = sizes["tp"] * sizes["cp"] * dp
    if share % (sizes["ep"] * expert_tp):
        raise InputError(
            f"--expert-model-parallel-size {sizes['ep']} x --expert-tensor-parallel-size {expert_tp} does "
            f"not divide the {share} GPUs of a pipeline rank (tp x cp x dp); change one of them"
        )


def _sequence_parallel(given: Given, tp: int, base: Scenario, like_base: bool) -> None:
    wanted = given.flag("sequence-parallel")
    if like_base and not given.has("sequence-parallel"):
        wanted = base.parallel.sequence_parallel
    note = "Megatron-LM drops it where the tensor-parallel size is 1" if wanted and tp == 1 else ""
    given.set("parallel.sequence_parallel", wanted and tp > 1, "sequence-parallel", note=note)


def _batch(given: Given, base: Scenario, pp: int, dp: int, like_base: bool) -> int:
    """Set micro-batch, global batch and sequence length, and return the micro-batch."""
    name = _microbatch_argument(given, pp)
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


def _microbatch_argument(given: Given, pp: int) -> str:
    """The argument with the micro-batch: torchtitan cuts its local batch up for pipelines only."""
    if given.has("local-batch-size"):
        return "local-batch-size" if pp == 1 else "pipeline-microbatch-size"
    return "micro-batch-size"


def _global_batch(given: Given, base: Scenario, microbatch: int, dp: int, like_base: bool) -> int:
    one = microbatch * dp
    default, note = one, "one micro-batch for every pipeline"
    names: tuple[str, ...] = ("global-batch-size",)
    if like_base:
        default, note = base.batch.sequences, ""
    if given.has("gradient-accumulation-steps"):
        names, default = (
            (*names, "gradient-accumulation-steps"),
            one * given.integer("gradient-accumulation-steps", 1),
        )
    elif given.has("local-batch-size"):
        names, default = (*names, "local-batch-size"), dp * given.integer("local-batch-size", 1)
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
