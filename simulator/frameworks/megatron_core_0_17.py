"""Megatron core 0.17 as Megatron-LM's `pretrain_gpt.py` starts it; no priced default of 0.16 changed."""

from __future__ import annotations

from moesim.simulator.frameworks.megatron_core_0_16 import LIMITS, answers, dispatcher
from moesim.simulator.frameworks.registry import Release

REVISION = "core_r0.17.0 (432585d51)"
RELEASE = Release("Megatron core 0.17", answers(REVISION), LIMITS, dispatcher(REVISION))
