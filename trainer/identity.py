"""What must not change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.manifest import manifest_hash
from trainer.config import Config
from trainer.data import PhaseData
from trainer.errors import TrainerError
from trainer.schedule import Phase


def identity(config: Config, phases: Sequence[PhaseData]) -> dict[str, Any]:
    """Of a run, as its checkpoints hold it."""
    shape = {key: value for key, value in asdict(config.model).items() if not key.endswith("dropout")}
    return {
        "seed": config.run.seed,
        "shuffle_window": config.run.shuffle_window,
        "optimizer": config.optimizer.name,
        "model": shape,
        "phases": [
            {
                "name": data.phase.name,
                "shards": manifest_hash(data.loader.folder),
                "masks": data.phase.masks,
                "global_batch": data.global_batch,
            }
            for data in phases
        ],
    }


def require_same_run(record: dict[str, Any], ours: dict[str, Any], phases: tuple[Phase, ...], folder: Path) -> None:
    """What was trained on so far, and the batch of a phase that goes on, must be the same.

    Ranks, their micro-batches, ZeRO stage, precision, later phases, steps, rates and dropout may change.
    """
    saved, state = record["identity"], record["state"]
    different = [
        f"{key} was {saved[key]}, now {ours[key]}"
        for key in ("seed", "shuffle_window", "optimizer")
        if saved[key] != ours[key]
    ]
    shape = saved["model"]
    different += [f"model.{k} was {shape[k]}, now {v}" for k, v in ours["model"].items() if shape[k] != v]
    begun = saved["phases"][: state["phase"] + 1]
    pairs = list(zip(begun, ours["phases"], strict=False))
    if len(pairs) < len(begun) or any(a["name"] != b["name"] or a["shards"] != b["shards"] for a, b in pairs):
        names = ", ".join(phase["name"] for phase in begun)
        different.append(f"phases {names}, in this order, with the training shards of then, must come first")
    else:
        different += [f"masks of phase {a['name']} were {a['masks']}" for a, b in pairs if a["masks"] != b["masks"]]
        before, now = pairs[-1]
        goes_on = state["phase_step"] < phases[state["phase"]].steps
        if goes_on and before["global_batch"] != now["global_batch"]:  # micro-batches given, and other ranks, say
            batches = f"was {before['global_batch']}, now {now['global_batch']}"
            different.append(f"global batch of phase {now['name']} {batches}")
    if different:
        raise TrainerError(
            f"checkpoint {folder} is of another run ({'; '.join(different)}): restore that, or give run.folder "
            "another name"
        )
