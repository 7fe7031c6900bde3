"""The exports of the sample, by file name: what the trainers' own readers are asked to accept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sample import plans

from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.facts import PlanFacts, facts_of
from moesim.simulator.trainers.torchtitan import rules
from moesim.simulator.trainers.torchtitan.flavors import flavor_of
from moesim.simulator.trainers.torchtitan.snippet import torchtitan_snippet
from moesim.simulator.trainers.torchtitan.toml import torchtitan_toml

SEED = 20261124


@dataclass(frozen=True)
class Export:
    """One file, and what its reader must find in it."""

    file: str
    text: str
    expected: dict[str, int | str]

    @property
    def sha256(self) -> str:
        """Checksum of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _runnable(version: str) -> Callable[[PlanFacts], tuple[str, ...]]:
    """Problems of a plan in one release of torchtitan, of which a missing flavor is one."""

    def problems(plan: PlanFacts) -> tuple[str, ...]:
        if flavor_of(plan.shape, version) is None:
            return ("no flavor",)
        return rules.problems(plan, version)

    return problems


def _expected(scenario: Scenario) -> dict[str, int | str]:
    plan, p = facts_of(scenario), scenario.parallel
    return {
        "parameters": _parameters(plan.shape),
        "world_size": plan.n_gpus,
        "microbatches": plan.microbatches,
        "tp": p.tp,
        "cp": p.cp,
        "pp": p.pp,
        "ep": p.ep,
        "schedule": (rules.torch_name(plan.schedule) or "") if p.pp > 1 else "",
        "stages": 0 if plan.layers is None else len(plan.layers),
    }


def _parameters(shape: ModelShape) -> int:
    """Parameters without the balance biases, which torchtitan keeps as buffers."""
    moe = shape.moe
    biased = (
        moe.experts * (shape.n_layers - len(moe.dense_layers)) if moe is not None and moe.score_bias else 0
    )
    return parameters_total(shape) + parameters_mtp(shape) - biased


def torchtitan_exports() -> Iterator[Export]:
    """TOML files for 0.2.2 and Python modules for 0.3.0."""
    for name, scenario in plans(SEED, _runnable("0.2.2")):
        yield Export(f"{name}.toml", torchtitan_toml(scenario).text, _expected(scenario))
    for name, scenario in plans(SEED, _runnable("0.3.0")):
        module = f"plan_{name.replace('-', '_')}.py"
        yield Export(module, torchtitan_snippet(scenario), _expected(scenario))


def index(exports: list[Export]) -> str:
    """The list of files with their checksums and expected values, as JSON."""
    entries = [{"file": e.file, "sha256": e.sha256, "expected": e.expected} for e in exports]
    return json.dumps(entries, indent=1) + "\n"


def write(folder: Path) -> None:
    """Write the exports and their index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    exports = list(torchtitan_exports())
    for export in exports:
        (folder / export.file).write_text(export.text, encoding="utf-8")
    (folder / "index.json").write_text(index(exports), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
