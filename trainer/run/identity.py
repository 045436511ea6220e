"""Whether a folder, and the checkpoint in it, are a run's own: what must not change before it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.manifest import MANIFEST, manifest_hash
from trainer.checkpoint.reading import Checkpoint, named
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError
from trainer.monitor.journal import JOURNAL
from trainer.run.config import Config
from trainer.run.phases import PhaseData


def identity(config: Config, phases: Sequence[PhaseData]) -> dict[str, Any]:
    """Of a run, as its checkpoints hold it."""
    shape = asdict(config.model)
    for key in ("dropout", "attention_dropout", "decoder_prior"):  # the prior is where training starts, then history
        del shape[key]
    return {
        "seed": config.run.seed,
        "shuffle_window": config.run.shuffle_window,
        "optimizer": config.optimizer.name,
        "tokenizer": phases[0].loader.manifest.tokenizer.sha256,  # of all phases, as they were opened
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


def require_own_folder(folder: Path) -> None:
    """Raises TrainerError where the folder holds a data set, or a configuration that no run left there."""
    for name in (MANIFEST, "config.yaml"):
        if (folder / name).exists() and not ((folder / JOURNAL).exists() or named(folder)):
            raise TrainerError(f"run.folder {folder} holds {name}, which no run left there: give it another name")


def require_allowed(config: Config, found: Checkpoint | None, passed: Sequence[str]) -> None:
    """Raises TrainerError where ``run.resume`` is against what was found; ``passed``: why checkpoints do not count."""
    folder, wanted = config.run.folder, config.run.resume
    if found is None and (wanted == "required" or passed):
        raise TrainerError(f"no whole checkpoint in {folder}: check run.folder, or remove what is there")
    if found is not None and wanted == "never":
        raise TrainerError(
            f"{found.folder} exists and run.resume is never: give run.folder another name, or set resume to auto"
        )


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
    if saved.get("tokenizer", ours.get("tokenizer")) != ours.get("tokenizer"):
        different.append("its shards were made with another tokenizer")
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
