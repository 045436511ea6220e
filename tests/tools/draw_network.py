"""Draws docs/cluster/network.png: a network check of four nodes, one of which sends slowly. Needs root.

    python -m tests.tools.draw_network docs/cluster/network.png

The nodes are network namespaces of this machine, with one rank each, over gloo. What node-1 sends is limited.
"""

from __future__ import annotations

import json
import sys

from tests.helpers import nodes, ranks

RATE = "1gbit"


def main() -> None:
    with nodes.cluster(4) as hosts:
        if not nodes.limit(hosts[1], RATE):
            raise SystemExit("no tbf here to slow a node down with: it needs `tc` of iproute2 and the kernel's sch_tbf")
        faults = {"namespaces": [host.namespace for host in hosts], "address": hosts[0].address}
        words = (json.dumps(faults), "--seconds", "30", "--picture", sys.argv[1])
        ended = ranks.finish(ranks.fork(4, "tests/helpers/network_on_ranks.py", *words))
    print("".join(said for _, said in ended))


if __name__ == "__main__":
    main()
