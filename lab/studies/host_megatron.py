"""Host time of Megatron core's own Python: layers, router, dispatcher, gradient hooks, schedule, optimizer.

    python -m lab.studies.host_megatron --out DIR --budget 80
    torchrun --nproc-per-node 2 -m lab.studies.host_megatron --out DIR --budget 80

Linear layers, norms, attention and grouped experts are plain calls of PyTorch in the places of Transformer
Engine's modules; their own host time inside the layer is measured by running each kind twice. A layer's time
is the difference between a deep and a shallow model, divided by the layers between them. Tensors are tiny, so
that the device never limits. With two processes the dispatcher's all-to-all runs over both. The script writes
host_megatron.json after every case. A case that fails loses its own row. `--dry` runs every path on a CPU.
"""

from __future__ import annotations

import gc
import importlib.metadata
import sys
import time
import warnings
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare(
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",  # a few small kernels; starting workers takes longer
    )
import torch

from lab.studies import host_megatron_models as models
from lab.studies.host_blocks_study import Study, conduct, host_reads, passes
from lab.studies.host_megatron_models import MegatronCase
from lab.studies.host_launch import machine

SHALLOW, DEEP = 2, 8
MEASURED = ("forward", "forward_done", "backward", "backward_done")


def whole(study: Study, case: MegatronCase, reads: bool = False) -> dict[str, Any]:
    """Times of a whole model."""
    model = models.build(case, study.device)
    inputs = models.inputs(study.device)

    def forward() -> torch.Tensor:
        return model(**inputs).mean()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    out = passes(study, forward, clear)
    if reads:
        out["host_reads"] = host_reads(study, forward)
    out["parameters"] = len(list(model.parameters()))
    return out


def layer(study: Study, case: MegatronCase, own: str | None = None) -> dict[str, Any]:
    """Host time of one layer: the slope between two depths; `own`: a kind of module that runs twice."""
    shallow, deep = (1, 2) if study.dry else (SHALLOW, DEEP)
    more = vars(case)
    models.twice.clear()
    if own is not None:
        models.twice.add(own)  # type: ignore[arg-type]
    try:
        low = whole(study, MegatronCase(**{**more, "layers": shallow}))
        high = whole(study, MegatronCase(**{**more, "layers": deep}), reads=own is None)
    finally:
        models.twice.clear()
    out: dict[str, Any] = {"depths": (shallow, deep), "host_reads deep": high.get("host_reads")}
    for name in MEASURED:
        for cut in ("us", "p25_us", "p75_us"):
            out[f"{name}_{cut}"] = (high[name][cut] - low[name][cut]) / (deep - shallow)
        out[f"{name} shallow_us"] = low[name]["us"]
    out["parameters"] = (high["parameters"] - low["parameters"]) / (deep - shallow)
    return out


def plain(study: Study, case: MegatronCase) -> dict[str, Any]:
    """Host time of a layer's plain modules inside it, by kind: a layer that runs them twice, less one.

    The second run of the forward has no backward, so only forward times are taken.
    """
    base = layer(study, case)
    kinds = ("linear", "norm", "attention") + (("grouped",) if case.experts else ())
    out: dict[str, Any] = {"base": base["forward_us"]}
    for kind in kinds:
        out[kind] = layer(study, case, kind)["forward_us"] - base["forward_us"]
    return out


def warm_up(study: Study) -> dict[str, Any]:
    """Compile what the layers compile, before anything is timed."""
    seconds = {}
    for case in (MegatronCase(), MegatronCase(experts=8, aux="aux_loss", rope=True, qk_norm=True)):
        began = time.monotonic()
        model = models.build(case, study.device)
        for _ in range(3):
            model(**models.inputs(study.device)).mean().backward()
        study.synchronise()
        seconds[case.name] = time.monotonic() - began
    return seconds


def garbage(study: Study) -> dict[str, Any]:
    """Steps of a deep model with Python's automatic garbage collection and without it."""
    depth, steps = (2, 2) if study.dry else (24, 9)
    model = models.build(MegatronCase(depth, experts=32, aux="aux_loss"), study.device)
    inputs = models.inputs(study.device)
    log: list[tuple[int, float]] = []
    began = [0.0]

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            log.append((info["generation"], time.perf_counter() - began[0]))

    def step() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        study.synchronise()
        start = time.perf_counter()
        model(**inputs).mean().backward()
        return time.perf_counter() - start

    out: dict[str, Any] = {"layers": depth, "thresholds": gc.get_threshold()}
    step()
    gc.callbacks.append(seen)
    for mode in ("automatic", "off", "automatic again", "off again"):
        gc.collect()
        log.clear()
        (gc.disable if mode.startswith("off") else gc.enable)()
        times = sorted(step() for _ in range(steps))
        out[mode] = {
            "mean_us": sum(times) / steps * 1e6,
            "median_us": times[steps // 2] * 1e6,
            "collections": [
                [sum(g == n for g, _ in log), sum(s for g, s in log if g == n)] for n in range(3)
            ],
        }
    start = time.perf_counter()
    gc.collect()
    out["full collection_us"] = (time.perf_counter() - start) * 1e6
    gc.callbacks.remove(seen)
    gc.enable()
    return out


def run_all(study: Study) -> None:
    """All cases, the most wanted first; every rank runs the same."""
    from lab.studies import host_megatron_parts as parts
    from lab.studies import host_megatron_step as around

    def layers(*cases: MegatronCase) -> None:
        for case in cases:
            study.run("blocks", case.name, partial(layer, study, case))

    study.run("parts", "warm-up", partial(warm_up, study), 10.0)
    layers(MegatronCase(), MegatronCase(experts=32, aux="aux_loss"), MegatronCase(experts=32))
    stages = MegatronCase(experts=32, aux="aux_loss")
    study.run("parts", f"stages {stages.name}", partial(parts.stages, study, stages))
    study.run("parts", "gradient hooks", partial(around.gradient_hooks, study))
    study.run("parts", "schedule", partial(around.schedule, study))
    study.run("parts", "plain, dense", partial(plain, study, MegatronCase()))
    study.run("parts", "plain, routed", partial(plain, study, MegatronCase(experts=32)))
    for case in (
        MegatronCase(experts=8, aux="aux_loss"),
        MegatronCase(experts=128, aux="aux_loss"),
        MegatronCase(experts=128),
    ):
        study.run("parts", f"stages {case.name}", partial(parts.stages, study, case))
    layers(
        MegatronCase(experts=128, aux="aux_loss"),
        MegatronCase(rope=True),
        MegatronCase(qk_norm=True),
        MegatronCase(fused=False),
    )
    study.run("parts", "modules", partial(parts.modules, study))
    study.run("parts", "garbage", partial(garbage, study))
    study.run("parts", "optimizer", partial(around.optimizer, study), 6.0)
    layers(
        MegatronCase(experts=32, bias_routing=True),
        MegatronCase(experts=8, aux="aux_loss"),
        MegatronCase(experts=32, aux="global_aux_loss"),
        MegatronCase(checkpoint=True),
        MegatronCase(experts=32, checkpoint=True),
    )


def describe(study: Study, world: int) -> None:
    """Write the machine and the versions into the results."""
    study.result["world"], study.result["date"] = world, datetime.now(UTC).isoformat(timespec="seconds")
    study.result["versions"] = {
        name: importlib.metadata.version(name) for name in ("megatron-core", "torch", "numpy")
    } | {"python": sys.version.split()[0]}
    study.result["machine"] = {"torch": torch.__version__} if study.dry else machine()


def short(row: dict[str, Any]) -> Any:
    """A layer's two medians, or what became of it."""
    if "forward_us" not in row:
        return str(row)[-200:]
    return f"forward {row['forward_us']:.0f} us, backward {row['backward_us']:.0f} us"


def main() -> None:
    """Measure and write the results."""
    warnings.simplefilter("ignore")
    options = study_setup.parser(80.0).parse_args()
    if options.dry:
        from lab.studies.host_megatron_dry import imitate_gpu_on_cpu

        imitate_gpu_on_cpu()
    rank, world = models.start("cpu" if options.dry else "cuda")
    study = Study(options, "host_megatron.json" if world == 1 else f"host_megatron_{world}.json", rank)
    describe(study, world)
    conduct(study, run_all, short)


if __name__ == "__main__":
    main()
