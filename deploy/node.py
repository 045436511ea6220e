"""A node's place in the run, from options or from torchrun's variables, which Kubeflow and our chart set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.exits import REFUSED
from trainer.ranks.launchers import ELASTIC
from trainer.ranks.network import free_port
from trainer.ranks.seal import SECRET

NODE_OPTIONS = {  # option: torchrun's variable for it, and its help text
    "--nproc-per-node": ("PET_NPROC_PER_NODE", "ranks per node: a number, gpu, cpu (one per core) or auto (default)"),
    "--nnodes": ("PET_NNODES", "number of nodes (default: 1), or MIN:MAX if nodes may be lost and return"),
    "--node-rank": ("PET_NODE_RANK", "this node's number, from 0; needed with several nodes"),
    "--master-addr": ("PET_MASTER_ADDR", "host name of node 0; needed with several nodes"),
    "--master-port": ("PET_MASTER_PORT", "port on node 0 (default: 29500)"),
    "--max-restarts": ("PET_MAX_RESTARTS", "with MIN:MAX: how many attempts may fail (default: 20)"),
}
MOST_NODES, MOST_RANKS = 100_000, 4096  # limits: nodes per run, ranks per node
MOST_RESTARTS = 100_000
NAMED = ("auto", "gpu", "cpu")  # auto: one rank per GPU, or one rank without GPUs


class LaunchError(Exception):
    """Ends the launch before any rank is started, with these lines and an exit code."""

    def __init__(self, *lines: str, code: int = REFUSED) -> None:
        super().__init__("\n".join(f"lambert: {line}" for line in lines))
        self.code = code


@dataclass(frozen=True)
class Node:
    """One of ``nodes`` nodes, each with the same number of ranks."""

    number: int
    nodes: int
    ranks: int
    address: str
    port: int
    least: int | None = None  # with so many the run goes on; None: the number of nodes is fixed
    restarts: int = 0  # how many attempts may fail if it is not

    @property
    def first(self) -> int:
        """The global rank of this node's local rank 0."""
        return self.number * self.ranks

    def environment(self, local_rank: int) -> dict[str, str]:
        """The environment variables that tell a rank its place."""
        range_of_nodes = {} if self.least is None else {ELASTIC: "1"}
        return range_of_nodes | {
            "RANK": str(self.first + local_rank),
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        ranks = f"ranks {self.first} to {self.first + self.ranks - 1}" if self.ranks > 1 else f"rank {self.first}"
        place = f"node {self.number} of {self.nodes}: {ranks} of {self.nodes * self.ranks}"
        return f"{place}, rendezvous at {self.address}:{self.port}"


class Options:
    """The options' texts, wherever they were set. ``problems`` collects a line for each impossible one."""

    def __init__(self, given: Mapping[str, str | None], environ: Mapping[str, str]) -> None:
        self.texts = {
            option: given.get(option) or environ.get(name) or "" for option, (name, _) in NODE_OPTIONS.items()
        }
        self.sources = {option: option if given.get(option) else name for option, (name, _) in NODE_OPTIONS.items()}
        self.problems: list[str] = []

    def nodes(self) -> tuple[int | None, int]:
        """Return the least number of nodes, None if their number is fixed, and the greatest."""
        text = self.texts["--nnodes"]
        if ":" not in text:
            if self.sources["--max-restarts"] == "--max-restarts":
                self.problems.append("error: --max-restarts needs a range of nodes: set --nnodes to MIN:MAX")
            return None, self.number("--nnodes", 1, MOST_NODES)
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
        least, most = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= least <= most <= MOST_NODES:
            limit = f"MIN:MAX, two whole numbers from 1 to {MOST_NODES}"
            self.problems.append(f"error: {self.sources['--nnodes']} is {text[:80]!r}: make it {limit}")
            return None, 1
        return least, most

    def number(self, option: str, default: int, most: int, least: int = 1, also: str = "") -> int:
        """Return the value of a numeric option; the default if it is not set or impossible."""
        text = self.texts[option] or str(default)
        if re.fullmatch(r"0*\d{1,9}", text, re.ASCII) and least <= int(text) <= most:
            return int(text)
        limit = f"{least} to {most}{also}"
        self.problems.append(f"error: {self.sources[option]} is {text[:80]!r}: make it a whole number from {limit}")
        return default


def read_node(given: Mapping[str, str | None], environ: Mapping[str, str], count_gpus: Callable[[], int]) -> Node:
    """Return this node's place. ``given``: each option in NODE_OPTIONS and its value; empty counts as unset.

    A single node uses a free port on loopback. Raises LaunchError with one line per problem.
    """
    options = Options(given, environ)
    texts, problems = options.texts, options.problems
    least, nodes = options.nodes()
    place = options.number("--node-rank", 0, MOST_NODES, least=0)
    port = options.number("--master-port", 29500, 65535)
    restarts = 0 if least is None else options.number("--max-restarts", 20, MOST_RESTARTS, least=0)
    ranks = texts["--nproc-per-node"] or "auto"
    if ranks not in NAMED:
        options.number("--nproc-per-node", 1, MOST_RANKS, also=f", or {', '.join(NAMED)}")
    if place >= nodes and not problems:
        problems.append(f"error: {options.sources['--node-rank']} is {place}: make it less than --nnodes, {nodes}")
    if nodes > 1 and not texts["--node-rank"]:
        problems.append(f"error: {nodes} nodes, but this node's number is not set: set --node-rank or PET_NODE_RANK")
    if nodes > 1 and not texts["--master-addr"]:
        problems.append(f"error: {nodes} nodes, but node 0's address is not set: set --master-addr or PET_MASTER_ADDR")
    if least is not None and nodes > 1 and not environ.get(SECRET):
        why = "without it, anyone who reaches node 0's port could stop the run"
        problems.append(f"error: {texts['--nnodes']} nodes, but {SECRET} is not set: set one for all nodes; {why}")
    if problems:
        raise LaunchError(*problems)
    count = _count_ranks(ranks, count_gpus)
    if least is not None:
        return Node(place, nodes, count, texts["--master-addr"] or "127.0.0.1", port, least, restarts)
    if nodes == 1:
        return Node(0, 1, count, "127.0.0.1", free_port("127.0.0.1"))
    return Node(place, nodes, count, texts["--master-addr"], port)


def _count_ranks(text: str, count_gpus: Callable[[], int]) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text not in NAMED:
        return int(text)
    gpus = count_gpus()
    if gpus == 0 and text == "gpu":
        raise LaunchError("error: one rank per GPU was requested, but PyTorch sees no GPU: set a number of ranks")
    return gpus or 1
