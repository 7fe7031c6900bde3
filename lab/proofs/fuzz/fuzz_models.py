"""Configurations of every family that can be imported, mutated, and what reads them."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fuzz_base import ROOT, File
from fuzz_mutator import Mutator

from moesim.simulator.model.counts import parameters_activated, parameters_total
from moesim.simulator.model.huggingface import import_hf


@lru_cache(maxsize=1)
def _configs() -> tuple[dict[str, Any], ...]:
    """Files of the models that transformers judged, and the variations of their sizes."""
    verdicts = json.loads((ROOT / "lab" / "docs" / "proof" / "model-parameters.json").read_text("utf-8"))[
        "models"
    ]
    return tuple(verdict["config"] for verdict in verdicts if "config" in verdict)


def family_config(m: Mutator) -> File:
    """A family's configuration with changed values, or one with the architecture of another family."""
    config = copy.deepcopy(m.rng.choice(_configs()))
    if m.rng.random() < 0.2:
        other = m.rng.choice(_configs())
        config |= {key: other.get(key) for key in ("model_type", "architectures")}
    data = m.data(config) if m.rng.random() < 0.95 else config
    return File(".json", m.bytes_of(m.text_of(data)))


def read_family(path: Path) -> None:
    """Import the file, and count what it became."""
    shape = import_hf(path).shape
    total, activated = parameters_total(shape), parameters_activated(shape, embedding=True)
    assert activated > 0, f"{activated} activated parameters of {total}"
    assert activated <= total, f"{activated} activated parameters of {total}"
