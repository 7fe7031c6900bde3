"""What is fuzzed: for every reader of the program, how a case is made and what reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import typer
from fuzz_mutator import NUMBERS, TEXTS, Mutator, values_of

import moesim
import moesim.simulator.planner.search
import moesim.simulator.prepare
import moesim.simulator.study.sweep
from moesim import cli
from moesim.app import state, uploads
from moesim.hwmodels import (
    load_accelerator,
    load_cluster,
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
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.hwmodels.host import load_host
from moesim.hwmodels.importers import import_topology
from moesim.hwmodels.network import load_fabric_prices
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.kernels.importers import deepep_profile, nccl_tests_profile
from moesim.simulator.layout.histogram import read_counts
from moesim.simulator.lists import parse_values
from moesim.simulator.model.hf import import_hf
from moesim.simulator.model.shape import load_model
from moesim.simulator.planner.megatron_read import import_megatron
from moesim.simulator.planner.space import load_space
from moesim.simulator.prepare import prepare
from moesim.simulator.run.plan import load_run_plan
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules.text import from_csv
from moesim.simulator.study import kept
from moesim.simulator.study.point import Outcome, key_of
from moesim.simulator.study.store import Store

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "hwmodels" / "data"
SIMULATED_SHARE = float(os.environ.get("FUZZ_SIM", "0.01"))
"""Of the legal scenarios."""
MOST_CHUNKS = 2_000
"""Ranks times micro-batches times stages a rank of a scenario that is simulated."""


class ReachedError(Exception):
    """Everything was read and checked; what would follow is the work itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """`make` draws a case; `read` gives it to the program, which may refuse it."""

    name: str
    weight: int
    make: Callable[[Mutator], Any]
    read: Callable[[Any, Path, random.Random], None]


@dataclass(frozen=True, slots=True)
class File:
    """A file to be written and read."""

    name: str
    data: bytes


# -- where the work begins -----------------------------------------------------------------------------


@contextmanager
def only_checked() -> Iterator[None]:
    """Inside, a prediction, a search or a sweep ends with ReachedError once its input has been checked."""

    def reached(*_: Any, **__: Any) -> Any:
        raise ReachedError

    places: tuple[tuple[Any, str], ...] = (
        (moesim.simulator.prepare, "assign_stages"),
        (moesim.simulator.planner.search, "_Search"),
        (moesim.simulator.planner.search, "ProcessPoolExecutor"),
        (moesim.simulator.study.sweep._Run, "compute"),
    )
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, reached)
    try:
        yield
    finally:
        for (owner, name), old in zip(places, before, strict=True):
            setattr(owner, name, old)


def check(scenario: Scenario, rng: random.Random) -> None:
    """All checks before any pricing; one legal and small scenario in a hundred is simulated."""
    with only_checked():
        try:
            if scenario.fleet is not None:
                moesim.check(scenario)
            else:
                prepare(scenario)
        except ReachedError:
            pass
    if rng.random() < SIMULATED_SHARE and _is_small(scenario):
        moesim.simulate(scenario)


def _is_small(scenario: Scenario) -> bool:
    plan, gpus = scenario.parallel, 0 if scenario.cluster is None else scenario.machine.n_gpus
    pipelines = max(1, gpus // (plan.tp * plan.pp * plan.cp))
    chunks = plan.pp * plan.vpp * scenario.batch.sequences / (plan.microbatch * pipelines)
    folded = scenario.resolution == "folded" or gpus <= 64
    return bool(gpus) and folded and chunks <= MOST_CHUNKS and gpus <= 4096 and scenario.run.replicas <= 1000


# -- files ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _source(path: Path) -> tuple[str, Any]:
    text = path.read_text("utf-8")
    data = (
        json.loads(text)
        if path.suffix == ".json"
        else parse_mapping(text, path.name)
        if path.suffix == ".yaml"
        else None
    )
    return text, data


@lru_cache(maxsize=64)
def _files(folder: str, pattern: str = "*.yaml") -> tuple[Path, ...]:
    found = sorted((ROOT / folder).glob(pattern))
    assert found, f"no files {folder}/{pattern}"
    return tuple(sorted(found, key=lambda path: (path.stat().st_size, path.name)))


@lru_cache(maxsize=1)
def pool() -> tuple[Any, ...]:
    """Scalars of the shipped files, each once."""
    folders = [f"hwmodels/data/{kind.name}" for kind in sorted(DATA.iterdir()) if kind.name != "comparisons"]
    folders += [f"simulator/data/{name}" for name in ("models", "scenarios")]
    values = {
        repr(v): v for folder in folders for path in _files(folder) for v in values_of(_source(path)[1])
    }
    return tuple(values[name] for name in sorted(values))


def _described(folder: str, ending: str = "", pattern: str = "*.yaml") -> Callable[[Mutator], File]:
    """Files of a folder, small ones more often, changed as data or as text."""

    def make(m: Mutator) -> File:
        files = _files(folder, pattern)
        text, data = _source(files[int(len(files) * m.rng.random() ** 2)])
        kind = m.rng.random()
        if kind < 0.6 and data is not None:
            as_json = m.rng.random() < 0.3
            return File(ending or (".json" if as_json else ".yaml"), m.bytes_of(m.text_of(m.data(data))))
        changed = m.text(text) if kind < 0.95 else m.hostile()
        return File(ending or ".yaml", m.bytes_of(changed))

    return make


def _texts(ending: str, texts: Callable[[], tuple[str, ...]]) -> Callable[[Mutator], File]:
    def make(m: Mutator) -> File:
        text = m.rng.choice(texts())
        return File(ending, m.bytes_of(m.text(text) if m.rng.random() < 0.9 else m.hostile()))

    return make


def _from_file(read: Callable[[Path], Any]) -> Callable[[File, Path, random.Random], None]:
    def run(case: File, folder: Path, rng: random.Random) -> None:
        path = folder / f"case-{os.urandom(6).hex()}{case.name}"  # readers remember files by name and time
        path.write_bytes(case.data)
        try:
            read(path)
        finally:
            path.unlink()

    return run


def _scenario(case: File, folder: Path, rng: random.Random) -> None:
    _from_file(lambda path: check(load_scenario(str(path)), rng))(case, folder, rng)


def _cluster(path: Path) -> None:
    cluster = load_cluster(str(path))
    if cluster.n_gpus <= 4096:
        cluster.topology()


def _topology(path: Path) -> None:
    import_topology(path, "hgx-h200", 1)


@lru_cache(maxsize=1)
def _topology_texts() -> tuple[str, ...]:
    gpu = "".join(
        f'<pci busid="0000:{n}1:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{n}" sm="90" rank="{n}" gdr="1"><nvlink target="0000:09:00.0" count="18" tclass="0x068000"/></gpu>'
        f'<nic><net name="mlx5_{n}" dev="{n}" speed="400000" port="1" gdr="1"/></nic></pci>\n'
        for n in range(4)
    )
    mesh = gpu.replace("0000:09:00.0", "0000:11:00.0").replace("0x068000", "0x030200")
    xml = '<system version="1">\n<cpu numaid="0" arch="x86_64">\n{}</cpu>\n</system>'
    head = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\n"
    rows = "".join(
        f"GPU{i}\t" + "\t".join("X" if i == j else "{0}" for j in range(4)) + "\tPXB\t0-47\n"
        for i in range(4)
    )
    edges = "".join(f"gpu:{n} leaf:{n % 2} 50GB/s 1us\n" for n in range(8)) + "leaf:0 leaf:1 200GB/s\n"
    return (
        xml.format(gpu),
        xml.format(mesh),
        xml.format(gpu.replace("nvlink", "none")),
        head + rows.replace("{0}", "NV18"),
        (head + rows.replace("{0}", "PIX")),
        edges,
    )


@lru_cache(maxsize=1)
def _log_texts() -> tuple[str, ...]:
    return tuple(path.read_text() for path in _files("tests/kernels/importer_fixtures", "deepep*.txt"))


@lru_cache(maxsize=1)
def _nccl_texts() -> tuple[str, ...]:
    return ((ROOT / "tests/kernels/importer_fixtures/all_gather.txt").read_text(),)


def _nccl_json(m: Mutator) -> File:
    figures = {"time": 64.0, "alg_bw": 131.0, "bus_bw": 114.0, "nwrong": 0}
    data = {
        "config": {"nthreads": 1, "ngpus": 1},
        "devices": [{"rank": n, "hostname": "a", "device_info": "NVIDIA H200"} for n in range(8)],
        "args": ["./all_gather_perf", "-b", "8M"], "nccl_version": 22807, "start_time": "2026-05-01 10:00:00",
        "results": [{"size": 8 << (20 + 2 * n), "out_of_place": {**figures, "time": 64.0 * 4**n}} for n in range(3)],
    }  # fmt: skip
    return File(".json", m.bytes_of(m.text_of(m.data(data)) if m.rng.random() < 0.95 else m.hostile()))


def _nccl(path: Path) -> None:
    nccl_tests_profile(path, accelerator="h200-sxm", nic_bytes_per_s=50e9)


def _deepep(path: Path) -> None:
    deepep_profile([path], accelerator="h800-sxm", ranks=16, nic_bytes_per_s=50e9)


@lru_cache(maxsize=1)
def _script_texts() -> tuple[str, ...]:
    from moesim.simulator.planner.megatron import megatron_arguments

    base = load_scenario("deepseek-v3-2048xh800", ["schedule=1f1b", "parallel.pp=16"])
    spelled = megatron_arguments(base).text()
    shell = (
        '#!/bin/bash\nexport TP=2\nPP=${PP:-8}\nMODEL_ARGS=(\n  --seq-length 4096\n  --hidden-size "7168"\n)\n'
        'ARGS="--micro-batch-size 1 --global-batch-size $((8*1))"\ntorchrun x.py ${MODEL_ARGS[@]} $ARGS \\\n'
        "  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --bf16 \\\n"
        "  --moe-layer-freq ([0]*3+[1]*58) --pipeline-model-parallel-layout 'Et*3|(tt|)*29mL' && echo done\n"
    )
    return "torchrun x.py \\\n" + spelled, shell


def _megatron_yaml(m: Mutator) -> File:
    data = {
        "ENV_VARS": {"TP": 2, "NCCL_DEBUG": "INFO"},
        "MODEL_ARGS": {"--seq-length": 4096, "--bf16": True, "--tensor-model-parallel-size": "${TP}",
                       "--moe-layer-freq": "([0]*3+[1]*58)", "--global-batch-size": 512, "--fp8-format": False},
    }  # fmt: skip
    return File(".yaml", m.bytes_of(m.text_of(m.data(data)) if m.rng.random() < 0.95 else m.hostile()))


@lru_cache(maxsize=1)
def _home() -> Scenario:
    return load_scenario("deepseek-v3-2048xh800")


def _megatron(path: Path) -> None:
    import_megatron(path, _home(), _home().shape)


@lru_cache(maxsize=1)
def _schedule_texts() -> tuple[str, ...]:
    return tuple(path.read_text() for path in _files("tests/golden/schedules", "*.csv")[:8])


def _schedule(path: Path) -> None:
    from_csv(path.read_text("utf-8", errors="replace"), source=path.name)


@lru_cache(maxsize=1)
def _count_texts() -> tuple[str, ...]:
    return "10,20,30,40\n1,2,3,4\n", "# counts\n5,5,5,5,5,5,5,5\n"


def _counts_json(m: Mutator) -> File:
    return File(".json", m.bytes_of(m.text_of(m.data({"counts": [[1, 2.5, 3, 4], [5, 6, 7, 8]]}))))


def _counts_npy(m: Mutator) -> File:
    r = m.rng
    buffer = io.BytesIO()
    array = np.arange(24.0).reshape(r.choice(((24,), (4, 6), (2, 3, 4), (1, 2, 3, 4))))
    np.save(buffer, array.astype(r.choice(("f8", "f4", "i8", "u1", "?", "c16", "U3", "M8[s]"))))
    data = bytearray(buffer.getvalue())
    header = data[10:128].decode("latin-1")
    if r.random() < 0.4:
        # Past its end: the array; NumPy reads the header as Python text.
        data[10:128] = m.text(header).encode("latin-1", errors="replace")[:118].ljust(118)
    for _ in range(r.choice((0, 0, 1, 3))):
        data[r.randrange(len(data))] = r.randrange(256)
    return File(".npy", bytes(data[: r.choice((len(data), len(data), 9, 60, 130))]))


# -- what the program keeps ----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _small() -> Scenario:
    return load_scenario(str(ROOT / "tests/golden/scenario-small.yaml"))


@lru_cache(maxsize=1)
def _stored() -> bytes:
    """A store with one prediction."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        result = moesim.simulate(_small())
        with Store(path, durable=False) as store:
            store.put(
                key_of(_small()), "small", Outcome("ok", "", {"step_time_s": 1.0}, result.model_dump_json())
            )
        database = sqlite3.connect(path)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA journal_mode = DELETE")
        database.close()
        return path.read_bytes()


_COLUMNS = ("key", "scenario_hash", "calibration_hash", "version", "scenario", "status", "reason", "figures", "result",
            "row_digest", "result_digest")  # fmt: skip


def _store_case(m: Mutator) -> tuple[bytes, str | None, Any]:
    """(file, column, value): bytes changed, or one value of the row."""
    data, r = _stored(), m.rng
    if r.random() < 0.5:
        changed = bytearray(data)
        for _ in range(r.choice((1, 2, 20))):
            changed[r.randrange(len(changed)) if r.random() < 0.7 else r.randrange(200)] = r.randrange(256)
        return bytes(changed[: len(changed) if r.random() < 0.9 else r.randrange(len(changed))]), None, None
    value = r.choice((None, 7, 1.5, "text", b"\x00\xff", b"", "", "{}", "[1]", '{"a": NaN}', "\udcff".encode("utf-8", "surrogatepass"),
                      gzip.compress(b"x"), b"x\x9c" + bytes(40)))  # fmt: skip
    return data, r.choice(_COLUMNS), value


def _store(case: tuple[bytes, str | None, Any], folder: Path, rng: random.Random) -> None:
    for old in folder.glob("store.sqlite*"):
        old.unlink()
    data, column, value = case
    key = key_of(_small())
    kept._problem = None
    os.environ[kept.FOLDER] = str(folder / "kept")
    (folder / "kept").mkdir(exist_ok=True)
    place = folder / "kept" / f"predictions-{moesim.__version__}-{kept.program_hash()[:12]}.sqlite"
    for path in (folder / "store.sqlite", place):
        path.write_bytes(data)
        if column is not None:
            database = sqlite3.connect(path)
            try:
                database.execute(f"UPDATE results SET {column} = ?", (value,))
                database.commit()
            except sqlite3.Error:  # NULL where the table allows none
                pass
            database.close()
    try:
        kept.find(_small())
        with Store(folder / "store.sqlite", durable=False) as store:
            found = store.get(key)
            assert found is None or found.figures == {"step_time_s": 1.0}, f"another outcome: {found}"
            text = store.result(key)
            assert not text or text.startswith('{"schema'[:2]), "another result"
    finally:
        os.environ[kept.FOLDER] = "off"
        shutil.rmtree(folder / "kept", ignore_errors=True)


# -- words ---------------------------------------------------------------------------------------------

_KEYS = (
    "seed", "schedule", "precision", "profile", "model", "cluster", "cluster.nodes", "parallel.tp", "parallel.pp",
    "parallel.ep", "parallel.cp", "parallel.vpp", "parallel.microbatch", "parallel.zero_stage", "parallel", "batch",
    "batch.sequences", "batch.sequence_length", "communication.sms", "communication.overlap", "communication.kernels",
    "recompute", "routing", "routing.expert_load_cv", "routing.expert_load_cv.value", "routing.load", "routing.load.file",
    "routing.capacity", "routing.eplb", "routing.groups_per_token", "variation.clock_cv", "variation.jitter_cv",
    "variation.clock_cv.between", "run", "run.tokens", "run.replicas", "run.failures", "run.checkpoint", "run.start",
    "resolution", "spreading", "faults", "software", "software.attention", "stages", "stages.layers", "stages.blocks",
    "fleet", "fleet.pools", "cluster.node", "cluster.node.gpus", "cluster.node.accelerator", "cluster.network",
    "cluster.node.nics_per_gpu", "cluster.node.nic_bandwidth", "cluster.node.accelerator.memory_bandwidth",
    "cluster.price_per_gpu_hour", "cluster.network.fabric.link_bandwidth", "cluster.node.scale_up", "name", "description",
    "precision.gemm", "communication", "variation", "model.hidden", "", ".", "a.b.c", "seed.x", "x" * 5000, "sed",
)  # fmt: skip


@lru_cache(maxsize=1)
def _whole() -> dict[str, Any]:
    return _home().to_dict() | {"cluster": _home().machine.model_dump(mode="json", exclude_none=True)}


def _held(key: str, otherwise: Any) -> Any:
    """What the home case holds under a key."""
    value: Any = _whole()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return (
        otherwise
        if value is None
        else value["value"]
        if isinstance(value, dict) and "value" in value
        else value
    )


def _override(m: Mutator) -> str:
    r = m.rng
    key = r.choice(_KEYS) if r.random() < 0.93 else m.key(r.choice(_KEYS))
    if r.random() < 0.15:
        return f"{key}={m.hostile()[:4000]}"
    old = _held(key, r.choice((8, 64, 0.1, "50 GB/s", "1f1b", "bf16", [1, 2], r.choice(pool()))))
    value = old if r.random() < 0.25 else m.value(old)
    text = m.text_of(value) if r.random() < 0.7 else str(value)
    return r.choice((f"{key}={text}",) * 20 + (f"{key}", f"={text}", text, f"{key}=={text}"))


_PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "model": ("deepseek-v3", "mixtral-8x22b", "qwen3-30b-a3b", "llama-3.1-70b"),
    "cluster": ("h100-1024", "h200-1024", "h200-8", "mi300x-2048", "gb200-nvl72-2048", "deepseek-h800-2048"),
    "cluster.nodes": (1, 2, 4, 16, 100, 256), "schedule": ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev"),
    "precision": ("bf16", "fp8"), "parallel.tp": (1, 2, 4, 8), "parallel.pp": (1, 2, 4, 8, 16), "parallel.ep": (1, 2, 8, 16, 32, 64),
    "parallel.cp": (1, 2), "parallel.vpp": (1, 2, 4), "parallel.microbatch": (1, 2, 4), "parallel.zero_stage": (0, 1, 2, 3),
    "parallel.expert_tp": (1, 2), "parallel.sequence_parallel": (True, False), "batch.sequences": (64, 960, 3840, 15360),
    "batch.sequence_length": (1, 17, 512, 4096, 131072), "communication.sms": (0, 1, 8, 20, 24, 131), "seed": (0, 1, 2**62),
    "recompute": ("none", "attention", "selective", "full"), "routing.expert_load_cv": (0, 0.5, 3, "300 %", 50),
    "routing.load": ({"kind": "uniform"}, {"kind": "zipf", "exponent": 0.5}, {"kind": "zipf", "exponent": 30},
                     {"kind": "bias", "affinity_spread": 0.3, "drift_steps": 100, "step": 50}),
    "routing.capacity": ({"factor": 1.25}, {"factor": 0.01, "per": "rank"}, {"factor": 1e-9}, {"factor": 1e6}),
    "routing.eplb": ({"redundant_experts": 64}, {"redundant_experts": 0, "policy": "global"}, {"redundant_experts": 3}),
    "routing.gate": ("model", "best", "top2-sum", "unlimited"), "routing.groups_per_token": (1, 2, 8),
    "variation.clock_cv": (0, 0.01, 0.5), "variation.jitter_cv": (0, 0.05, 1, 5), "resolution": ("folded", "full"),
    "spreading": ("modulo", "ecmp", "ideal"), "stages": ({"layers": [4, 4, 4, 4]}, {"blocks": ["moe*4", "moe*4"]}),
    "faults": ([{"kind": "down", "link": "plane:0"}], [{"kind": "slow-gpu", "gpu": 0, "speed": 0.5}],
               [{"kind": "node-loss", "node": 0}], [{"kind": "jitter", "gpu": "all", "cv": 1.0}],
               [{"kind": "slow-link", "link": "plane:1", "bandwidth": 1e-9}]),
    "software.kernels": ("eager",), "software.host": ("xeon-8480c",), "software.cuda_graphs": (["whole"], ["attention"]),
    "software.overlap_tensor_parallel": ("full", "weight-gradient"), "software.overlap_data_parallel": (True,),
    "run.tokens": (1, 1e9, 1e15), "run.replicas": (1, 16), "profile": ("generic-roofline", "h200-measured", "h100-layers", "h800-trace"),
    "cluster.node.nic_bandwidth": ("1 kB/s", "1000 PB/s", "50 Gb/s"), "cluster.node.nics_per_gpu": (1, 2, 1000),
    "cluster.price_per_gpu_hour": ("$0/h", "$1000000/h"), "cluster.node.accelerator.hbm_bandwidth": ("1 kB/s", "1 EB/s"),
}  # fmt: skip
"""Values that are legal with some of the others."""


def _plausible(m: Mutator) -> str:
    key = m.rng.choice(sorted(_PLAUSIBLE))
    return f"{key}={m.text_of(m.rng.choice(_PLAUSIBLE[key]))}"


def _presets(m: Mutator) -> str:
    names = moesim.presets()
    return m.rng.choice(names) if m.rng.random() < 0.9 else str(m.value(names[0]))


def _link(m: Mutator) -> tuple[str, list[str]]:
    if m.rng.random() < 0.6:
        texts = [_plausible(m) for _ in range(m.rng.choice((1, 2, 3, 5)))]
        return m.rng.choice(moesim.presets()), [*texts, _override(m)] if m.rng.random() < 0.3 else texts
    return _presets(m), [_override(m) for _ in range(m.rng.choice((1, 1, 2, 3, 8)))]


def _read_link(case: tuple[str, list[str]], folder: Path, rng: random.Random) -> None:
    name, texts = case
    scenario = state.build(name[:200], [text[: state.MOST_LINK_CHARACTERS] for text in texts])
    state.overrides_between(_home(), scenario)
    check(scenario, rng)


def _upload(m: Mutator) -> tuple[str, str, bytes]:
    kind = m.rng.choice(sorted(uploads.ENDINGS))
    makers = {
        "scenario": _described("simulator/data/scenarios"), "model": _described("simulator/data/models"),
        "profile": _described("hwmodels/data/calibration"), "topology": _texts("", _topology_texts),
        "histogram": _texts("", _count_texts),
    }  # fmt: skip
    data = makers[kind](m).data
    ending = m.rng.choice(uploads.ENDINGS[kind])
    name = f"file{ending}" if m.rng.random() < 0.8 else str(m.value(f"file{ending}"))
    if m.rng.random() < 0.15:
        name, data = f"file{ending}.gz", gzip.compress(data, 1)[: m.rng.choice((10**6, 20))]
    return kind, name, data


def _read_upload(case: tuple[str, str, bytes], folder: Path, rng: random.Random) -> None:
    kind, name, data = case
    options = {"like": "hgx-h200"} if kind == "topology" else {}
    accepted = uploads.accept(kind, name, data, **options)
    uploads.path_of(accepted.token).unlink()


def _values(m: Mutator) -> str:
    return m.text(
        m.rng.choice(
            ("8..256:x2", "bf16,fp8", "0..48:4", "1..8", "0..1:0.1", "50 GB/s,100 GB/s", "{kind: zipf, s: 1}")
        )
    )


def _read_values(case: str, folder: Path, rng: random.Random) -> None:
    parse_values(case, "key")


# -- the command line ----------------------------------------------------------------------------------

_LEFT_OUT = ("app", "doctor")
"""Commands that start a server, or read no input."""
_WORDS = {
    "scenario": ("deepseek-v3-2048xh800", "deepseek-v3-trace-pair"), "name": ("1f1b", "dualpipe", "deepseek-v3", "h800-sxm", "h100-1024"),
    "like": ("hgx-h200",), "network": ("mrft-ib-400g",), "node": ("hgx-h800",), "profile": ("h800-published", "h200-1gpu"),
    "target": ("h800-sxm",), "accelerator": ("h200-sxm", "h800-sxm"), "nic": ("400 Gb/s", "50 GB/s"), "dtype": ("FP8", "BF16"),
    "objective": ("time", "cost", "pareto"), "design": ("grid", "list", "random", "sobol"), "policy": ("global", "hierarchical"),
    "resolution": ("folded", "full"), "format_": ("text", "json", "csv"), "what": ("scenario", "result"), "arguments": ("megatron",),
    "vary": ("parallel.ep=8,16", "communication.sms=8..24:4"), "ranges": ("routing.expert_load_cv=0.1,0.3",), "ranks": ("8", "0,1"),
    "variants": ("parallel.ep=32",), "operation": ("all_gather",), "base": ("deepseek-v3-2048xh800",), "into": ("h200-1gpu",),
    "source": ("h200-sxm",), "members": ("all", "0,1"), "gpus": ("0-3",), "only": ("nccl",), "compare": ("h200-1gpu",),
    "scheduler": ("not an address",), "scenarios": ("deepseek-v3-2048xh800",),
}  # fmt: skip


@lru_cache(maxsize=1)
def _commands() -> tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]:
    """((words of the command), its parameters) of every command."""
    found = []

    def walk(group: Any, words: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, (*words, name))
            elif name not in _LEFT_OUT:
                found.append(((*words, name), tuple(command.params)))

    walk(typer.main.get_command(cli.app), ())
    return tuple(found)


def _word(m: Mutator, name: str, files: list[File]) -> str:
    r = m.rng
    if name in ("overrides",):
        return _override(m)
    if name in ("trace", "picture", "store", "output", "trace_per_rank"):
        return (
            r.choice(("out.yaml", "out.json", "out.sqlite", "out.svg", "no/x.yaml", ".", ""))
            if r.random() < 0.9
            else str(m.value("a.yaml"))
        )
    if name in ("file", "log", "logs", "script", "config", "space") or (
        name == "scenario" and r.random() < 0.2
    ):
        makers = {
            "file": r.choice((_texts(".txt", _topology_texts), _texts(".csv", _count_texts))), "log": _texts(".txt", _nccl_texts),
            "logs": _texts(".txt", _log_texts), "script": _texts(".sh", _script_texts), "config": _described("tests/golden/models", ".json", "*.json"),
            "space": _texts(".yaml", lambda: ("ep: [8, 16]\npp: 2..8:x2\n",)), "scenario": _described("simulator/data/scenarios"),
        }  # fmt: skip
        files.append(makers[name](m))
        return f"input-{len(files) - 1}{files[-1].name}"
    known = _WORDS.get(name)
    if known and r.random() < 0.7:
        return r.choice(known) if r.random() < 0.8 else str(m._near(r.choice(known)))
    return str(r.choice((r.randrange(20), 8, 16, m.value(8), r.choice(NUMBERS), r.choice(TEXTS))))[:6000]


def _command_line(m: Mutator) -> tuple[list[str], list[File]]:
    r = m.rng
    words, parameters = r.choice(_commands())
    args, files = list(words), list[File]()
    for parameter in parameters:
        if parameter.name == "help":
            continue
        needed = parameter.required or parameter.param_type_name == "argument"
        if not needed and r.random() < 0.65:
            continue
        if needed and r.random() < 0.03:
            continue
        times = r.choice((1, 2)) if getattr(parameter, "multiple", False) or parameter.nargs == -1 else 1
        for _ in range(times):
            if parameter.param_type_name == "argument":
                args.append(_word(m, parameter.name, files))
            elif getattr(parameter, "is_flag", False):
                args.append(parameter.opts[0])
            else:
                args += [r.choice(parameter.opts), _word(m, parameter.name, files)]
    if r.random() < 0.03:
        args.insert(r.randrange(len(args) + 1), str(m.value("--json")))
    return args, files


def _run_command(case: tuple[list[str], list[File]], folder: Path, rng: random.Random) -> None:
    args, files = case
    if args[0] == "validate" and not any(
        word.startswith("-") and word not in ("--json", "--all") for word in args[1:]
    ):
        return  # all published figures anew: no input of a stranger's
    here = Path.cwd()
    os.chdir(folder)
    try:
        for number, file in enumerate(files):
            Path(f"input-{number}{file.name}").write_bytes(file.data)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), only_checked():
            cli.app(args=args, prog_name="moesim")
    except ReachedError:
        pass
    except SystemExit as end:
        if end.code not in (None, 0, 2, 3):
            raise RuntimeError(f"exit code {end.code}") from end
        if end.code in (2, 3):
            raise InputError("usage") from None
    finally:
        os.chdir(here)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _hardware(read: Callable[[str], Any]) -> Callable[[File, Path, random.Random], None]:
    return _from_file(lambda path: read(str(path)))


TARGETS: tuple[Target, ...] = (
    Target("scenario file", 16, _described("simulator/data/scenarios"), _scenario),
    Target("small scenario file", 10, _described("tests/golden", pattern="scenario-small.yaml"), _scenario),
    Target("link", 18, _link, _read_link),
    Target("command line", 12, _command_line, _run_command),
    Target("upload", 4, _upload, _read_upload),
    Target("model file", 4, _described("simulator/data/models"), _from_file(load_model)),
    Target("config.json", 5, _described("tests/golden/models", ".json", "*.json"), _from_file(import_hf)),
    Target("calibration profile", 4, _described("hwmodels/data/calibration"), _from_file(load_profile)),
    Target("run plan", 2, _described("simulator/data/runs"), _hardware(load_run_plan)),
    Target("accelerator", 2, _described("hwmodels/data/accelerators"), _hardware(load_accelerator)),
    Target("node", 3, _described("hwmodels/data/nodes"), _hardware(load_node)),
    Target("scale-up", 2, _described("hwmodels/data/scale_up"), _hardware(load_scale_up)),
    Target("network", 2, _described("hwmodels/data/networks"), _hardware(load_network)),
    Target("cluster", 4, _described("hwmodels/data/clusters"), _from_file(_cluster)),
    Target("price list", 1, _described("hwmodels/data/prices"), _hardware(load_prices)),
    Target("fabric prices", 1, _described("hwmodels/data/fabric_prices"), _hardware(load_fabric_prices)),
    Target("purchase", 1, _described("hwmodels/data/purchases"), _hardware(load_purchase)),
    Target("energy site", 1, _described("hwmodels/data/energy"), _hardware(load_energy_site)),
    Target("failure rate", 1, _described("hwmodels/data/failures"), _hardware(load_failure_rate)),
    Target("restart", 1, _described("hwmodels/data/restarts"), _hardware(load_restart)),
    Target("storage", 1, _described("hwmodels/data/storage"), _hardware(load_storage)),
    Target("host", 1, _described("hwmodels/data/hosts"), _hardware(load_host)),
    Target("topology", 5, _texts(".txt", _topology_texts), _from_file(_topology)),
    Target("nccl-tests text", 2, _texts(".txt", _nccl_texts), _from_file(_nccl)),
    Target("nccl-tests JSON", 2, _nccl_json, _from_file(_nccl)),
    Target("DeepEP log", 3, _texts(".txt", _log_texts), _from_file(_deepep)),
    Target("launch script", 4, _texts(".sh", _script_texts), _from_file(_megatron)),
    Target("launch YAML", 2, _megatron_yaml, _from_file(_megatron)),
    Target("schedule CSV", 3, _texts(".csv", _schedule_texts), _from_file(_schedule)),
    Target("expert counts CSV", 2, _texts(".csv", _count_texts), _from_file(read_counts)),
    Target("expert counts JSON", 2, _counts_json, _from_file(read_counts)),
    Target("expert counts npy", 3, _counts_npy, _from_file(read_counts)),
    Target("plan space", 2, _texts(".yaml", lambda: ("ep: [8, 16]\npp: 2..8:x2\nschedule: [1f1b]\nheadroom: 0.1\n",)), _from_file(load_space)),
    Target("list of values", 2, _values, _read_values),
    Target("store", 1, _store_case, _store),
)  # fmt: skip
"""Every reader; the weight is its share of the cases."""


def is_refusal(error: BaseException) -> bool:
    """Whether it is one of the two kinds in which the program may refuse its input."""
    return isinstance(error, MoesimError) and error.exit_code in (2, 3)
