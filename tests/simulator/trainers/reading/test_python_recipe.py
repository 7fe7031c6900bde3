"""Recipes in Python are read from their syntax tree; nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import launch_of, values

from moesim.hwmodels.errors import InputError

# The constructs of nemo/collections/llm/recipes/*.py of NVIDIA/NeMo.
NEMO = '''import nemo_run as run
from nemo.collections.llm import base

GPUS = 8

def model():
    """A docstring."""
    return run.Config(Model, config=run.Config(Config8x7B))

def trainer(tp: int = 1, pp=4, *, nodes: int = 8, dtype=torch.bfloat16):
    strategy = run.Config(nl.Megatron, tensor_model_parallel_size=tp, ddp=run.Config(DDP, overlap=True))
    strategy.pipeline_model_parallel_size = pp * 2
    return run.Config(nl.Trainer, num_nodes=nodes, devices=GPUS, strategy=strategy, dtype=dtype)

def pretrain_recipe(num_nodes: int = 2, performance_mode: bool = False, name="x"):
    recipe = run.Partial(pretrain, model=model(), trainer=trainer(nodes=num_nodes),
                         data=run.Config(M, seq=4096),
                         optim=adam(max_lr=3e-4), name=f"{name}-{num_nodes}")
    if performance_mode:
        recipe = faster(recipe)
    return recipe

def faster(recipe):
    recipe.trainer.strategy.tensor_model_parallel_size = 8
    recipe.trainer.callbacks = [run.Config(A)]
    return recipe
'''


def test_functions_of_the_same_file_are_followed(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, NEMO, "r.py", recipe="pretrain_recipe")
    assert values(launch) == {
        "model.config": "Config8x7B",
        "trainer.num_nodes": 2,
        "trainer.devices": 8,
        "trainer.strategy.tensor_model_parallel_size": 1,
        "trainer.strategy.ddp.overlap": True,
        "trainer.strategy.pipeline_model_parallel_size": 8,
        "trainer.dtype": "?torch.bfloat16",
        "data.seq": 4096,
        "optim": "?adam(max_lr=0.0003)",
        "name": "x-2",
    }
    assert (launch.machine.nodes, launch.machine.gpus_per_node) == (2, 8)
    assert launch.trainer == "nemo" and launch.program == "pretrain_recipe"
    places = {argument.name: argument.place for argument in launch.arguments}
    assert places["trainer.strategy.pipeline_model_parallel_size"] == "r.py, line 12"


def test_parameters_choose_branches(tmp_path: Path) -> None:
    launch = launch_of(
        tmp_path, NEMO, "r.py", recipe="pretrain_recipe", parameters=("performance_mode=True", "num_nodes=64")
    )
    found = values(launch)
    assert found["trainer.strategy.tensor_model_parallel_size"] == 8
    assert found["trainer.num_nodes"] == 64


# The constructs of src/megatron/bridge/perf_recipes of NVIDIA-NeMo/Megatron-Bridge.
PERF = """from megatron.bridge.recipes import base_config, elsewhere

def _common(cfg):
    cfg.train.global_batch_size = 2 ** 9

def moe_pretrain_config(fp8: str | None = None, unknown=OTHER):
    cfg = base_config()
    _common(cfg)
    cfg.model.tensor_model_parallel_size, cfg.model.pp = 2, 8
    cfg.model.recompute_modules = ["moe"] + ["mlp"]
    cfg.model.layout = "|".join(x) if fp8 else None
    if unknown:
        cfg.model.vpp = 4
    else:
        cfg.model.ep = 3
    for name in ("a", "b"):
        cfg.comm = {"overlap": True, name: len(name)}
    elsewhere(cfg)
    return cfg
"""


def test_what_is_not_literal_is_unknown_and_other_files_are_noted(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, PERF, "p.py")
    assert values(launch) == {
        "train.global_batch_size": 512,
        "model.tensor_model_parallel_size": 2,
        "model.pp": 8,
        "model.recompute_modules": ("moe", "mlp"),
        "model.layout": None,
        "model.vpp": "?4 or None",
        "model.ep": "?3 or None",
        "comm.overlap": True,
        "comm.b": 1,
    }
    assert launch.trainer == "megatron-bridge"
    notes = " ".join(launch.notes)
    assert "elsewhere(cfg) is in another file and may change values" in notes
    assert "starts from base_config(), which is in another file" in notes


def test_attributes_of_a_call_of_another_file_keep_the_call(tmp_path: Path) -> None:
    text = (
        "def recipe():\n    r = P(x, trainer=make(tp=1, nodes=4))\n    r.trainer.strategy.tp = 2\n"
        "    return r\n"
    )
    assert values(launch_of(tmp_path, text, "r.py")) == {
        "trainer": "?make(tp=1, nodes=4)",
        "trainer.strategy.tp": 2,
    }


# The constructs of torchtitan/models/*/config_registry.py of pytorch/torchtitan.
def test_registry_functions_of_torchtitan(tmp_path: Path) -> None:
    text = (
        "from torchtitan.config import ParallelismConfig\n"
        "def small():\n"
        "    return Trainer.Config(model_spec=registry('16B', attn='flex'),\n"
        "        training=Training(steps=8 * 10),\n"
        "        parallelism=ParallelismConfig(expert_parallel_degree=8), ac=SelectiveAC.Config())\n"
        "def large():\n    config = small()\n"
        "    config.parallelism = ParallelismConfig(tensor_parallel_degree=4)\n"
        "    return config\n"
    )
    launch = launch_of(tmp_path, text, "c.py", recipe="large")
    assert values(launch) == {
        "model_spec": "?registry('16B', attn='flex')",
        "training.steps": 80,
        "parallelism.tensor_parallel_degree": 4,
        "ac": "SelectiveAC.Config",
    }
    assert launch.trainer == "torchtitan"
    with pytest.raises(InputError, match="2 recipes and none is named; name one of small, large"):
        launch_of(tmp_path, text, "c.py")
    with pytest.raises(InputError, match="no function 'huge'"):
        launch_of(tmp_path, text, "c.py", recipe="huge")


def test_a_dictionary_of_the_file_can_be_named(tmp_path: Path) -> None:
    text = "BIG = WorkloadConfig(tp=2, pp=8)\nfast = WorkloadConfig(tp=4)\ndef helper():\n    pass\n"
    assert values(launch_of(tmp_path, text, "w.py", recipe="BIG")) == {"tp": 2, "pp": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "line 1: not valid Python"),
        ("def f():\n    return g(x=1)\ndef g(x):\n    return f()\n", "nested more than"),
        ("def f():\n    return " + "(" * 500 + "1" + ")" * 500 + "\n", "nested too deeply"),
        ("def f(n=1):\n    c = C(a=1)\n    return 3\n", "makes no configuration"),
        ("def f():\n    return C(x=" + "-" * 3000 + "1)\n", "nested|cannot be read"),
        ("def f():\n    return C(x=a" + ".b" * 3000 + ")\n", "nested|cannot be read"),
        ("def f():\n    return C(x=" + "1+" * 3000 + "1)\n", "nested|cannot be read"),
        ("x = 1\n", "no function sets a configuration"),
    ],
)  # fmt: skip
def test_wrong_or_hostile_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        launch_of(tmp_path, text, "r.py")


def test_large_values_are_not_computed(tmp_path: Path) -> None:
    text = (
        "def f():\n    s = 'x' * 10**9\n    n = 9**9**9\n    m = [0] * 10**8\n"
        "    return C(s=s, n=n, m=m, z=1/0)\n"
    )
    assert set(values(launch_of(tmp_path, text, "r.py")).values()) == {
        "?'x' * 10 ** 9", "?9 ** 9 ** 9", "?[0] * 10 ** 8", "?1 / 0",
    }  # fmt: skip


def test_nothing_of_a_recipe_is_executed(tmp_path: Path) -> None:
    text = (
        "import os\nos.system('touch ran')\nopen('ran', 'w')\n"
        "def f():\n    c = C(a=__import__('os').getcwd())\n    return c\n"
    )
    assert values(launch_of(tmp_path, text, "r.py")) == {"a": "?__import__('os').getcwd()"}
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()
