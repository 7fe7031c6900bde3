"""Launch files from text to scenario: what an earlier import misread in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_launches import DEEPSEEK, MIXTRAL

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.meaning.understand import Understanding, understand
from moesim.simulator.trainers.reading import read_launch

BASE = "mixtral-8x7b-64xh100"
ONE_LINE = " ".join(MIXTRAL.split())


def read_file(
    folder: Path, text: str, name: str = "run.sh", base: str = BASE, **environment: str
) -> Understanding:
    """The meaning of a file with this text."""
    path = folder / name
    path.write_text(text)
    return understand(read_launch(path, environment), load_scenario(base), name)


def test_variables_of_a_model_zoo_file_come_from_the_environment(tmp_path: Path) -> None:
    text = (
        "ENV_VARS:\n  NCCL_DEBUG: VERSION\nMODEL_ARGS:\n  --tensor-model-parallel-size: ${TP}\n"
        "  --pipeline-model-parallel-size: ${PP}\n  --expert-model-parallel-size: 64\n"
        "  --sequence-parallel: true\n  --use-distributed-optimizer: true\n  --bf16: true\n"
        "  --finetune: false\n  --decoder-last-pipeline-num-layers: 1\n  --micro-batch-size: 1\n"
    )
    scenario = read_file(tmp_path, text, "v3.yaml", DEEPSEEK, TP="2", PP="16").scenario
    assert (scenario.parallel.tp, scenario.parallel.pp, scenario.parallel.zero_stage) == (2, 16, 1)
    assert scenario.parallel.sequence_parallel
    with pytest.raises(InputError, match=r"v3\.yaml.*--tensor-model-parallel-size.*--env TP=VALUE"):
        read_file(tmp_path, text, "v3.yaml", DEEPSEEK, PP="16")


def test_header_and_torchrun_that_disagree_are_refused(tmp_path: Path) -> None:
    text = (
        "#!/bin/bash\n#SBATCH --nodes=16\n#SBATCH --gpus-per-node=8\n"
        f"torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py {ONE_LINE}\n"
    )
    with pytest.raises(
        InputError, match=r"different numbers of nodes: 8 at run\.sh, line 4 and 16 at run\.sh, line 2"
    ):
        read_file(tmp_path, text)


def test_arguments_in_an_unset_variable_are_refused(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {ONE_LINE} $EXTRA_ARGS\n"
    with pytest.raises(InputError, match="give --env EXTRA_ARGS=VALUE"):
        read_file(tmp_path, text)
    assert read_file(tmp_path, text, EXTRA_ARGS="--micro-batch-size 2").scenario.parallel.microbatch == 2


GPT_OSS = """--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
--group-query-attention --num-query-groups 8 --kv-channels 64 --num-experts 32 --moe-ffn-hidden-size 2880
--moe-router-topk 4 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall
--moe-grouped-gemm --normalization RMSNorm --position-embedding-type rope --quick-geglu
--untie-embeddings-and-output-weights --padded-vocab-size 201088 --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --softmax-type learnable --window-attn-skip-freq 2 --window-size 127,0
--bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 512 --use-distributed-optimizer
--expert-model-parallel-size 8"""


def test_windows_and_sinks_of_a_script_are_the_shipped_models(tmp_path: Path) -> None:
    # The model: NVIDIA/Megatron-LM@d98e8a64 examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh
    text = f"torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {' '.join(GPT_OSS.split())}\n"
    assert read_file(tmp_path, text).scenario.model == "gpt-oss-20b"
    listed = text.replace("--window-attn-skip-freq 2", "--window-attn-skip-freq '([1]*2+[0])*8'")
    shape = read_file(tmp_path, listed).scenario.shape
    assert shape.attention_layers == ("sliding", "sliding", "full")
    every = read_file(tmp_path, text.replace("--window-attn-skip-freq 2", "")).scenario.shape
    assert every.attention is not None and every.attention.kind == "sliding"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("127,0", "127"), "no window before a query"),
        (("127,0", "127,64"), "no window before a query"),
        (("skip-freq 2", "skip-freq [1]*3"), "3 entries, and the model 24 layers"),
        (("--group-query-attention", "--multi-latent-attention"), "latent attention are not modelled"),
    ],
)
def test_windows_that_are_not_modelled_are_refused(
    tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    text = f"torchrun pretrain_gpt.py {' '.join(GPT_OSS.split()).replace(*change)}\n"
    with pytest.raises(InputError, match=expected):
        read_file(tmp_path, text)


def test_a_window_of_a_recipe_over_a_base_without_one_is_refused(tmp_path: Path) -> None:
    text = "model: {window_size: [128, 0], pipeline_model_parallel_size: 4, tensor_model_parallel_size: 1}\n"
    with pytest.raises(InputError, match=r"window_size.*the base's model mixtral-8x7b has none"):
        read_file(tmp_path, text, "a.yaml")
