"""Check in seconds everything that a run needs from its nodes, under the run's own launcher.

    python -m trainer.preflight --config run.yaml --hostfile hosts            # one process: what deepspeed will read
    deepspeed --hostfile hosts --module trainer.preflight --config run.yaml   # or torchrun, mpirun, srun, …
    deepspeed --hostfile hosts --module trainer.preflight --network           # measure the network instead

Ranks meet as the run's ranks do and are refused for the same reasons. Then they time an all-reduce. --network has its
own options, in :mod:`trainer.links.check`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.endpoint import listen
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.options import CommandParser
from data_prep.streams import write_whole_lines
from trainer.checkpoint.changed_settings import Setup, since, spelled
from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.shared_folder import stuck_saves
from trainer.checkpoint.train_state import state_of
from trainer.console import Tell, say, silent, warn
from trainer.convert.weights import fitting
from trainer.data.remote import is_remote
from trainer.engine.schedule import samples_in
from trainer.errors import TrainerError
from trainer.exits import DONE
from trainer.links import check
from trainer.model.bert import Bert
from trainer.monitor.metrics import MetricsConfig
from trainer.plan.micro_batch import settle
from trainer.ranks import hostfile
from trainer.ranks.ending import guard
from trainer.ranks.meeting import numbers
from trainer.ranks.network import falls_to_tcp, ports
from trainer.ranks.world import World, leave, nccl_said, require_shared, settings, together
from trainer.run.config import Config, to_tree
from trainer.run.home import store_of, try_address, working_folder
from trainer.run.phases import PhaseData, Plan
from trainer.run.rank_agreement import code
from trainer.run.resume_checks import identity, keep_prior, require_allowed, require_own_folder, require_same_run
from trainer.run.start import meet, prepare

MEBIBYTES = 64  # size of the timed all-reduce
TRIES = 5
NETWORK = "--network"


def main() -> None:
    """Check and report. Exit code 0 if the run can start, 2 with one line if it cannot."""
    write_whole_lines()
    if NETWORK in sys.argv[1:]:
        check.main(code())
    parser = CommandParser(prog="python -m trainer.preflight", description=__doc__.split("\n")[0])
    parser.add_argument(NETWORK, action="store_true", help=f"measure the network; {NETWORK} --help lists its options")
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--hostfile", type=Path, help="check deepspeed's host file and .deepspeed_env on this node")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    plan, world = prepare(options.config, options.set, _slots(options.hostfile))
    guard(world, partial(_try_all, plan, world, options.hostfile))
    if world.is_main:
        say("ready")
    leave(DONE)


def _try_all(plan: Plan, world: World, hosts: Path | None) -> None:
    if hosts is not None and world.is_main:
        _say_what_deepspeed_reads(hosts, world)
    began = time.perf_counter()
    meet(plan, world)
    plan = settle(plan, world, _slots(hosts) or world.size)
    if world.is_main:
        seconds = time.perf_counter() - began
        say(f"{world.size} rank(s) met in {seconds:.1f} s, with the same code, versions, configuration and shards")
        for data in plan.phases:
            _say_phase(data)
    _say_node(world)
    _share(plan.config, world)
    together(lambda: foresee(plan) if world.is_main else None, world)
    together(lambda: _try_port(plan.config.metrics) if world.is_local_main else None, world)
    _time_sum(world)


def _say_phase(data: PhaseData) -> None:
    phase = data.phase
    stages = "".join(f"{stage.steps:,} steps of {stage.global_batch:,}, then " for stage in phase.batch_warmup)
    length = f"{phase.steps:,} steps, {samples_in(phase, phase.steps, data.global_batch):,} samples"
    if phase.minutes is not None:
        length = f"{phase.minutes:g} minutes of training"
    say(f"phase {phase.name}: {length}: {stages}{data.global_batch:,} per step")


def _slots(hosts: Path | None) -> int | None:
    """Count the ranks of a host file; None if there is none, or if it is invalid, which is reported later."""
    try:
        return None if hosts is None else sum(hostfile.read_hosts(hosts).values())
    except TrainerError:
        return None


def _say_what_deepspeed_reads(path: Path, world: World) -> None:
    hosts = hostfile.read_hosts(path)
    slots = sum(hosts.values())
    say(f"{path}: {len(hosts)} nodes, {slots} ranks: {', '.join(f'{host} {count}' for host, count in hosts.items())}")
    if world.size not in (1, slots):
        raise TrainerError(
            f"{path} has {slots} slots, but {world.size} ranks were started: start the ranks with that host file"
        )
    given = hostfile.read_environment(Path.home(), Path.cwd())
    say(f"{hostfile.ENVIRONMENT} sets on every rank: {', '.join(given) or 'nothing'}")
    left = hostfile.left_behind(settings(), given, world.device.type == "cuda")
    if left and len(hosts) > 1 and world.size == 1:
        warn(f"set here, but not for the ranks: {', '.join(left)}; write them into {hostfile.ENVIRONMENT}")


def _say_node(world: World) -> None:
    if world.is_local_main:
        name = (
            torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        )
        up = ", ".join(ports()) or "no InfiniBand port is up"
        place = numbers(range(world.rank, world.rank + world.local_size))
        say(f"{socket.gethostname()}: {place}: {name}; {up}")


def _share(config: Config, world: World) -> None:
    """Check that rank 0 can write the run's folder and every node sees it; leave nothing behind."""
    if is_remote(config.run.folder):
        return try_address(config, world, say if world.is_main else silent)
    folder = Path(config.run.folder)
    was_there = folder.exists()
    together(lambda: folder.mkdir(parents=True, exist_ok=True) if world.is_main else None, world)
    require_shared(folder, world)
    if world.is_main:
        free = shutil.disk_usage(folder).free / 2**30
        say(f"run.folder {folder} is written by rank 0 and seen by every node; {free:,.0f} GiB free")
        if not was_there:
            folder.rmdir()


def foresee(plan: Plan, tell: Tell = say) -> None:
    """Report what the run will find in its folder. Raises TrainerError if the run would refuse to start."""
    config, folder, store = plan.config, working_folder(plan.config), store_of(plan.config)
    require_own_folder(folder)
    for reason in stuck_saves(folder).values():
        warn(f"no save will be able to remove {reason}", tell)
    found, passed = store.newest({}, state_of)
    require_allowed(config, found, passed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Bert(config.model).named_parameters()}
    if found is not None:
        require_same_run(found.record, identity(plan), config.phases, found.folder)
        tell(f"the run will continue from {store.place(found.folder.name)}")
        _tell_changes(keep_prior(plan, found, tell), found, tell)
    elif config.run.weights is not None:
        fitting(Path(config.run.weights), config.model, shapes, tell, plan.phases[0].loader.folder / TOKENIZER_FOLDER)
    size, free = 12 * sum(s.numel() for s in shapes.values()), shutil.disk_usage(_above(folder)).free
    if free < size:
        raise TrainerError(f"{folder}: a checkpoint takes {size >> 20:,} MiB but {free >> 20:,} are free: make room")


def _tell_changes(plan: Plan, found: Checkpoint, tell: Tell) -> None:
    """Report which settings changed; not the ranks and precision, since this command may run alone on another node."""
    saved, stated = Setup.of(found), plan.config.engine.precision
    precision = saved.precision if stated == "auto" else stated
    ours = Setup(to_tree(plan.config), identity(plan), precision, saved.ranks)
    if changed := since(saved, ours, state_of(found)):
        tell(f"changed since that checkpoint: {spelled(changed)}")


def _above(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return folder if folder.exists() else _above(folder.absolute().parent)


def _try_port(metrics: MetricsConfig) -> None:
    if metrics.port is None:
        return
    try:
        listen(metrics.port, metrics.address).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        where = f"{socket.gethostname()}, {metrics.address}"
        why = error.strerror if isinstance(error, OSError) else "no such host"
        raise TrainerError(f"metrics.port {metrics.port} of {where}: {why}; name another, or null") from None


def _time_sum(world: World) -> None:
    """Check and time an all-reduce like the gradients'; the bus bandwidth is nccl-tests' 2 (n - 1) / n."""
    data = torch.ones(MEBIBYTES * 2**18, device=world.device)
    best = float("inf")
    for _ in range(TRIES):
        data.fill_(world.rank + 1)
        began = time.perf_counter()
        dist.all_reduce(data)
        found = data[-1].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
        if found != world.size * (world.size + 1) / 2:
            raise TrainerError(f"rank {world.rank}: the ranks' sum is {found}: a link or a GPU is broken")
    if world.is_main and world.size > 1:
        rate = 2 * (world.size - 1) / world.size * MEBIBYTES / 1024 / best
        say(f"all-reduce of {MEBIBYTES} MiB over {dist.get_backend()}: {1000 * best:.1f} ms, {rate:.1f} GiB/s")
        if warning := falls_to_tcp(nccl_said()):
            warn(warning)


if __name__ == "__main__":
    main()
