"""Scores five training runs on one 8x H200 host: step time, memory and exposed communication."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.provenance import SourcedFraction
from moesim.hwmodels.validation import validate_model
from moesim.simulator.frameworks.software import Software
from moesim.simulator.memory.gpu import FRAMEWORK_BYTES
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import ModelShape, ShapeSource
from moesim.simulator.predict.driver import predict
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.run_plan import RunPlan
from moesim.simulator.scenario.sections import Batch, Communication, Routing, Stages, Variation
from moesim.simulator.scoring import published_records
from moesim.simulator.studies.uncertainty import step_interval

FILE = "h200-runs.csv"
SOURCE = (
    "torchtitan 0.2.2, torch 2.11.0, NCCL 2.28.9 on 8x H200, driver 580.159.04; moesim measurement, 2026-11"
)
MIXED = Precision(
    linear="bf16", parameters="fp32", loss="fp32", gradient_reduce="fp32", parameter_gather="bf16"
)
"""FSDP's mixed precision: FP32 parameters, gradients, moments and loss; BF16 compute and gathers."""
NONE = SourcedFraction(value=0.0, kind="measured", source="routing forced to round robin", date="2026-11-20")
CLOCKS = SourcedFraction(value=0.0, kind="assumed", source="one host; spread left out", date="2026-11-20")


class Run(Frozen):
    """One measured run; the fields are the columns of `data/published/h200-runs.csv`."""

    name: str
    gpus: int
    sequence: int
    sequences: int
    microbatch: int
    dp: int
    pp: int
    ep: int
    layers: Annotated[tuple[int, ...], BeforeValidator(lambda text: tuple(map(int, text.split())))]
    """Layers of every stage, from the parameters that each rank reported; empty without a pipeline."""
    recompute: RecomputePolicy
    step_s: float
    peak_active_gib: float
    peak_reserved_gib: float
    exposed_communication_s: Annotated[float | None, BeforeValidator(lambda v: None if v == "" else v)]
    """Seconds of collectives that no compute overlaps; None for a run without a profiler trace."""


class ScoredRun(Frozen):
    """A run and its prediction; errors are predicted / measured - 1."""

    name: str
    step_s: float
    predicted_step_s: float
    step_error: float
    memory_bytes: float
    predicted_memory_bytes: float
    memory_error: float
    reserved_bytes: float
    """Peak bytes that the allocator reserved on the device, fragments and caches included."""
    predicted_reserved_bytes: float
    """Reserved bytes of the replayed allocator; the predicted tensors where nothing is replayed."""
    reserved_error: float
    needed_bytes: float
    """Predicted peak with the framework's own bytes, which decides whether a plan fits."""
    capacity_bytes: float
    fits: bool
    exposed_s: float | None
    predicted_exposed_s: float
    lower_bound_s: float
    upper_bound_s: float
    interval_s: tuple[float, float]
    """80 % interval of the step time (s)."""
    host_share: float = 0.0
    """Share of the predicted step in which the GPUs wait for launches."""
    host_bound: bool = False


def runs() -> tuple[Run, ...]:
    """The five runs. Raises InputError for a malformed row."""
    return tuple(
        validate_model(Run, record, f"{FILE}:{record['name']}") for record in published_records(FILE)
    )


def score_run(run: Run) -> ScoredRun:
    """Score one run, predicted with the profile that was measured on the same kind of host."""
    prepared, executions, result = predict(scenario_of_run(run))
    tensors = result.memory.total_bytes - FRAMEWORK_BYTES.value  # the allocator counts tensors only
    memory = tensors if result.memory.active_bytes is None else result.memory.active_bytes
    held = tensors if result.memory.reserved_bytes is None else result.memory.reserved_bytes
    measured = run.peak_active_gib * 2.0**30
    return ScoredRun(
        name=run.name,
        step_s=run.step_s,
        predicted_step_s=result.step.time_s,
        step_error=result.step.time_s / run.step_s - 1.0,
        memory_bytes=measured,
        predicted_memory_bytes=memory,
        memory_error=memory / measured - 1.0,
        reserved_bytes=run.peak_reserved_gib * 2.0**30,
        predicted_reserved_bytes=held,
        reserved_error=held / (run.peak_reserved_gib * 2.0**30) - 1.0,
        needed_bytes=result.memory.total_bytes,
        capacity_bytes=result.memory.capacity_bytes,
        fits=result.memory.fits,
        exposed_s=run.exposed_communication_s,
        predicted_exposed_s=result.breakdown_s.exposed_communication,
        lower_bound_s=result.step.lower_bound_s,
        upper_bound_s=result.step.upper_bound_s,
        interval_s=step_interval(prepared, executions, result),
        host_share=result.host.share if result.host else 0.0,
        host_bound=result.host is not None and result.host.bound,
    )


def scenario_of_run(run: Run) -> Scenario:
    """The scenario of a run. FSDP reshards parameters after the forward pass unless there is a pipeline."""
    zero = 3 if run.pp == 1 else 2
    return Scenario(
        name=run.name,
        description=SOURCE,
        model=shape_of_run(run.name),
        cluster="h200-8",
        profile="h200-8gpu",
        precision=MIXED,
        parallel=ParallelPlan(pp=run.pp, ep=run.ep, microbatch=run.microbatch, zero_stage=zero),
        schedule="1f1b",
        stages=Stages(layers=run.layers or None),
        batch=Batch(sequences=run.sequences, sequence_length=run.sequence),
        communication=Communication(kernels="nccl"),
        recompute=run.recompute,
        routing=Routing(expert_load_cv=NONE),
        variation=Variation(clock_cv=CLOCKS, jitter_cv=CLOCKS),
        run=RunPlan(tokens=float(run.sequences * run.sequence)),
        software=Software(
            framework="torchtitan-0.2",
            host="emerald-rapids-vm",
            step_kernels="torch" if zero == 3 else "torch-fsdp2",
        ),
    )


def shape_of_run(name: str) -> ModelShape:
    """Model of a run, from torchtitan's arguments: Llama 3 8B, DeepSeek 16B, or three layers of the 671B."""
    if name.startswith("l8b"):
        return load_model("llama-3-8b")
    large = name.startswith("ds671b")
    attention = MLA(
        heads=128 if large else 16,
        q_lora_rank=1536 if large else None,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_dim=128,
    )
    moe = MoE(
        experts=256 if large else 64,
        top_k=8 if large else 6,
        expert_ffn=2048 if large else 1408,
        shared_experts=1 if large else 2,
        shared_ffn=2048 if large else 1408,
        scoring="sigmoid" if large else "softmax",
        dense_layers=(0,),
    )
    return ModelShape(
        name=name,
        source=ShapeSource(kind="published", reference=SOURCE, date="2026-11-20"),
        n_layers=3 if large else 27,
        hidden=7168 if large else 2048,
        vocab=129280 if large else 102400,
        attention=attention,
        moe=moe,
        dense_ffn=18432 if large else 10944,
        tied_embeddings=False,
    )
