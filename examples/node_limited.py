"""How many nodes may a token reach?

Covers: `routing.groups_per_token`, distinct targets of a token, `moesim.sweep`.
Scenario: DeepSeek-V3 on 2,048 H800; its gate takes the best 4 of 8 groups, each on one node.
"""

from __future__ import annotations

import moesim
from moesim.simulator.predict.step import prepare

HOME = "deepseek-v3-2048xh800"
KEY = "routing.groups_per_token"


def main() -> None:
    """Print the step against the limit, with few and with the published number of SMs."""
    home = moesim.load(HOME)
    found = moesim.sweep(home, {KEY: "1,2,3,4,6,8", "communication.sms": [20]})
    print("limit   nodes reached   GPUs reached   step (s)   exposed communication (s)")
    for point in found.points:
        targets = prepare(home.replace(**point.values)).pricer.targets()
        row = point.figures
        print(
            f"{point.values[KEY]:5d}   {targets.distinct_nodes:13.2f}   {targets.distinct_gpus:12.2f}   "
            f"{row['step_time_s']:8.2f}   {row['exposed_communication_s']:8.2f}"
        )
    print("What a tighter limit does to the loss is not predicted here.")


if __name__ == "__main__":
    main()
