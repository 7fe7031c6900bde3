"""torchtitan 0.3 (read at 0.3.0), which moves rows to experts otherwise than 0.2 and compiles whole blocks.

Not measured: it needs a newer torch and `spmd_types`. Assumed as in 0.2: the host's calls, the combine (a
product in FP32 and a deterministic scatter-add) and the loss, which 0.3 computes in pieces.
"""

from __future__ import annotations

from moesim.simulator.frameworks.registry import Answer, Release
from moesim.simulator.frameworks.torchtitan_0_2 import RELEASE as BEFORE

_TITAN = "torchtitan 0.3.0 torchtitan"
_DISPATCHER = f"{_TITAN}/models/common/token_dispatcher.py"
_OWN = {
    "padded_experts": Answer(False, f"{_DISPATCHER}: pad_multiple, which FP8 and MX alone set"),
    "expert_rows": Answer("fused", f"{_TITAN}/distributed/compile.py:11: a block compiles with fullgraph"),
    "kernels": Answer("eager", f"{_TITAN}/config/configs.py:292: CompileConfig.enable is off"),
    "recompute_stops_early": Answer(False, f"{_TITAN}/distributed/activation_checkpoint.py:180: early_stop"),
}
RELEASE = Release(
    "torchtitan 0.3",
    {**BEFORE.answers, **_OWN},
    BEFORE.limits._replace(dispatchers=(*(BEFORE.limits.dispatchers or ()), "hybridep")),
    Answer("nccl", f"{_TITAN}/models/common/config_utils.py:416: comm_backend is standard"),
)
