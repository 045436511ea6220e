"""End a rank with one last line and an exit code that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from trainer.errors import TrainerError, exit_code, explain
from trainer.exits import FAILED, INTERRUPTED, LOST, REFUSED
from trainer.ranks.world import (
    World,
    leave,
    lost_contact,
    nccl_reason,
    operation,
    say_last,
)

Result = TypeVar("Result")


def guard(world: World, action: Callable[[], Result]) -> Result:
    """Run ``action`` and return its result. If it fails, end the process with one line and an exit code."""
    try:
        return action()
    except TrainerError as error:  # without a text, it came from another rank, which reports it
        said = f"trainer: rank {world.rank}: error: {error_text(error)}" if str(error) else ""
        fail(said, exit_code(error))
    except (OSError, MemoryError) as error:
        fail(f"trainer: rank {world.rank}: error: {explain(error)}", exit_code(error))
    except KeyboardInterrupt:
        fail("trainer: interrupted; the last checkpoint is intact" if world.is_main else "", INTERRUPTED)
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        where = ", ".join([*getattr(error, "__notes__", []), operation(error)])
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        said = f"lost contact with another rank, whose own line may say why ({where}: {reason}{nccl_reason(error)})"
        fail(f"trainer: rank {world.rank}: {said}", LOST)


def error_text(error: Exception) -> str:
    """Return the error's lines, which may list several problems; explain a shortage in one line."""
    return explain(error) if exit_code(error) == FAILED else str(error)


def fail(message: str, code: int = REFUSED) -> NoReturn:
    """End this rank, with ``message`` as its last line if it is not empty."""
    if message:
        say_last(message)
    leave(code)
