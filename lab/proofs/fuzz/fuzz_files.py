"""Readers of files: how a case is made and what reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import sqlite3
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_base import ROOT, File, check, files_of, from_file, home
from fuzz_mutator import Mutator

import moesim
from moesim.hwmodels import load_cluster
from moesim.hwmodels.importers import import_topology
from moesim.kernels.importers import deepep_profile, nccl_tests_profile
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules.text import from_csv
from moesim.simulator.studies import result_cache
from moesim.simulator.studies.store import PointOutcome
from moesim.simulator.studies.space import key_of
from moesim.simulator.studies.store import Store
from moesim.simulator.trainers.meaning.understand import understand
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.reading import read_launch


def read_scenario(case: File, folder: Path, rng: random.Random) -> None:
    from_file(lambda path: check(load_scenario(str(path)), rng))(case, folder, rng)


def read_cluster(path: Path) -> None:
    cluster = load_cluster(str(path))
    if cluster.n_gpus <= 4096:
        cluster.topology()


def read_topology(path: Path) -> None:
    import_topology(path, "hgx-h200", 1)


@lru_cache(maxsize=1)
def topology_texts() -> tuple[str, ...]:
    gpu = "".join(
        f'<pci busid="0000:{n}1:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{n}" sm="90" rank="{n}" gdr="1">'
        '<nvlink target="0000:09:00.0" count="18" tclass="0x068000"/></gpu>'
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
def log_texts() -> tuple[str, ...]:
    return tuple(path.read_text() for path in files_of("tests/kernels/importer_fixtures", "deepep*.txt"))


@lru_cache(maxsize=1)
def nccl_texts() -> tuple[str, ...]:
    return ((ROOT / "tests/kernels/importer_fixtures/all_gather.txt").read_text(),)


def nccl_json(m: Mutator) -> File:
    figures = {"time": 64.0, "alg_bw": 131.0, "bus_bw": 114.0, "nwrong": 0}
    data = {
        "config": {"nthreads": 1, "ngpus": 1},
        "devices": [{"rank": n, "hostname": "a", "device_info": "NVIDIA H200"} for n in range(8)],
        "args": ["./all_gather_perf", "-b", "8M"], "nccl_version": 22807, "start_time": "2026-05-01 10:00:00",
        "results": [{"size": 8 << (20 + 2 * n), "out_of_place": {**figures,
        "time": 64.0 * 4**n}} for n in range(3)],
    }  # fmt: skip
    return File(".json", m.bytes_of(m.text_of(m.data(data)) if m.rng.random() < 0.95 else m.hostile()))


def read_nccl(path: Path) -> None:
    nccl_tests_profile(path, accelerator="h200-sxm", nic_bytes_per_s=50e9)


def read_deepep(path: Path) -> None:
    deepep_profile([path], accelerator="h800-sxm", ranks=16, nic_bytes_per_s=50e9)


@lru_cache(maxsize=1)
def titan_texts() -> tuple[str, ...]:
    """A configuration of torchtitan."""
    return (
        '[model]\nname = "deepseek_v3"\n[training]\nlocal_batch_size = 4\nseq_len = 4096\n[parallelism]\n'
        "data_parallel_shard_degree = -1\nexpert_parallel_degree = 8\npipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]\nmode = "full"\n',
    )


def deepspeed_json(m: Mutator) -> File:
    """A configuration of DeepSpeed, mutated."""
    data = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    }  # fmt: skip
    return File(".json", m.bytes_of(m.text_of(m.data(data)) if m.rng.random() < 0.95 else m.hostile()))


@lru_cache(maxsize=1)
def script_texts() -> tuple[str, ...]:
    base = load_scenario("deepseek-v3-2048xh800", ["schedule=1f1b", "parallel.pp=16"])
    spelled = megatron_arguments(base).text()
    whole = (
        '#!/bin/bash\nNNODES=16\nVPP=${VPP:-2}\nARGS="--num-layers 32 --hidden-size 4096 --swiglu \\\n'
        '  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --vocab-size 32000"\n'
        "torchrun --nnodes $NNODES --nproc_per_node 8 pretrain_gpt.py $ARGS --bf16 --micro-batch-size 1 \\\n"
        "  --global-batch-size 256 --seq-length 4096 --num-experts 8 --expert-model-parallel-size 8 \\\n"
        "  --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank $VPP \\\n"
        "  --recompute-granularity selective --recompute-modules layernorm moe_act --fp8-format e4m3\n"
    )
    shell = (
        "#!/bin/bash\nexport TP=2\nPP=${PP:-8}\n"
        'MODEL_ARGS=(\n  --seq-length 4096\n  --hidden-size "7168"\n)\n'
        'ARGS="--micro-batch-size 1 --global-batch-size 8"\ntorchrun x.py ${MODEL_ARGS[@]} $ARGS \\\n'
        "  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --bf16 \\\n"
        "  --moe-layer-freq ([0]*3+[1]*58) --pipeline-model-parallel-layout 'Et*3|(tt|)*29mL' && echo done\n"
    )
    return "torchrun x.py \\\n" + spelled, shell, whole


def megatron_yaml(m: Mutator) -> File:
    data = {
        "ENV_VARS": {"TP": 2, "NCCL_DEBUG": "INFO"},
        "MODEL_ARGS": {"--seq-length": 4096, "--bf16": True, "--tensor-model-parallel-size": "${TP}",
                       "--moe-layer-freq": "([0]*3+[1]*58)", "--global-batch-size": 512,
                       "--fp8-format": False},
    }  # fmt: skip
    return File(".yaml", m.bytes_of(m.text_of(m.data(data)) if m.rng.random() < 0.95 else m.hostile()))


@lru_cache(maxsize=1)
def printed_texts() -> tuple[str, ...]:
    """Arguments as trainers print them in their logs."""
    folder = "tests/simulator/trainers/reading/printed"
    logs = (path.read_text() for path in (*files_of(folder, "*.log"), *files_of(folder, "*.yaml")))
    return tuple(text for text in logs if len(text) < 30_000)


@lru_cache(maxsize=1)
def captured_texts() -> tuple[str, ...]:
    """Notes of stand-ins."""
    words = ["srun", "-N", "4", "bash", "-c", "$LAUNCH train.py --num-layers 4 --bf16 --micro-batch-size $M"]
    variables = {"LAUNCH": "torchrun --nproc_per_node 8", "M": "2"}
    note = {"words": words, "environment": variables, "files": {"ds.json": '{"train_batch_size": 64}'}}
    other = {"words": ["deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds.json"]}
    return json.dumps(note) + "\n", json.dumps(other | {"files": note["files"]}) + "\n"


def read_trainer_file(path: Path) -> None:
    understanding = understand(read_launch(path), home(), path.name, vocab=129280)
    assert understanding.to_dict()


@lru_cache(maxsize=1)
def schedule_texts() -> tuple[str, ...]:
    return tuple(path.read_text() for path in files_of("tests/golden/schedules", "*.csv")[:8])


def read_schedule(path: Path) -> None:
    from_csv(path.read_text("utf-8", errors="replace"), source=path.name)


@lru_cache(maxsize=1)
def count_texts() -> tuple[str, ...]:
    return "10,20,30,40\n1,2,3,4\n", "# counts\n5,5,5,5,5,5,5,5\n"


def load_texts() -> tuple[str, ...]:
    return (
        "arrival_s,input_tokens,output_tokens\n0,10,20\n0.5,30,4\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n',
    )


def counts_json(m: Mutator) -> File:
    return File(".json", m.bytes_of(m.text_of(m.data({"counts": [[1, 2.5, 3, 4], [5, 6, 7, 8]]}))))


def counts_npy(m: Mutator) -> File:
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        result = moesim.simulate(_small())
        with Store(path, durable=False) as store:
            store.put(
                key_of(_small()),
                "small",
                PointOutcome("ok", "", {"step_time_s": 1.0}, result.model_dump_json()),
            )
        database = sqlite3.connect(path)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA journal_mode = DELETE")
        database.close()
        return path.read_bytes()


_COLUMNS = ("key", "scenario_hash", "calibration_hash", "version", "scenario", "status", "reason", "figures",
"result",
            "row_digest", "result_digest")  # fmt: skip


def store_case(m: Mutator) -> tuple[bytes, str | None, Any]:
    """(file, column, value): bytes changed, or one value of the row."""
    data, r = _stored(), m.rng
    if r.random() < 0.5:
        changed = bytearray(data)
        for _ in range(r.choice((1, 2, 20))):
            changed[r.randrange(len(changed)) if r.random() < 0.7 else r.randrange(200)] = r.randrange(256)
        return bytes(changed[: len(changed) if r.random() < 0.9 else r.randrange(len(changed))]), None, None
    value = r.choice((None, 7, 1.5, "text", b"\x00\xff", b"", "", "{}", "[1]", '{"a": NaN}',
    "\udcff".encode("utf-8", "surrogatepass"),
                      gzip.compress(b"x", mtime=0), b"x\x9c" + bytes(40)))  # fmt: skip
    return data, r.choice(_COLUMNS), value


def read_store(case: tuple[bytes, str | None, Any], folder: Path, rng: random.Random) -> None:
    for old in folder.glob("store.sqlite*"):
        old.unlink()
    data, column, value = case
    key = key_of(_small())
    result_cache._problem = None
    os.environ[result_cache.FOLDER] = str(folder / "kept")
    (folder / "kept").mkdir(exist_ok=True)
    place = folder / "kept" / f"predictions-{moesim.__version__}-{result_cache.program_hash()[:12]}.sqlite"
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
        result_cache.find(_small())
        with Store(folder / "store.sqlite", durable=False) as store:
            found = store.get(key)
            assert found is None or found.figures == {"step_time_s": 1.0}, f"another outcome: {found}"
            text = store.result(key)
            assert not text or text.startswith('{"schema'[:2]), "another result"
    finally:
        os.environ[result_cache.FOLDER] = "off"
        shutil.rmtree(folder / "kept", ignore_errors=True)
