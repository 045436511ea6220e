"""Resuming a run: choose the newest intact checkpoint, load it, record what the next one needs, finish the last save.

Pre-training and fine-tuning both resume through these functions. They differ in what a record contains, in which
changes they allow, and in where they start without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trainer.checkpoint.reading import Check, Checkpoint, restore
from trainer.checkpoint.saving import Saver, first_failure
from trainer.checkpoint.store import Store
from trainer.console import say
from trainer.engine.engine import Engine
from trainer.errors import PassingError
from trainer.ranks.world import World, broadcast_text, together

Allow = Callable[[Checkpoint | None, list[str]], None]  # raises TrainerError if the run must not start from this


def choose(store: Store, world: World, check: Check, allow: Allow) -> Checkpoint | None:
    """Return the newest checkpoint in ``store`` whose parts are all intact, or None for a fresh start. A collective.

    Rank 0 chooses, and the ranks share the work of checking. A damaged checkpoint is reported and skipped, and so is
    one whose record ``check`` refuses. ``allow`` receives what was chosen and why each newer one was skipped.
    """
    damaged: dict[str, str] = {}  # name: why
    reported: set[str] = set()
    choice = partial(_name, store, world, damaged, reported, check, allow)
    while name := broadcast_text(together(choice, world), world):
        failure = first_failure(together(partial(store.disprove, name, world), world), world)
        if not failure:
            return together(partial(store.found, name), world)
        damaged[name] = failure
    return None


def _name(store: Store, world: World, damaged: dict[str, str], reported: set[str], check: Check, allow: Allow) -> str:
    """Name the checkpoint to resume from, empty for a fresh start. Rank 0 reports each skipped one once."""
    if not world.is_main:
        return ""
    found, passed = store.newest(damaged, check)
    for reason in passed:
        if reason not in reported:
            say(f"skipped: {reason}")
    reported.update(passed)
    allow(found, passed)
    return "" if found is None else found.folder.name


def load(found: Checkpoint, engine: Engine[Any]) -> None:
    """Load weights and moments and, if the precision is the same, the loss scale. A collective.

    Raises TrainerError if the checkpoint is of another model.
    """
    together(partial(restore, found, engine.optimizer), engine.world)
    engine.refresh_weights()
    if found.record["precision"] == engine.precision:  # a loss scale is meaningless in another precision
        saved = found.record["loss_scale"]
        engine.loss_scale = replace(engine.loss_scale, scale=saved["scale"], good_steps=saved["good_steps"])


def record(engine: Engine[Any], state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what a checkpoint records next to the tensors, as plain data. ``more``: the identity, the settings."""
    return {
        "state": state,
        "loss_scale": asdict(engine.loss_scale),
        "precision": engine.precision,
        "optimizer": {"steps": engine.optimizer.steps},
        **more,
    }


def require_saved(saver: Saver) -> None:
    """Raise PassingError on all ranks, with the reason on rank 0, if the newest save failed. Finish it first."""
    last = saver.last
    if last is not None and last.failure:
        said = f"the last checkpoint, of step {last.step}, could not be saved ({last.failure}): fix that"
        raise PassingError(f"{said}; the same command resumes from the previous one" if saver.world.is_main else "")
