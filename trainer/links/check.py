"""Measure the network under the run's own launcher, and name a slow rank or link.

    deepspeed --hostfile hosts --module trainer.preflight --network   # or torchrun, mpirun, srun, …

It needs no configuration: the ranks meet as a run's ranks do, over NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.console import Tell, say, silent, warn
from trainer.errors import TrainerError, exit_code
from trainer.exits import DONE
from trainer.links import measure, report
from trainer.links.measure import COLLECTIVES, MOST_PASSES, PASSES, Group
from trainer.links.report import Place, Results
from trainer.links.routes import rounds, routes
from trainer.links.wires import Wire, wire_of_gpu, wire_of_interfaces, wire_of_ports
from trainer.ranks.ending import error_text, fail, guard
from trainer.ranks.network import falls_to_tcp, ports
from trainer.ranks.world import (
    World,
    from_launcher,
    gather_texts,
    join,
    leave,
    limit_waits,
    nccl_said,
    speaks_first,
    together,
)

LONGEST = 3600  # seconds, for both options
COLLECTIVES_SHARE, LINKS_SHARE = 0.5, 0.3  # of the time; the rest is for matrix products and setting up


def main(code: str) -> NoReturn:
    """Measure and report. Exit code 0 if nothing is slow; 2 with a line for each slow rank or link, or a wrong result.

    ``code``: a hash of Lambert's source, which must be the same on all ranks.
    """
    parser = CommandParser(prog="python -m trainer.preflight --network", description=__doc__.split("\n")[0])
    parser.add_argument("--network", action="store_true", required=True, help="measure the network")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cuda: NCCL; cpu: gloo")
    parser.add_argument("--seconds", type=float, default=15.0, help="about how long to measure (%(default)g)")
    text = "how long to wait for a rank or a message (%(default)s s)"
    parser.add_argument("--timeout", type=int, default=60, metavar="SECONDS", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also draw the results here")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    if not 0 < options.seconds <= LONGEST:
        parser.error(f"argument --seconds: {options.seconds:g} must be more than 0 and at most {LONGEST}")
    if not 1 <= options.timeout <= LONGEST:
        parser.error(f"argument --timeout: {options.timeout} must be between 1 and {LONGEST}")
    world = _placed(options.device)
    guard(world, partial(_check, world, options, code))
    if world.is_main:
        say("no rank or link is slow")
    leave(DONE)


def _placed(device: str) -> World:
    """Return this rank's world. Ends the process with an error line if there is none, or only one rank."""
    try:
        world = from_launcher(device)
        if world.size == 1:
            raise TrainerError("one rank has no network: start two or more, with the run's launcher")
        return world
    except TrainerError as error:
        if not speaks_first():
            time.sleep(3)  # usually all ranks fail alike: the first one reports it and the launcher ends us
        fail(f"trainer: error: {_with_options(error_text(error))}", exit_code(error))


def _with_options(text: str) -> str:
    """Return an error's text with the options of this command in place of a run's settings."""
    return text.replace("run.device", "--device").replace("run.timeout_seconds", "--timeout")


def _check(world: World, options: argparse.Namespace, code: str) -> None:
    facts = {"Lambert's code": code, "PyTorch": torch.__version__, "device": world.device.type}
    try:
        for difference in join(world, options.timeout, facts | {"--seconds": f"{options.seconds:g}"}):
            warn(f"not the same on all ranks: {difference}")
    except TrainerError as error:
        raise type(error)(_with_options(str(error))) from None
    if world.device.type == "cuda":
        limit_waits(2 * options.timeout)  # our own limit ends in one line; NCCL's would abort the process
    together(lambda: _check_places(options) if world.is_main else None, world)
    results = _measured(Group(world, options.timeout), options.seconds)
    together(lambda: _report(results, options) if world.is_main else None, world)


def _check_places(options: argparse.Namespace) -> None:
    """Raises TrainerError if a file cannot be written, before the time is spent."""
    try:
        if options.json is not None:
            check_place("--json", options.json, ".json")
        if options.picture is not None:
            check_place("--picture", options.picture, ".png")
    except DataError as error:
        raise TrainerError(str(error)) from None


def _measured(group: Group, seconds: float) -> Results:
    """Measure everything in about ``seconds``; what looks slow, several times."""
    world, tell = group.world, say if group.world.is_main else silent
    places = [_read_place(text) for text in gather_texts(json.dumps(asdict(_place(world))), world)]
    results = Results(dist.get_backend(), places, [], {}, 0, [0.0] * world.size)
    nodes = len(set(results.hosts))
    group.meet()
    where = "one node" if nodes == 1 else f"{nodes} nodes"
    tell(f"{world.size} ranks on {where}, over {results.backend}: measuring for about {seconds:g} s")
    for number in range(PASSES):
        results = results.with_products(measure.time_products(group))
        if not results.slow_ranks():
            break
        if number == 0:
            tell("a rank seems slow: measuring all ranks again")
    for name in COLLECTIVES:
        tell(f"measuring {name}")
        results.timings.extend(measure.time_collective(name, group, COLLECTIVES_SHARE * seconds / len(COLLECTIVES)))
    return _with_links(results, group, seconds, tell)


def _with_links(results: Results, group: Group, seconds: float, tell: Tell) -> Results:
    """Measure the links; no further pass begins after 10 s or, if that is longer, twice ``seconds``."""
    order = rounds(routes(results.hosts), results.hosts)
    fastest = max(timing.bus_rate(group.world.size) for timing in results.timings)
    size = measure.link_bytes(fastest, len(order), LINKS_SHARE * seconds)
    began, results = time.perf_counter(), replace(results, message=size)
    tell(f"measuring {sum(map(len, order))} links in {len(order)} rounds")
    for number in range(1, MOST_PASSES + 1):
        results = results.with_links(measure.time_links(order, size, group))
        spent = float(group.gather([time.perf_counter() - began]).max())  # all ranks must decide alike
        if spent > max(10.0, 2 * seconds) or (number >= PASSES and not results.suspects()):
            break
        if number == PASSES:
            tell("a link seems slow: measuring the links again")
    return results


def _place(world: World) -> Place:
    """Describe what this rank runs on."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        return Place(socket.gethostname(), name, wire_of_gpu(name), wire_of_ports(ports()) or wire_of_interfaces())
    name = f"{len(os.sched_getaffinity(0))} CPU cores, {platform.machine()}"
    return Place(socket.gethostname(), name, None, wire_of_interfaces())


def _read_place(text: str) -> Place:
    host, device, *wires = json.loads(text).values()
    return Place(host, device, *(wire and Wire(**wire) for wire in wires))


def _report(results: Results, options: argparse.Namespace) -> None:
    """Print the results, and write the files. Raises TrainerError with a line for each slow rank or link."""
    for line in (*report.table(results), *report.summary(results)):
        say(line)
    for warning in report.warnings(results):
        warn(warning)
    if warning := falls_to_tcp(nccl_said()):
        warn(warning)
    if options.json is not None:
        with replacing(options.json) as file:
            file.write((json.dumps(report.tree(results), indent=1) + "\n").encode())
    if options.picture is not None:
        from trainer.links.picture import draw

        draw(results, options.picture)
    if found := report.problems(results):
        raise TrainerError("\n  - ".join([f"{len(found)} slow rank(s) or link(s)", *found]))
