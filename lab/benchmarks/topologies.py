"""Seconds for the links of 16,384 GPUs and the routes of each to 64 peers, by network and spreading."""

from __future__ import annotations

import time

import numpy as np

from moesim.hwmodels import LinkFault, build_topology, load_network, load_node

NODES, PEERS = 2048, 64
NETWORKS = ("mpft-ib-400g", "ft3-ib-400g", "dragonfly-ib-400g")


def main() -> None:
    """Print one line for each network, spreading and fault."""
    gpus = NODES * 8
    src = np.repeat(np.arange(gpus), PEERS)
    dst = (src // 8 * 8 + np.tile(np.arange(PEERS), gpus) * 8 + 3) % gpus
    for name in NETWORKS:
        start = time.perf_counter()
        topology = build_topology(load_node("hgx-h800"), NODES, load_network(name))
        count = len(topology.links().ids)
        print(f"{name}: {count:,} links in {time.perf_counter() - start:.2f} s")
        degraded = topology.degraded([LinkFault("nic", f"nic:{gpu}") for gpu in range(0, 80, 9)])
        for what, one in (("healthy", topology), ("9 NICs down", degraded)):
            for spreading in ("modulo", "ecmp"):
                start = time.perf_counter()
                routes = one.routes(src, dst, spreading)  # type: ignore[arg-type]
                seconds = time.perf_counter() - start
                print(
                    f"  {what}, {spreading}: {len(src):,} pairs, {len(routes.links):,} links, {seconds:.2f} s"
                )


if __name__ == "__main__":
    main()
