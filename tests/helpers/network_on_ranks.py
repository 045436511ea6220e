"""Runs the network check on each rank, with faults that tests plant.

    python tests/helpers/network_on_ranks.py FAULTS OPTIONS…

FAULTS is a JSON object. "namespaces" and "address": rank R runs in the R-th namespace, as node-R, and they meet at that
address. "computes": this rank's matrix products take longer. "sends": a rank and a peer to which its messages take
longer. "sums": this rank's all-reduce is off by one. "sleeps": this rank never enters an all-reduce.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import trainer.preflight as program
from tests.helpers import nodes
from tests.helpers.rank_on_node import enter
from trainer.links import measure

SECONDS = 0.03  # the delay of a slow message or product


def main() -> None:
    faults, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
    if "namespaces" in faults:
        enter(faults["namespaces"][rank])
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": faults["address"]}
        os.environ["GLOO_SOCKET_IFNAME"] = nodes.INTERFACE
        socket.sethostname(f"node-{rank}")
    if faults.get("computes") == rank:
        torch.mm = delayed(torch.mm)
    if "sends" in faults and faults["sends"][0] == rank:
        send_late(faults["sends"][1])
    if faults.get("sums") == rank:
        sum_wrongly()
    if faults.get("sleeps") == rank:
        dist.all_reduce = delayed(dist.all_reduce, 3600)
    sys.argv = ["trainer.preflight", "--network", *sys.argv[2:]]
    program.main()


def delayed(action: Callable[..., Any], seconds: float = SECONDS) -> Callable[..., Any]:
    """``action``, but ``seconds`` later."""

    def act(*words: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return action(*words, **named)

    return act


def send_late(late: int) -> None:
    """Delay large messages to a peer."""
    send = measure._pass_on

    def pass_on(data: Tensor, peer: int, receives: bool) -> None:
        if peer == late and not receives and data.numel() > 2:
            time.sleep(SECONDS)
        send(data, peer, receives)

    measure._pass_on = pass_on


def sum_wrongly() -> None:
    """Make this rank's all-reduce of large buffers off by one."""
    add = dist.all_reduce

    def wrong(data: Tensor, *words: Any, **named: Any) -> Any:
        result = add(data, *words, **named)
        if data.numel() > 1000:
            data[-1] += 1
        return result

    dist.all_reduce = wrong  # type: ignore[assignment]


if __name__ == "__main__":
    main()
