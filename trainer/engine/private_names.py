"""DeepSpeed's private names: the few that Lambert uses although DeepSpeed does not document them.

A new release of DeepSpeed may lack any of them. Without those that make steps faster or better measured, a run prints a
line and takes the same steps, if DeepSpeed's own path is exact. A run that cannot do without one is refused at its
start: at stage 3, and with an offloaded optimizer. No other file uses these names (``tests/test_layout.py``), and
``tests/test_trainer_private_names.py`` finds each one in the installed DeepSpeed and trains without it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple

from trainer.console import Tell, warn
from trainer.errors import TrainerError

TESTED = ("0.19.6", "0.19.7", "0.19.8")  # docs/lab.md has the results


class PrivateName(NamedTuple):
    """A private name, what Lambert uses it for, and what a run does without it."""

    owner: str  # what has the name
    name: str
    use: str
    without: str  # empty: a run that needs it is refused


HOOKS = PrivateName(
    "the optimizer of ZeRO 1 and 2",
    "_grad_acc_hooks",
    "its hooks on the gradients; Lambert removes them, to reduce and apply gradients in fewer launches",
    "DeepSpeed reduces and applies the gradients itself, which is slower",
)
REDUCE = PrivateName(
    "the engine",
    "allreduce_gradients",
    "what ends its backward pass; Lambert times it",
    "the time to reduce gradients counts as backward",
)
OPS = PrivateName(
    "deepspeed.ops",
    "__compatible_ops__",
    "which ops can be compiled; Lambert rules out one that CPUs need for inference only",
    "on CPUs, DeepSpeed compiles an op at the start and leaves 64 MiB per rank in /dev/shm",
)
NORM = PrivateName(
    "DeepSpeedZeroConfig",
    "compute_grad_norm",
    "whether DeepSpeed computes the norm of fp32 gradients under ZeRO 1 and 2; Lambert's optimizer does so anyway",
    "the norm is computed twice, and the guard cannot name the tensors whose gradients are not finite",
)
ORDER = PrivateName("the optimizer of ZeRO 3", "fp16_groups", "the parameters in the order of their masters", "")
MASTERS = PrivateName("the optimizer of ZeRO 3", "fp32_partitioned_groups_flat", "this rank's masters, in one row", "")
SHARD = PrivateName("a parameter under ZeRO 3", "ds_tensor", "this rank's part of the weight", "")
NAMES = (HOOKS, REDUCE, OPS, NORM, ORDER, MASTERS, SHARD)


def find(owner: Any, private: PrivateName, tell: Tell, count: int | None = None) -> Any:
    """The value of a private name of ``owner``: ``count`` things, if given. None, after one line, if it lacks that."""
    found = _look(owner, private, count)
    if found is None:
        warn(f"{_lacks(private)}: {private.without} (tested: {', '.join(TESTED)})", tell)
    return found


def need(owner: Any, private: PrivateName, feature: str, instead: str, count: int | None = None) -> Any:
    """The same as `find`, but without the value it raises TrainerError: ``feature`` needs it."""
    found = _look(owner, private, count)
    if found is None:
        raise refusal(private, f"which {feature} needs", instead)
    return found


def refusal(private: PrivateName, why: str, instead: str) -> TrainerError:
    """The error of a run that cannot do without a private name: ``why``, and what to do ``instead``."""
    return TrainerError(f"{_lacks(private)}, {why}: install deepspeed=={TESTED[-1]}, or {instead}")


def _look(owner: Any, private: PrivateName, count: int | None) -> Any:
    found = getattr(owner, private.name, None)
    return None if found is not None and count is not None and len(found) != count else found


def _lacks(private: PrivateName) -> str:
    return f"DeepSpeed {version('deepspeed')} lacks the {private.name} that Lambert knows, in {private.owner}"
