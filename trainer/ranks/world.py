"""This process's place among the ranks, and how they talk. The only reader of the launcher's environment."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from data_prep.streams import end_process, say_error
from trainer.errors import LostError, PassingError, TrainerError, exit_code, explain
from trainer.exits import FAILED
from trainer.ranks.launchers import ELASTIC, MPI_VARIABLES, describe, on_one_node
from trainer.ranks.meeting import Account, Meeting, meet
from trainer.ranks.network import free_port
from trainer.ranks.seal import SECRET

Result = TypeVar("Result")
LONGEST_TIMEOUT_SECONDS = 30 * 24 * 3600  # limit for timeouts, in seconds: more is a typo, and overflows clocks
PORT = "29500"  # torchrun's default, used if the launcher names none
SHARE_SECONDS = 30.0  # for a network file system to show a new file on another node

# variables of the libraries under PyTorch and those that affect results; not what a launcher sets for each rank
SETTING_PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "OFI_", "TORCH_NCCL_", "CUDA_LAUNCH_", "CUDA_DEVICE_MAX_", "CUBLAS_", "OMP_"),
    *("MKL_", "NVIDIA_TF32_", "TORCH_ALLOW_TF32_", "TRITON_INTERPRET", "PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD"),
)


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


class StatusServer(NamedTuple):
    """The server of Kubeflow Trainer that a TrainJob's pods report to (:mod:`trainer.monitor.train_job`)."""

    url: str
    certificate: str  # path of the CA's certificate
    token: str  # path of a file whose content changes while the run goes on


def read_world(environ: Mapping[str, str], device: str) -> World:
    """Read the world as a launcher describes it (:mod:`trainer.ranks.launchers`), or a single process.

    ``device`` is "cpu", "cuda", or "auto" (CUDA if there is a GPU). Raises TrainerError if the environment
    contradicts itself, or if a GPU is required but absent.
    """
    found = describe(environ)
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    defaults["LOCAL_WORLD_SIZE"] = found.get("WORLD_SIZE", "1")  # if the launcher does not say, assume one node
    values = {name: found.get(name, default) for name, default in defaults.items()}
    values["MASTER_PORT"] = found.get("MASTER_PORT", PORT)
    for name, value in values.items():
        if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
            raise TrainerError(f"{name}={value[:80]!r} in the environment is not a number: check the launcher")
    rank, size, local_rank, local_size, port = (int(value) for value in values.values())
    if not 1 <= port <= 65535:
        raise TrainerError(f"MASTER_PORT={port} in the environment is not a port, 1 to 65535: check the launcher")
    if size > 1 and "MASTER_ADDR" not in found:
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
        raise TrainerError(
            f"run.device is cuda but PyTorch sees no GPU ({_cuda_versions()}): fix that, or set run.device to cpu"
        )
    return torch.device("cuda", gpu_of(local_rank, torch.cuda.device_count()))


def gpu_of(local_rank: int, visible: int) -> int:
    """Return the index of a rank's GPU among the visible ones. Pure.

    A rank may see all GPUs of its node or, under ``srun --gpus-per-task``, only its own, which are numbered from 0. It
    cannot distinguish the two cases. If two ranks end up on one GPU, the meeting refuses them by its unique id.
    """
    return local_rank % visible


def place_for_deepspeed(environ: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """Return the environment that makes DeepSpeed use ``device``: it takes the local rank as the GPU's index."""
    if device.type != "cuda":
        return {}
    names = (
        "LOCAL_RANK",
        *(name for name in (MPI_VARIABLES["LOCAL_RANK"],) if name in environ),
    )  # DeepSpeed asserts that they agree
    return dict.fromkeys(names, str(device.index))


def _cuda_versions() -> str:
    """Describe the CUDA versions of PyTorch and the driver: the driver must be new enough."""
    try:
        said = re.search(r"\d+\.\d[\d.]*", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        said = None
    driver = f"NVIDIA's driver is {said.group()}" if said else "no driver of NVIDIA's is loaded"
    return f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda or 'nowhere: for CPUs'}; {driver}"


def from_launcher(device: str) -> World:
    """Return this process's world (:func:`read_world`) and set torchrun's variables in its environment."""
    found = describe(os.environ)
    if found.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" not in found:
        found |= _meeting_place_by_mpi()
    world = read_world({**os.environ, **found}, device)
    os.environ.update(found)
    return world


def _meeting_place_by_mpi() -> dict[str, str]:
    """Broadcast rank 0's host name, a free port of it and a secret through MPI.

    MPI is finalized afterwards, so that its ranks exit like any others.
    """
    try:
        from mpi4py import MPI
    except ImportError:
        return {}  # read_world says what is missing
    secret = os.environ.get(SECRET) or secrets.token_hex(16)
    address, port, secret = MPI.COMM_WORLD.bcast((socket.gethostname(), free_port(""), secret))
    MPI.Finalize()
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), SECRET: secret}


def speaks_first() -> bool:
    """True on the one process per node that reports errors found before the ranks meet."""
    with suppress(TrainerError):
        return describe(os.environ).get("LOCAL_RANK", "0") == "0"
    return True


def may_change() -> bool:
    """Whether the launcher may start the run again on another number of ranks."""
    return ELASTIC in os.environ


def settings() -> dict[str, str]:
    """Return the environment variables that should be the same on all ranks."""
    return {name: value for name, value in os.environ.items() if name.startswith(SETTING_PREFIXES)}


def status_server() -> StatusServer | None:
    """Return the server that takes this run's progress, or None if this is no pod of a TrainJob that has one."""
    names = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
    found = StatusServer(*(os.environ.get(name, "") for name in names))
    return found if found.url else None


def join(world: World, timeout_seconds: int, facts: dict[str, str] | None = None) -> list[str]:
    """Create the process group (NCCL on GPUs, gloo on CPUs) and make PyTorch deterministic.

    All ranks must have the same ``facts``. On rank 0, returns the settings that differ but should not. Raises LostError
    if some ranks do not come in time, and TrainerError on all ranks if their facts differ.
    """
    own = settings()  # before this adds its own
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # else DeepSpeed picks a GPU even for a CPU run
    if world.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first cuBLAS call
        # schedule NCCL's blocks first: queued behind large matrix products, two ranks' blocks start apart and spin
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        torch.cuda.set_device(world.device)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("highest")  # NVIDIA's images set TF32 for fp32 by an environment variable
        # a debugging aid that costs time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if world.size > world.local_size and "NCCL_DEBUG" not in os.environ:
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": _nccl_log()}
    elif "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it, deepspeed's launcher does not
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    if "MASTER_ADDR" not in os.environ:  # no launcher: a rendezvous of one process
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        os.environ.update(alone | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})  # DeepSpeed reads them
    os.environ.update(place_for_deepspeed(os.environ, world.device))
    one_node = on_one_node(os.environ)
    if one_node and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this node needs to reach gloo's ports
    gpu, model = _gpu(world.device)
    place, port = os.environ["MASTER_ADDR"], int(os.environ.setdefault("MASTER_PORT", PORT))
    store, warnings = meet(
        Meeting(world.rank, world.size, place, port, _agent_serves(), one_node, os.environ.get(SECRET, "")),
        Account(socket.gethostname(), gpu, facts or {}, own | ({"GPU": model} if gpu else {})),
        timedelta(seconds=timeout_seconds),
    )
    try:
        dist.init_process_group(
            "nccl" if world.device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_seconds),
            store=store,
        )
    except (RuntimeError, ValueError) as error:
        raise LostError(
            f"rank {world.rank} cannot connect to the others ({str(error).splitlines()[0]}): they have met, so "
            "the network blocks some ports, or NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the wrong interface"
        ) from None
    return warnings


def together(action: Callable[[], Result], world: World) -> Result:
    """Run ``action`` on every rank and return this rank's result if all succeeded; every rank calls this.

    A failure on one rank must not leave the others waiting in the next collective. Raises TrainerError on every rank if
    any refuses, else PassingError: with the reason on the first rank that failed, without a text on the others.
    """
    failure, lacks, result = "", False, None
    try:
        result = action()
    except TrainerError as error:
        failure, lacks = str(error), exit_code(error) == FAILED
    except (OSError, SafetensorError, MemoryError) as error:
        failure, lacks = explain(error), exit_code(error) == FAILED
    place = world.rank + lacks * world.size if failure else 2 * world.size  # a refusal comes first
    first = torch.tensor(place, device=world.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first.item() < 2 * world.size:
        kind = TrainerError if first.item() < world.size else PassingError
        raise kind(failure if place == first.item() else "")
    return cast(Result, result)


def nccl_reason(error: RuntimeError) -> str:
    """Return what NCCL adds to one of its errors: its "Last error" and the last warning in its log, if any."""
    _, found, last = str(error).partition("Last error:")
    warned = [line for line in nccl_said().splitlines() if " NCCL WARN " in line]
    return "".join(f"; {' '.join(words.split())}" for words in ([last] if found else []) + warned[-1:])


def nccl_said() -> str:
    """Return NCCL's log on this rank; empty on one node, on CPUs, or if the user set NCCL_DEBUG."""
    with suppress(OSError):
        return Path(_nccl_log()).read_text(encoding="utf-8", errors="replace")
    return ""


def _nccl_log() -> str:
    return os.path.join(tempfile.gettempdir(), f"lambert-nccl-{os.getpid()}.log")


def limit_waits(seconds: int) -> None:
    """Set the timeout of all existing process groups. DeepSpeed creates its own with a default of half an hour."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def require_shared(folder: Path, world: World) -> None:
    """Check that all nodes see rank 0's ``folder``. Every rank calls it. Raises TrainerError if one does not."""
    if world.local_size == world.size:
        return
    mark = folder / f".met-{broadcast_text(uuid.uuid4().hex[:8] if world.is_main else '', world)}"
    try:
        together(lambda: mark.touch() if world.is_main else None, world)
        together(lambda: _require_seen(mark) if world.is_local_main else None, world)
    finally:
        if world.is_main:
            mark.unlink(missing_ok=True)


def _require_seen(mark: Path) -> None:
    deadline = time.monotonic() + SHARE_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            raise TrainerError(
                f"run.folder {mark.parent} on {socket.gethostname()} is not the one that rank 0 writes to: put it on a "
                "file system that all nodes share, or set it to an address such as s3://bucket/runs/first"
            )
        time.sleep(0.2)


def broadcast_text(text: str, world: World) -> str:
    """Return rank 0's ``text`` on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(world.device)
    size = torch.tensor(data.numel(), device=world.device)
    dist.broadcast(size, 0)
    if not world.is_main:
        data = torch.empty(int(size), dtype=torch.uint8, device=world.device)
    dist.broadcast(data, 0)
    return bytes(data.tolist()).decode().rstrip("\0")


def gather_texts(text: str, world: World) -> list[str]:
    """Return every rank's ``text``, on every rank, in rank order."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(world.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=world.device))
    rows = [data.new_zeros(int(max(sizes))) for _ in range(world.size)]
    dist.all_gather(rows, torch.cat([data, data.new_zeros(len(rows[0]) - len(data))]))
    return [bytes(row.tolist()).decode().rstrip("\0") for row in rows]


def lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone. That rank's own line says why."""
    signs = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out", "Socket")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def operation(error: BaseException) -> str:
    """Describe where an error arose: ``all_reduce in trainer/ranks/stop.py, sum``."""
    frames = traceback.extract_tb(error.__traceback__)
    collectives = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    root = Path(__file__).parents[2]  # of the checkout
    ours = [frame for frame in frames if root / "trainer" in Path(frame.filename).parents]
    place = f"{Path(ours[-1].filename).relative_to(root)}, {ours[-1].name}" if ours else "its start"
    return f"{collectives[0]} in {place}" if collectives else place


def say_last(message: str) -> None:
    """Write a rank's last line to stderr, and to the file that a supervisor requested (``LAMBERT_LAST_WORDS``)."""
    say_error(message)
    if path := os.environ.get("LAMBERT_LAST_WORDS"):
        with suppress(OSError):  # it is on stderr anyway
            Path(path).write_text(message + "\n", encoding="utf-8")


def leave(code: int) -> NoReturn:
    """End this process with ``code``, without the interpreter's teardown. Code 0 waits for all ranks first.

    During a teardown, a gloo thread that outlived the interpreter turned about one good run in ten into a crash.
    """
    if code == 0 and dist.is_initialized():  # only then: a failed rank would wait here for the others
        dist.barrier()
        dist.destroy_process_group()
    end_process(code)


def _gpu(device: torch.device) -> tuple[str, str]:
    """Return a GPU's unique id and model; empty for a CPU."""
    if device.type != "cuda":
        return "", ""
    found = torch.cuda.get_device_properties(device)
    return str(found.uuid), found.name


def _agent_serves() -> bool:
    """Whether torchrun's agent already serves the store at MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
