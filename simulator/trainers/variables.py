"""Shell variables that exported arguments use for what no plan says."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "DATA_PATH": "the tokenised training data",
    "TOKENIZER_MODEL": "the tokenizer",
    "CHECKPOINT_DIR": "the folder of the checkpoints",
    "MEGATRON_PATH": "the checkout of Megatron-LM",
    "PLAN_FILE": "the configuration that moesim wrote",
    "LEARNING_RATE": "the peak learning rate",
    "ROTARY_BASE": "rope_theta of the config.json of the model",
}
"""What each variable must hold."""
