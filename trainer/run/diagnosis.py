"""Evidence about a setback: the samples that were read when it began, and the tensors with the largest gradients."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer import load_proven
from trainer.checkpoint.saving import attempt
from trainer.data.loader import Loader
from trainer.data.order import Order
from trainer.engine.engine import Engine
from trainer.errors import TrainerError
from trainer.monitor.guard import Finding
from trainer.monitor.metrics_log import plain
from trainer.ranks.world import World
from trainer.run.phases import PhaseData

MOST_LISTED = 1000  # samples whose place and text are written
LARGEST = 5  # tensors that the line names


def diagnose(finding: Finding, data: PhaseData, engine: Engine[Any], folder: Path, world: World) -> str:
    """Write ``folder``/guard/step-….json and return one line about it, empty on all ranks but 0. A collective."""
    measured, norms = engine.gradient_norms()
    if not world.is_main:
        return ""
    path = folder / "guard" / f"step-{finding.step:08d}.json"
    ranked = sorted(norms.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1], reverse=True)
    failure = attempt(partial(_write, path, finding, data, {"norms_of": measured, "gradient_norms": dict(ranked)}))
    named = ", ".join(f"{name} {norm:.3g}" for name, norm in ranked[:LARGEST])
    where = f"cannot be listed ({failure})" if failure else f"are listed in {path}"
    return f"{finding.gap} of phase {data.phase.name} {where}; largest norms of the {measured}: {named}"


def _write(path: Path, finding: Finding, data: PhaseData, norms: dict[str, Any]) -> None:
    gap = finding.gap
    facts = {"sign": finding.sign, "action": finding.action, "step": finding.step, "what": finding.what}
    place = {"phase": data.phase.name, "position": gap.position, "samples": gap.samples}
    listed = _samples(data, gap.position, min(gap.samples, MOST_LISTED))
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        tree = plain({**facts, **place, **norms, "listed": listed})
        file.write(json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False).encode())


def _samples(data: PhaseData, position: int, count: int) -> list[dict[str, Any]]:
    """Number, shard, row and text of samples. Remote shards may be gone from the cache by now: they give no text."""
    own, order = data.loader, Order(data.order.sizes, data.order.seed, data.order.window)
    shards = own.manifest.shards
    picks = order.take(position, count).tolist()
    listed: list[dict[str, Any]] = [
        {"number": position + index, "shard": shards[shard].name, "row": row}
        for index, (shard, row) in enumerate(picks)
    ]
    if own.cache is not None or not listed:
        return listed
    try:
        encoder = load_proven(own.folder / TOKENIZER_FOLDER, own.manifest.tokenizer.sha256).encoder
    except DataError as error:
        raise TrainerError(str(error)) from None
    [batch] = Loader(own.folder, own.manifest, 0, 1).read(order, position, count, 1).micro_batches
    tokens, bounds = batch.tokens.clone(), batch.cu_seqlens.tolist()
    tokens[batch.masked] = batch.labels
    for number, start, end in zip(batch.samples.tolist(), bounds, bounds[1:], strict=False):
        text = encoder.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        listed[number - position]["text"] = text
    return listed
