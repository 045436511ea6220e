"""All runs of a command: every setting with every seed, their results, and the run that is chosen."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.changed_settings import differing, spelled
from trainer.console import say, silent
from trainer.convert.weights import read
from trainer.errors import TrainerError
from trainer.finetune.data import EvaluationFile
from trainer.finetune.evaluation import Answers, answer, judge
from trainer.finetune.label_counts import LabelCounts
from trainer.finetune.model_card import card
from trainer.finetune.options import Setting
from trainer.finetune.predict import default_name, write_predictions
from trainer.finetune.result import RunResult, SettingSummary, read_json, read_result, summarise, write_json
from trainer.finetune.run import WEIGHTS, FineTuningJob, FineTuningRun
from trainer.finetune.save import write_model
from trainer.finetune.task import TaskModel
from trainer.ranks.stop import Stop
from trainer.ranks.world import World, require_shared, together

RESULTS, SETTINGS, MODEL, SWEEP_PICTURE = "results.json", "settings.json", "model", "results.png"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def sweep(job: FineTuningJob, world: World, stop: Stop) -> list[RunResult] | None:
    """Do all runs that have not ended yet. None if asked to stop; the current run has then saved."""
    options = job.options
    require_shared(options.out, world)
    tell = say if world.is_main else silent
    results, count = list[RunResult](), len(options.settings) * len(options.seeds)
    for setting in options.settings:
        own: list[RunResult] = []
        for seed in options.seeds:
            name = setting.folder(seed)
            place = f"run {len(results) + len(own) + 1} of {count}, {name}"
            result = read_result(options.out, setting, seed, world)
            if result is not None:
                tell(f"{place}: already finished: {result.how}")
            elif stop.agreed(0):  # a run may be too short to check on its own
                return None
            else:
                tell(place)
                result = _one(job, setting, seed, world, stop)
            if result is None:
                return None
            own.append(result)
            together(partial(_keep_best, job, own) if world.is_main else _nothing, world)
        results += own
    return results


def _one(job: FineTuningJob, setting: Setting, seed: int, world: World, stop: Stop) -> RunResult | None:
    """Do one run, then free its memory. None if asked to stop."""
    run = FineTuningRun(job, setting, seed, world, stop)
    result = run.run()
    run.close()
    del run
    _let_go()
    return result


def choose(rows: Sequence[SettingSummary], results: Sequence[RunResult], measure: str) -> RunResult:
    """The best run of the setting with the best median on dev. Raises TrainerError if no setting has a median."""
    known = [row for row in rows if row.median is not None]
    if not known:
        raise TrainerError("no setting has a median: at least half of the runs of each diverged; lower the rates")
    chosen = max(known, key=lambda row: row.median if row.median is not None else 0.0)
    own = [r for r in results if r.setting == asdict(chosen.setting) and r.how != "diverged"]
    return max(own, key=lambda result: result.figures[measure])


def conclude(job: FineTuningJob, results: list[RunResult], test: EvaluationFile | None, world: World) -> dict[str, Any]:
    """Score the chosen run once on the other files; write its model, the predictions and all results."""
    options, measure = job.options, job.task.measure
    rows = summarise(results, measure)
    tree: dict[str, Any] = {
        "task": options.task,
        "measure": measure,
        "runs": [asdict(result) for result in results],
        "settings": [asdict(row) for row in rows],
        "classes": _classes(job, test),
    }
    path = options.out / RESULTS
    together(lambda: write_json(path, tree) if world.is_main else None, world)  # even if none can be chosen
    best = together(partial(choose, rows, results, measure), world)  # so that only one rank reports a failure
    folder = options.out / Setting(**best.setting).folder(best.seed)  # type: ignore[arg-type]
    weights = together(partial(_weights, folder), world)
    model = TaskModel(job.model, job.task, best.seed)
    model.load_state_dict(weights)
    precision = options.machine.precision
    model = model.to(world.device, _DTYPES[precision])
    scores, answered = _score(job, model, test, world)
    tree |= {"chosen": {"seed": best.seed, **best.setting, "how": best.how, "dev": best.figures}, **scores}

    def leave() -> None:
        ran = f"{world.size} rank(s) on {_device(world)}, {precision}"
        write_model(options.out / MODEL, weights, job.model, job.task, job.tokenizer, say, card(job, rows, tree, ran))
        if options.predict is not None:
            part, answers = answered
            write_predictions(options.predict, job.task.predictions(part.records, part.units, answers))
            say(f"{options.predict}: predictions for {part.path}")
            tree["predictions"] = str(options.predict)
        write_json(path, tree)

    together(leave if world.is_main else _nothing, world)
    return tree


def _weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a run that has ended. Raises TrainerError if an earlier command kept only a better seed's."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise TrainerError(
            f"{folder} has no weights any more, since another seed of its setting did better: add that seed to "
            "--seeds, or name another --out"
        )
    return read(path, say).tensors


def _score(
    job: FineTuningJob, model: TaskModel, test: EvaluationFile | None, world: World
) -> tuple[dict[str, Any], tuple[EvaluationFile, Answers]]:
    """The metrics of the other files, and the answers to write: those for test if there is one, else for dev."""
    options = job.options
    scores: dict[str, Any] = {}
    for part in job.also:
        answers = answer(model, part.table, world)
        scores.setdefault("also", {})[str(part.path)] = judge(answers, part, job.task, world).metrics
    if test is None and options.predict is None:
        return scores, (job.dev, [])
    part = test or job.dev
    answers = answer(model, part.table, world)
    if test is not None and test.known:
        scores["test"] = judge(answers, test, job.task, world).metrics
    return scores, (part, answers)


def require_same(job: FineTuningJob) -> None:
    """Require an output folder that is new or has the same task, data and model; settings and seeds may differ."""
    out, path = job.options.out, job.options.out / SETTINGS
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if held := [name for name in (MODEL, RESULTS, SWEEP_PICTURE) if (out / name).exists()]:
            raise TrainerError(f"{out} contains {held[0]}, which fine-tuning did not write: name another --out")
        write_json(path, job.identity | {"classes": _classes(job, None)})
    then = read_json(path)
    if different := [key for key, value in job.identity.items() if then.get(key) != value]:
        changed = spelled(differing({key: then.get(key) for key in different}, job.identity))
        raise TrainerError(
            f"{out} has results of another {' and another '.join(different)}: name another --out, or restore what "
            f"changed ({changed})"
        )
    predict, test = job.options.predict, job.options.test
    if predict is not None and (test is None or predict != out / default_name(test)):
        _require_ours(predict, out / RESULTS)


def _classes(job: FineTuningJob, test: EvaluationFile | None) -> dict[str, LabelCounts]:
    """Class counts of each file."""
    parts = [job.dev, *job.also, *([] if test is None else [test])]
    return {str(job.options.wish.train): job.training.classes} | {str(p.path): p.table.classes for p in parts}


def _require_ours(predict: Path, results: Path) -> None:
    """Refuse, before any training, to overwrite a file that is not an earlier run's predictions."""
    ours = results.is_file() and read_json(results).get("predictions") == str(predict)
    if predict.exists() and not ours:
        raise TrainerError(f"--predict {predict} already exists: name another file")
    predict.parent.mkdir(parents=True, exist_ok=True)


def _keep_best(job: FineTuningJob, own: list[RunResult]) -> None:
    """Remove the weights of the setting's runs that can no longer be chosen."""
    known = [result for result in own if result.figures]
    best = max(known, key=lambda result: result.figures[job.task.measure], default=None)
    for result in own:
        if result is not best:
            folder: Path = job.options.out / Setting(**result.setting).folder(result.seed)  # type: ignore[arg-type]
            (folder / WEIGHTS).unlink(missing_ok=True)


def _let_go() -> None:
    """Free what a run's engine held: its hooks form reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device(world: World) -> str:
    """The name of the device that it runs on."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPUs"


def _nothing() -> None:
    return None
