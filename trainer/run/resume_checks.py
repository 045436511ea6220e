"""Check that a run's folder and checkpoint belong to it: settings that must not change on resume."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data_prep.manifest import MANIFEST, manifest_hash
from trainer.checkpoint.reading import Checkpoint, is_name
from trainer.checkpoint.train_state import TrainState, state_of
from trainer.console import Tell
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError
from trainer.monitor.guard import Finding, GuardState
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.run.config import Config
from trainer.run.phases import Plan


def identity(plan: Plan) -> dict[str, Any]:
    """Return the settings that must not change on resume, as stored in checkpoints."""
    config, phases = plan.config, plan.phases
    shape = asdict(config.model)
    for key in ("dropout", "attention_dropout", "decoder_prior"):  # the prior sets only the start
        del shape[key]
    return {
        "seed": config.run.seed,
        "shuffle_window": config.run.shuffle_window,
        "optimizer": config.optimizer.name,
        "tokenizer": phases[0].loader.manifest.tokenizer.sha256,  # the same for all phases: open_phases checked it
        "model": shape,
        "phases": [
            {
                "name": data.phase.name,
                "shards": manifest_hash(data.loader.folder),
                "masks": data.phase.masks,
                "spread_positions": data.phase.spread_positions,
                "loss_weights": [data.phase.mlm_weight, data.phase.nsp_weight],
                "global_batch": data.global_batch,
                "batch_warmup": [[stage.steps, stage.global_batch] for stage in data.phase.batch_warmup],
            }
            for data in phases
        ],
    }


def require_own_folder(folder: Path) -> None:
    """Raises TrainerError if the folder contains a data set, or a configuration that no run wrote."""
    require_own_files([path.name for path in folder.iterdir()] if folder.is_dir() else [], str(folder))


def require_own_files(names: Collection[str], place: str) -> None:
    """Raises TrainerError if these files and folders, in the run's folder ``place``, are not a run's."""
    for name in (MANIFEST, "config.yaml"):
        if name in names and METRICS_LOG not in names and not any(map(is_name, names)):
            raise TrainerError(f"run.folder {place} contains {name}, which no run wrote: name another folder")


def require_allowed(config: Config, found: Checkpoint | None, passed: Sequence[str]) -> None:
    """Raises TrainerError if ``run.resume`` forbids what was found; ``passed``: why each checkpoint was skipped."""
    folder, wanted = config.run.folder, config.run.resume
    if found is None and (wanted == "required" or passed):
        raise TrainerError(f"no whole checkpoint in {folder}: check run.folder, or remove what is there")
    if found is not None and wanted == "never":
        place = f"{folder.rstrip('/')}/{found.folder.name}"
        raise TrainerError(
            f"{place} exists and run.resume is never: give run.folder another name, or set resume to auto"
        )


def require_state(found: Checkpoint) -> None:
    """Raises TrainerError if no run can resume from the checkpoint's record."""
    state_of(found)
    GuardState.of(found)


def require_before(finding: Finding, found: Checkpoint) -> None:
    """Raises TrainerError if the checkpoint is damaged, or from after the samples that a rollback skips."""
    require_state(found)
    state = state_of(found)
    if (state.phase, state.position) > (finding.phase, finding.gap.position):
        raise TrainerError(f"checkpoint {found.folder} is from after the first sample that the rollback skips")


def require_found(found: Checkpoint | None, passed: Sequence[str]) -> None:
    """Raises TrainerError if there is no checkpoint to go back to."""
    if found is None:
        raise TrainerError(
            "guard: no checkpoint is from before the samples to skip: lower checkpoint.every_steps or raise "
            "checkpoint.keep, or start a new run with these samples in phases.N.pass_over"
        )


def keep_prior(plan: Plan, found: Checkpoint, tell: Tell) -> Plan:
    """The plan of a run that resumes, with the decoder prior that the run started with; report it if another is set.

    The prior only sets a run's start, so another one, perhaps the default of another version, has no effect.
    """
    config = plan.config
    wanted = config.model.decoder_prior
    begun = found.record["config"]["model"].get("decoder_prior", "zero")  # a checkpoint from before this key has none
    if begun == wanted:
        return plan
    tell(
        f"model.decoder_prior is now {wanted}, but this run started with {begun}: the new value is ignored, because it "
        "only affects a run's start"
    )
    return replace(plan, config=replace(config, model=replace(config.model, decoder_prior=begun)))


def require_same_run(record: dict[str, Any], ours: dict[str, Any], phases: tuple[Phase, ...], folder: Path) -> None:
    """Raises TrainerError if the past training data, or the batches of the unfinished phase, differ.

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
    shape = {"layer_norm": "after"} | saved["model"]  # a checkpoint from before this key has none
    different += [f"model.{k} was {shape[k]}, now {v}" for k, v in ours["model"].items() if shape[k] != v]
    begun = saved["phases"][: state["phase"] + 1]
    pairs = list(zip(begun, ours["phases"], strict=False))
    if len(pairs) < len(begun) or any(a["name"] != b["name"] or a["shards"] != b["shards"] for a, b in pairs):
        names = ", ".join(phase["name"] for phase in begun)
        different.append(f"phases {names}, in this order, with the same training shards as before, must come first")
    else:
        different += [
            f"masks of phase {a['name']} were {a['masks']}, now {b['masks']}"
            for a, b in pairs
            if a["masks"] != b["masks"]
        ]
        different += [
            f"spread_positions of phase {a['name']} was {a.get('spread_positions')}, now {b.get('spread_positions')}"
            for a, b in pairs
            if a.get("spread_positions") != b.get("spread_positions")
        ]
        different += [
            f"mlm_weight, nsp_weight of phase {b['name']} were {a.get('loss_weights', [1, 1])}, now {b['loss_weights']}"
            for a, b in pairs
            if a.get("loss_weights", [1, 1]) != b["loss_weights"]
        ]
        before, now = pairs[-1]
        taken = TrainState(phase_step=state["phase_step"], milliseconds=state.get("milliseconds", 0))
        goes_on = not taken.finished(phases[state["phase"]])
        if goes_on and before["global_batch"] != now["global_batch"]:  # perhaps by other ranks
            batches = f"was {before['global_batch']}, now {now['global_batch']}"
            different.append(f"global batch of phase {now['name']} {batches}")
        grew, grows = before.get("batch_warmup", []), now["batch_warmup"]  # [steps, global batch] of each stage
        if goes_on and grew != grows:
            different.append(f"batch_warmup of phase {now['name']} was {_stages(grew)}, now {_stages(grows)}")
    if different:
        raise TrainerError(
            f"checkpoint {folder} belongs to another run ({'; '.join(different)}): restore these settings, or give "
            "run.folder another name"
        )


def _stages(stages: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{steps} steps of {batch}" for steps, batch in stages) or "not set"
