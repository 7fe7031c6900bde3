"""Launch files as their readers return them, for tests."""

from __future__ import annotations

import shlex
from typing import Any

from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.launch import Argument, LaunchFile, Machine, Unknown
from moesim.simulator.trainers.meaning.table import MeaningRow
from moesim.simulator.trainers.meaning.understand import Understanding, understand

PLACE = "run.sh, line {}"

DEEPSEEK = "deepseek-v3-2048xh800"

MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000
--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type Llama2Tokenizer --split 99990,8,2
--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel
--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --no-load-optim --no-load-rng
"""
"""NVIDIA/Megatron-LM@d98e8a64 examples/mixtral/train_mixtral_8x7b_distributed.sh, without its paths."""


def arguments_of(text: str) -> tuple[Argument, ...]:
    """Arguments of a command line; every line of the text is a line of the file.

    A word ${NAME} has no value, because nothing sets the variable.
    """
    found: list[Argument] = []
    for number, line in enumerate(text.strip().splitlines(), start=1):
        words: list[str] = []
        for word in [*shlex.split(line), "--"]:
            if word.startswith("--"):
                if words:
                    found.append(_argument(words, PLACE.format(number)))
                words = [word]
            else:
                words.append(word)
    return tuple(found)


def _argument(words: list[str], place: str) -> Argument:
    name, *values = words
    read = [Unknown(v, f"the variable {v[2:-1]} is not set") if v.startswith("${") else v for v in values]
    if len(read) <= 1:
        return Argument(name, read[0] if read else None, place)
    return Argument(name, tuple(v for v in read if not isinstance(v, Unknown)), place)


def launch_of(text: str, gpus: int | None = None) -> LaunchFile:
    """A launch of Megatron-LM's pretraining script on nodes of eight GPUs."""
    machine = Machine()
    if gpus is not None:
        machine = Machine(gpus // 8, 8, {"nodes": "run.sh, line 90", "gpus_per_node": "run.sh, line 91"})
    return LaunchFile("megatron-lm", "pretrain_gpt.py", arguments_of(text), machine)


def read(text: str, gpus: int | None = None, base: str = DEEPSEEK, **options: Any) -> Understanding:
    """The meaning of a command line."""
    return understand(launch_of(text, gpus), load_scenario(base), "run.sh", **options)


def row(understanding: Understanding, argument: str, kind: str | None = None) -> MeaningRow:
    """The only row of an argument (of a kind)."""
    rows = [r for r in understanding.rows if r.argument == argument and kind in (None, r.kind)]
    assert len(rows) == 1, (argument, [r for r in understanding.rows if r.argument == argument])
    return rows[0]
