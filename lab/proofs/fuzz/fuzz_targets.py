"""Every reader of the program, and its share of the cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_base import File, Target, described, from_file, pool, texts_of
from fuzz_commands import command_line, run_command
from fuzz_dashboard import kept, packed, read_kept, read_packed, read_sent, sent
from fuzz_files import (
    captured_texts,
    count_texts,
    counts_json,
    counts_npy,
    deepspeed_json,
    log_texts,
    megatron_yaml,
    nccl_json,
    nccl_texts,
    printed_texts,
    read_cluster,
    read_deepep,
    read_nccl,
    read_scenario,
    read_schedule,
    read_store,
    read_topology,
    read_trainer_file,
    schedule_texts,
    script_texts,
    store_case,
    titan_texts,
    topology_texts,
)
from fuzz_links import kept_link, link, read_kept_link, read_link, read_upload, read_values, upload, values
from fuzz_models import family_config, read_family

from moesim.hwmodels import (
    load_accelerator,
    load_energy_site,
    load_failure_rate,
    load_network,
    load_node,
    load_prices,
    load_purchase,
    load_restart,
    load_scale_up,
    load_storage,
)
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.host import load_host
from moesim.hwmodels.price import load_fabric_prices
from moesim.simulator.layout.popularity import read_counts
from moesim.simulator.model.huggingface import import_hf
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.planner.space import load_space
from moesim.simulator.scenario.run_plan import load_run_plan

__all__ = ["TARGETS", "is_refusal", "pool"]


def _hardware(read: Callable[[str], Any]) -> Callable[[File, Path, random.Random], None]:
    return from_file(lambda path: read(str(path)))


TARGETS: tuple[Target, ...] = (
    Target("scenario file", 16, described("simulator/data/scenarios"), read_scenario),
    Target("small scenario file", 10, described("tests/golden", pattern="scenario-small.yaml"),
    read_scenario),
    Target("link", 18, link, read_link),
    Target("link of Compare", 2, kept_link, read_kept_link),
    Target("command line", 12, command_line, run_command),
    Target("upload", 4, upload, read_upload),
    Target("model file", 4, described("simulator/data/models"), from_file(load_model)),
    Target("config.json", 5, described("tests/golden/models", ".json", "*.json"), from_file(import_hf)),
    Target("config.json of a family", 5, family_config, from_file(read_family)),
    Target("calibration profile", 4, described("hwmodels/data/calibration"), from_file(load_profile)),
    Target("run plan", 2, described("simulator/data/runs"), _hardware(load_run_plan)),
    Target("accelerator", 2, described("hwmodels/data/accelerators"), _hardware(load_accelerator)),
    Target("node", 3, described("hwmodels/data/nodes"), _hardware(load_node)),
    Target("scale-up", 2, described("hwmodels/data/scale_up"), _hardware(load_scale_up)),
    Target("network", 2, described("hwmodels/data/networks"), _hardware(load_network)),
    Target("cluster", 4, described("hwmodels/data/clusters"), from_file(read_cluster)),
    Target("price list", 1, described("hwmodels/data/prices"), _hardware(load_prices)),
    Target("fabric prices", 1, described("hwmodels/data/fabric_prices"), _hardware(load_fabric_prices)),
    Target("purchase", 1, described("hwmodels/data/purchases"), _hardware(load_purchase)),
    Target("energy site", 1, described("hwmodels/data/energy"), _hardware(load_energy_site)),
    Target("failure rate", 1, described("hwmodels/data/failures"), _hardware(load_failure_rate)),
    Target("restart", 1, described("hwmodels/data/restarts"), _hardware(load_restart)),
    Target("storage", 1, described("hwmodels/data/storage"), _hardware(load_storage)),
    Target("host", 1, described("hwmodels/data/hosts"), _hardware(load_host)),
    Target("topology", 5, texts_of(".txt", topology_texts), from_file(read_topology)),
    Target("nccl-tests text", 2, texts_of(".txt", nccl_texts), from_file(read_nccl)),
    Target("nccl-tests JSON", 2, nccl_json, from_file(read_nccl)),
    Target("DeepEP log", 3, texts_of(".txt", log_texts), from_file(read_deepep)),
    Target("launch script", 4, texts_of(".sh", script_texts), from_file(read_trainer_file)),
    Target("trainer's log", 4, texts_of(".log", printed_texts), from_file(read_trainer_file)),
    Target("launch capture", 2, texts_of(".jsonl", captured_texts), from_file(read_trainer_file)),
    Target("launch YAML", 2, megatron_yaml, from_file(read_trainer_file)),
    Target("launch TOML", 1, texts_of(".toml", titan_texts), from_file(read_trainer_file)),
    Target("launch JSON", 1, deepspeed_json, from_file(read_trainer_file)),
    Target("schedule CSV", 3, texts_of(".csv", schedule_texts), from_file(read_schedule)),
    Target("expert counts CSV", 2, texts_of(".csv", count_texts), from_file(read_counts)),
    Target("expert counts JSON", 2, counts_json, from_file(read_counts)),
    Target("expert counts npy", 3, counts_npy, from_file(read_counts)),
    Target("plan space", 2, texts_of(".yaml",
    lambda: ("ep: [8, 16]\npp: 2..8:x2\nschedule: [1f1b]\nheadroom: 0.1\n",)), from_file(load_space)),
    Target("list of values", 2, values, read_values),
    Target("store", 1, store_case, read_store),
    Target("uploads by PUT", 2, sent, read_sent),
    Target("packed link", 2, packed, read_packed),
    Target("file of scenarios", 2, kept, read_kept),
)  # fmt: skip
"""Every reader; the weight is its share of the cases."""


def is_refusal(error: BaseException) -> bool:
    """Whether it is one of the two kinds in which the program may refuse its input."""
    return isinstance(error, MoesimError) and error.exit_code in (2, 3)
