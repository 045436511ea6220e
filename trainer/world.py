"""Ranks: who this process is among the others. The only reader of the launcher's environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from trainer.errors import TrainerError

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process's place: global rank of ``size``, local rank of ``local_size`` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on global rank 0, which owns the run-level files and series."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on local rank 0 of each node, which owns the node's exporter."""
        return self.local_rank == 0


def read_world(environ: Mapping[str, str], device: str) -> World:
    """The world as a launcher describes it (``deepspeed`` and ``torchrun``), or one lone process.

    ``device`` is "cpu", "cuda", or "auto" (CUDA where there is one). Raises TrainerError when the
    environment contradicts itself, or when a GPU is asked for and absent.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = [name for name in names if name in environ]
    if given and len(given) < len(names):
        missing = sorted(set(names) - set(given))
        raise TrainerError(
            f"the launcher set {', '.join(given)} but not {', '.join(missing)}: start the run with "
            "`deepspeed --module trainer …` or `torchrun -m trainer …`, or unset them all for one process"
        )
    values = {name: environ.get(name, default) for name, default in zip(names, ("0", "1", "0"), strict=True)}
    # deepspeed's launcher says LOCAL_SIZE, torchrun says LOCAL_WORLD_SIZE
    values["LOCAL_SIZE"] = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", values["WORLD_SIZE"]))
    for name, value in values.items():
        if not value.isdigit():
            raise TrainerError(f"{name}={value!r} in the environment is not a number: check the launcher")
    rank, size, local_rank, local_size = (int(value) for value in values.values())
    if size > 1 and "MASTER_ADDR" not in environ:
        raise TrainerError(
            f"WORLD_SIZE is {size} but MASTER_ADDR is not set, so the ranks cannot find one another: start the run "
            "with a launcher, or unset both for one process"
        )
    if rank >= size or local_rank >= local_size or local_size > size:
        raise TrainerError(
            f"rank {rank} of {size}, local rank {local_rank} of {local_size}: a rank must be smaller than "
            "its count, and a node's count no larger than all; check the launcher"
        )
    return World(rank, size, local_rank, local_size, _device(device, local_rank))


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainerError("run.device is cuda but PyTorch sees no GPU: set run.device to cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise TrainerError(
            f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} on this node): "
            "start at most one rank for each GPU"
        )
    return torch.device("cuda", local_rank)


def from_launcher(device: str) -> World:
    """The world of this process; see :func:`read_world`."""
    return read_world(os.environ, device)


def speaks_first() -> bool:
    """True on the process that reports what all of them find before they met."""
    return os.environ.get("RANK", "0") == "0"


def join(world: World, timeout_seconds: int) -> None:
    """Make the process group (NCCL on GPUs, gloo on CPUs) and fix what exact repetition needs fixed."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # a GPU that is there but not wanted misleads DeepSpeed
    if world.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first cuBLAS call
        torch.cuda.set_device(world.device)
        torch.use_deterministic_algorithms(True)
        # a debugging aid, not free
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    elif "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it, deepspeed's launcher does not
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    if "MASTER_ADDR" not in os.environ:  # no launcher: a rendezvous of one
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        os.environ.update(alone | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})  # DeepSpeed reads them
    try:
        dist.init_process_group(
            "nccl" if world.device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
        raise TrainerError(
            f"cannot meet the other ranks at {place} ({str(error).splitlines()[0]}): check that all {world.size} were "
            "started and that no other run holds the port"
        ) from None


def together(action: Callable[[], Result], world: World) -> Result:
    """``action()`` of this rank, if it went well on all of them; every rank calls it.

    What fails on one rank must not leave the others waiting in the next collective. Raises TrainerError on
    every rank: with the reason on the first one that failed, without a text on the others.
    """
    failure, result = "", None
    try:
        result = action()
    except TrainerError as error:
        failure = str(error)
    except (OSError, SafetensorError) as error:
        failure = " ".join(str(error).split()) or type(error).__name__
    first = torch.tensor(world.rank if failure else world.size, device=world.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first.item() < world.size:
        raise TrainerError(failure if world.rank == first.item() else "")
    return cast(Result, result)


def broadcast_text(text: str, world: World) -> str:
    """Rank 0's ``text`` on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(world.device)
    size = torch.tensor(data.numel(), device=world.device)
    dist.broadcast(size, 0)
    if not world.is_main:
        data = torch.empty(int(size), dtype=torch.uint8, device=world.device)
    dist.broadcast(data, 0)
    return bytes(data.tolist()).decode().rstrip("\0")


def lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed since another rank is gone, whose own line says why."""
    signs = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out", "Socket")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def say_last(message: str) -> None:
    """A rank's last line: to stderr, and into the file that a supervisor asked for (``LAMBERT_LAST_WORDS``)."""
    print(message, file=sys.stderr, flush=True)
    if path := os.environ.get("LAMBERT_LAST_WORDS"):
        with suppress(OSError):  # it is on stderr
            Path(path).write_text(message + "\n", encoding="utf-8")


def leave(code: int) -> NoReturn:
    """End this process with ``code``, a good one after all ranks arrived, without the interpreter's teardown.

    A gloo thread that outlives the interpreter turned about one good run in ten into a crash.
    """
    if code == 0 and dist.is_initialized():  # a rank that failed alone would wait for the others here
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
