"""One plane of the network is lost: what does the step cost then?

Covers: full resolution, faults, what each of them costs.
Scenario: a DeepSeek-V3-like job on 128 H800 (PP4, EP16, 8 micro-batches) on the multi-plane network, one
plane a GPU of a node; the 2,048 GPUs of the home case take a minute (resolution=full works there too).
"""

from __future__ import annotations

import moesim

SMALL = (
    "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
    "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "batch.sequences=256",
    "resolution=full",
)


def main() -> None:
    """Print the step without and with the fault, and how busy the links are."""
    job = moesim.load("deepseek-v3-2048xh800", *SMALL)
    healthy = moesim.simulate(job)
    result = moesim.simulate(job.replace(faults=[{"kind": "down", "link": "plane:3"}]))
    assert result.full is not None and healthy.full is not None
    print(f"no fault        step {healthy.step.time_s:.3f} s")
    for cause in result.full.causes[1:]:
        print(f"{cause.cause:14s}  step {cause.step_s:.3f} s, {cause.effect_s:+.3f} s")
    print("\nbusy              mean       most   and with the fault: mean, most")
    for before, after in zip(healthy.full.link_kinds, result.full.link_kinds, strict=False):
        was, now = f"{before.mean:8.1%}   {before.most:8.1%}", f"{after.mean:8.1%}   {after.most:8.1%}"
        print(f"{before.kind:12s}  {was}   {now}")
    print("\nTraffic of the lost plane goes over NVLink to a neighbour and shares that one's NIC.")


if __name__ == "__main__":
    main()
