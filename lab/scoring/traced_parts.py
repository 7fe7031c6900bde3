"""Steps and parts of three traced runs on two H100, with the shipped profile and with one calibrated on their operators.

    python -m lab.scoring.traced_parts FOLDER

FOLDER holds the traces by their names below (PyTorch's profiler, one step of rank 0, recorded by others; scores only). The scenarios are in
`data/h100x2/`, the calibrations (`moesim calibrate --quick --model SCENARIO` on one H100, no trace seen) in `lab/results/`.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from lab import packed
from lab.scoring import own_runs_kernels as kernels
from lab.studies.train_profile import kernel_table, operators_of_kernels

from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import load_scenario

HERE = Path(__file__).parent / "data" / "h100x2"
RUNS = {
    "q30": ("trace_q30L6_fsdp2_ep2_sac.json.gz", 151_936, 2048, 0.4544179),
    "l8b": ("trace_l8bL8_fsdp2_sac.json.gz", 128_256, 4096, 0.5447933),
    "ds16": ("trace_ds16bL10_pp2_1f1b_bf16.json.gz", 102_400, 2048, 0.9822994),
}
"""File, vocabulary, hidden size and measured median step (s) of each run."""


def main() -> None:
    """Print the steps of all runs, and the parts of those without a pipeline."""
    for name, (file, vocabulary, hidden, measured_s) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder) / f"h100-{name}.yaml"
            profile.write_text(packed.text(f"lab/results/2026-11-26-h100-operators-{name}.yaml.xz"))
            pair = [load_scenario(str(HERE / f"{name}.yaml"), [f"profile={p}"]) for p in ("h100-from-h200", profile)]
            steps = [predict(scenario).result.step.time_s for scenario in pair]
            shown = ", ".join(f"{step:.4f} s ({step / measured_s - 1:+.1%})" for step in steps)
            print(f"{name}: measured {measured_s:.4f} s; shipped profile, calibrated: {shown}")
            if pair[0].parallel.pp > 1:
                continue
            events = json.loads(gzip.decompress((Path(sys.argv[1]) / file).read_bytes()))["traceEvents"]
            rows, table = operators_of_kernels(events)["by_operator"], kernel_table(events)["by_name"]
            traced = kernels.measured_classes(rows, table, vocabulary, hidden)
            parts = [kernels.classes_of(run_step(scenario)) for scenario in pair]
            for kind in kernels.CLASSES:
                if traced[kind]:
                    both = "".join(f"{part[kind] * 1e3:9.1f}" for part in parts)
                    print(f"  {kind:34}{traced[kind] * 1e3:9.1f}{both} ms")


if __name__ == "__main__":
    main()
