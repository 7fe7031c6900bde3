"""Published closed-form bubbles, shown beside a simulated one and never used in place of it."""

from __future__ import annotations

import math

from moesim.simulator.schedules.timeline import Durations


def published_bubble(name: str, pp: int, durations: Durations, vpp: int = 1) -> float | None:
    """Published bubble of a schedule in the unit of `durations`, or None where none was published.

    `pp` counts ranks and `durations` are those of one chunk, a micro-batch through one stage; with F, B,
    W, F&B its forward, full backward, weight gradient and overlapped pair:

    - gpipe, 1f1b: (pp - 1)(F + B) (arXiv 1811.06965; arXiv 2104.04473, 2.2; DeepSeek-V3 table 2)
    - interleaved-1f1b: (pp - 1)(F_rank + B_rank) / vpp, where a rank's F_rank = vpp F and B_rank = vpp B
      (arXiv 2104.04473, 2.2.2)
    - zb-h1: (pp - 1)(F + B - 2W) (arXiv 2412.19437 table 2, as ZB1P; arXiv 2401.10241 table 2)
    - interleaved-zero-bubble: that of zb-h1 with one stage a rank, otherwise not published
    - zbv: 0 where F, I and W are equal (arXiv 2401.10241, 6), otherwise not published; each rank is
      counted there from its own first step to its own last one
    - dualpipe: (pp/2 - 1)(F&B + B - 3W) (arXiv 2412.19437 table 2)
    - dualpipev: (pp - 1)(F&B + B - 3W), the same row for 2 pp stages on pp ranks
      (deepseek-ai/DualPipe at 3da1bbea5360, README)
    """
    F, B, W = durations.forward, durations.backward, durations.weight_gradient
    if name in ("gpipe", "1f1b"):
        return (pp - 1) * (F + B)
    if name == "interleaved-1f1b":
        return (pp - 1) * (vpp * F + vpp * B) / vpp
    if name == "zb-h1" or (name == "interleaved-zero-bubble" and vpp == 1):
        return (pp - 1) * (F + B - 2 * W)
    if name == "zbv":
        return 0.0 if math.isclose(F, W) and math.isclose(durations.input_gradient, W) else None
    if name in ("dualpipe", "dualpipev"):
        return ((pp / 2 if name == "dualpipe" else pp) - 1) * (durations.overlap + B - 3 * W)
    return None
