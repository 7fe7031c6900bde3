"""YAML, TOML and JSON configurations become arguments with dotted names, with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import launch_of, values

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers import reading
from moesim.simulator.trainers.launch import Argument, Unknown
from moesim.simulator.trainers.reading import read_launch

# The construct of model_configs/benchmarking/*.yaml of yanring/Megatron-MoE-ModelZoo.
MODEL_ARGS = """ENV_VARS:
  NCCL_NVLS_ENABLE: 0
MODEL_ARGS:
  # Distributed args
  --tensor-model-parallel-size: ${TP}
  --expert-model-parallel-size: ${EP}
  --use-distributed-optimizer: true
  --finetune: false
  --lr: 3.9e-6 # scaled
  --clip-grad: 1.0
  --moe-layer-freq: ([0]*3+[1]*58)
  --recompute-modules: mla_up_proj mlp
  --save: ${OUTPUT_PATH}/checkpoints
  --name: M-TP${TP}EP${EP}
"""


def test_model_args_are_filled_from_the_environment(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, MODEL_ARGS, "m.yaml", environment={"TP": "2", "OUTPUT_PATH": "/o"})
    assert values(launch) == {
        "--tensor-model-parallel-size": "2",
        "--expert-model-parallel-size": "?${EP}",
        "--use-distributed-optimizer": None,
        "--lr": "3.9e-6",
        "--clip-grad": "1.0",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--recompute-modules": ("mla_up_proj", "mlp"),
        "--save": "/o/checkpoints",
        "--name": "?M-TP2EP${EP}",
    }
    assert launch.arguments[1] == Argument(
        "--expert-model-parallel-size", Unknown("${EP}", "the variable EP is not set"), "m.yaml, line 6"
    )
    assert launch.environment == {"NCCL_NVLS_ENABLE": "0"} and launch.trainer == "megatron-lm"
    assert launch.notes == ("m.yaml, line 8: --finetune is false, so the flag is not given",)


def test_a_value_is_filled_once_and_not_again(tmp_path: Path) -> None:
    text = "MODEL_ARGS:\n  --a: ${A}\n"
    assert values(launch_of(tmp_path, text, "m.yaml", environment={"A": "${A}${A}"})) == {"--a": "${A}${A}"}


# The constructs of launcher_scripts/conf/training/gpt3/*.yaml of NVIDIA/NeMo-Framework-Launcher.
NEMO = """defaults:
  - _self_
run:
  name: gpt3_x
trainer:
  num_nodes: 16
  devices: 8
  precision: bf16
  limit: ${multiply:${trainer.num_nodes}, ${.devices}}
model:
  seq: 2048
  micro_batch_size: 4
  encoder_seq_length: ${.seq}
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  hidden_size: 6144
  layers: ${divide_floor:44, 5}
  name: ${run.name}_tp${.tp}
  tp: 8
  data:
    path: ${oc.env:DATA}
    other: ${oc.env:OTHER,/d}
    mounted: ${training.model.tp}
    lost: ${data_dir}/x
    splits: [900, 50, 50]
    todo: ???
    log: ${fancy:1,2}
    loop: ${.loop}
"""


def test_interpolations_are_resolved_inside_the_file(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, NEMO, "c.yaml", environment={"DATA": "/data"})
    found = values(launch)
    assert found["trainer.limit"] == 128
    assert found["model.encoder_seq_length"] == 2048
    assert found["model.ffn_hidden_size"] == 24576
    assert found["model.layers"] == 8
    assert found["model.name"] == "gpt3_x_tp8"
    assert found["model.data.path"] == "/data" and found["model.data.other"] == "/d"
    assert found["model.data.mounted"] == 8
    assert found["model.data.lost"] == "?${data_dir}/x"
    assert found["model.data.splits"] == (900, 50, 50)
    assert [found[f"model.data.{name}"] for name in ("todo", "log", "loop")] == [
        "????",
        "?${fancy:1,2}",
        "?${.loop}",
    ]
    assert (launch.machine.nodes, launch.machine.gpus_per_node) == (16, 8)
    assert launch.machine.places == {"nodes": "c.yaml, line 6", "gpus_per_node": "c.yaml, line 7"}
    assert launch.trainer == "nemo" and "defaults of other files" in launch.notes[0]


def test_overrides_of_megatron_bridge_are_nested_names(tmp_path: Path) -> None:
    text = "model:\n  tensor_model_parallel_size: 2\n  overlap: true\ntrain:\n  global_batch_size: 64\n"
    launch = launch_of(tmp_path, text, "o.yaml")
    assert values(launch) == {
        "model.tensor_model_parallel_size": 2, "model.overlap": True, "train.global_batch_size": 64,
    }  # fmt: skip
    assert launch.trainer == "megatron-bridge"
    assert launch.arguments[2].place == "o.yaml, line 5"


def test_toml_of_torchtitan(tmp_path: Path) -> None:
    text = (
        '[model]\nflavor = "671B"\n[training]\nlocal_batch_size = 4\nsteps = 10_000\n[parallelism]\n'
        "data_parallel_shard_degree = -1\nexpert_parallel_degree = 8 # ep\n[compile]\ncomponents = ['loss']\n"
        "[activation_checkpoint]\nmode = 'selective'\n"
    )
    launch = launch_of(tmp_path, text, "t.toml")
    assert values(launch) == {
        "model.flavor": "671B", "training.local_batch_size": 4, "training.steps": 10_000,
        "parallelism.data_parallel_shard_degree": -1, "parallelism.expert_parallel_degree": 8,
        "compile.components": ("loss",), "activation_checkpoint.mode": "selective",
    }  # fmt: skip
    assert launch.arguments[4].place == "t.toml, line 8" and launch.trainer == "torchtitan"


def test_json_of_deepspeed(tmp_path: Path) -> None:
    text = '{\n "zero_optimization": {"stage": 3,\n  "overlap_comm": true},\n "train_batch_size": "auto"\n}\n'
    launch = launch_of(tmp_path, text, "d.json")
    assert values(launch) == {
        "zero_optimization.stage": 3, "zero_optimization.overlap_comm": True, "train_batch_size": "auto",
    }  # fmt: skip
    assert launch.trainer == "deepspeed" and launch.arguments[2].place == "d.json, line 4"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.yaml", "MODEL_ARGS: 3\n", "must be a mapping"),
        ("m.yaml", "MODEL_ARGS:\n  --a: false\n", "holds no argument"),
        ("m.yaml", "a: &x 1\nb: *x\n", "alias"),
        (
            "m.yaml",
            "a: " + "x" * 100 + "\n" + "".join(f"b{n}: ${{a}}${{a}}\n" for n in range(3)) + "c: ${b0\n",
            None,
        ),
        ("t.toml", "a = " + "[" * 5000, "brackets are open"),
        ("t.toml", "a = \n", "not valid TOML"),
        ("d.json", "[1]", "top level"),
        ("x.exe", "text", "starts no program"),
        ("x.py", "a = 1", "a recipe in Python is not read; hand in what the trainer prints"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, message: str | None) -> None:
    if message is None:
        assert values(launch_of(tmp_path, text, name))["c"] == "?${b0"
        return
    with pytest.raises(InputError, match=message):
        launch_of(tmp_path, text, name)


def test_doubling_interpolations_end_at_once(tmp_path: Path) -> None:
    text = "a0: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n"
    text += "".join(f"a{n}: " + f"${{a{n - 1}}}" * 20 + "\n" for n in range(1, 9))
    with pytest.raises(InputError, match="30,000 characters"):
        launch_of(tmp_path, text, "a.yaml")


def refusal(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        read_launch(file)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("plan.toml", ".".join(["a"] * 990) + " = 1\n", "more than 40 parts"),
        ("plan.toml", "[training]\nsteps = 0x" + "f" * 3600, "line 2: training.steps: a whole number"),
        ("plan.toml", "[training]\nsteps = [0x" + "f" * 3600 + "]", "a whole number of 14,400 bits"),
        ("plan.json", '{"a": ' + "[" * 900 + "]" * 900 + "}", "40 levels"),
        ("plan.json", '{"a": ' * 900 + "1" + "}" * 900, "40 levels"),
        ("plan.yaml", "a: 0x" + "f" * 3600, "0xfff"),
    ],
)
def test_a_configuration_ends_at_a_limit(tmp_path: Path, name: str, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, name, text)


def test_what_no_limit_foresees_is_a_message_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr(reading, "chosen_launch", broken)
    assert "run.sh: cannot be read: TypeError" in refusal(tmp_path, "run.sh", "python train.py --x 1\n")


def test_the_work_of_pointing_entries_is_bounded(tmp_path: Path) -> None:
    text = "a0: ''\n" + "".join(f"a{n}: '{f'${{a{n - 1}}}' * 900}'\n" for n in range(1, 9))
    (tmp_path / "a.yaml").write_text(text)
    assert {one.value for one in read_launch(tmp_path / "a.yaml").arguments} == {""}
