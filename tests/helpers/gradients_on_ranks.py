"""Runs engines on prescribed gradients in several micro-batches; test_trainer_gradients.py runs it on each rank.

    python tests/helpers/gradients_on_ranks.py OUT PLAN KIND:PRECISION:STAGE[:KERNELS|:offload|:mean][:without=NAME] …

PLAN is a JSON list of steps, [micro-batches, overflow], overflow "" or "rank:micro-batch". All gradients are multiples
of 1/16 that every dtype holds exactly, and so are their sums: however they are cut, optimizers without norms take the
same steps, bit for bit. All engines live at once. OUT gets, by engine: the result of each step, the masters and moments
after it, and the checks that failed on some rank. NAME is a private name that DeepSpeed does not have; if the engine is
refused for that, OUT gets the reason. With ``mean``, DeepSpeed averages gradients where it should sum them.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer.engine.engine
from kernels import backend
from tests.helpers.engine_on_ranks import allow_fp16_on_cpus, whole
from tests.helpers.prescribed_on_ranks import poison
from trainer.data.collate import filler
from trainer.engine import private_names
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.partition import fill_masters
from trainer.errors import TrainerError
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.ranks.world import World, from_launcher, join, leave

# cut over the ranks; DeepSpeed puts the first one first. "unread" gets no gradient; "tied" gets two
SHAPES = {"table": (16, 8), "odd": (7, 5), "unread": (8, 8), "bias": (3,), "tied": (9,)}
OPTIMIZERS = {
    "adam": OptimizerConfig(name="adam"),
    "lamb": OptimizerConfig(gradient_clipping=0.5),
    "tiny": OptimizerConfig(gradient_clipping=0.1),  # of three elements: a rank of three has none
}
RATE, SCALE = 0.01, 64.0


def shapes_of(kind: str) -> dict[str, tuple[int, ...]]:
    return {"bias": (3,)} if kind == "tiny" else SHAPES


def drawn(kind: str) -> dict[str, Tensor]:
    """The initial weights; fp16 cannot hold them exactly."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(kind).items()}


def gradient(kind: str, step: int, part: int, parts: int) -> dict[str, Tensor]:
    """The gradients of all parameters for micro-batch ``part`` over all ranks, with ``parts`` on each."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    found = {n: torch.randint(-4, 5, shape, generator=generator) / 16 for n, shape in shapes_of(kind).items()}
    if kind != "tiny":
        found["unread"].zero_()
        if parts == 3:  # added up in half precision, the small one would be lost
            found["odd"][0, 0] = (256.0, 1 / 16, -256.0)[part % parts]
    return found


class Sums(NamedTuple):
    loss: Tensor

    def mean(self, counts: Any) -> Tensor:
        return self.loss


class Toy(nn.Module):
    """A model whose loss is the sum of all weights, each times its prescribed gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for name, tensor in drawn(kind).items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, batch: MicroBatch, keys: Tensor | None = None) -> Sums:
        *place, overflow = map(int, str(int(batch.samples)))
        step, part, parts = place[0] * 10 + place[1] - 10, place[2], place[3]
        loss = torch.zeros(())
        for name, prescribed in gradient(self.kind, step, part, parts).items():
            weight = getattr(self, name)
            if name == "bias" and overflow:
                prescribed = prescribed + torch.tensor([0.0, torch.inf, 0.0])
            if name == "tied":
                loss = loss + (weight.float() * (prescribed - 0.25)).sum() + (weight.float() * 0.25).sum()
            elif name != "unread":
                loss = loss + (weight.float() * prescribed).sum()
        return Sums(loss)


def batches(step: int, parts: int, overflow: str, rank: int) -> list[MicroBatch]:
    """This rank's micro-batches."""
    hit = [f"{rank}:{part}" == overflow for part in range(parts)]
    samples = [int(f"{step + 10}{rank * parts + part}{parts}{hit[part]:d}") for part in range(parts)]
    return [replace(filler(0, 0), samples=torch.tensor([each])) for each in samples]


def unrounded(engine: Engine[Any], kind: str) -> list[str]:
    """The parameters that differ from the rounded masters on some rank."""
    masters = whole(engine, "weight")
    own = [
        name
        for name, p in engine.model.named_parameters()
        if engine.stage < 3 and not torch.equal(p, masters[name].to(p.dtype))
    ]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return sum(gathered, [])


def take(engine: Engine[Any], kind: str, plan: list[tuple[int, str]], rank: int) -> dict[str, Any]:
    """Take all steps of the plan, refill the initial masters as a checkpoint would, and take one more step."""
    record: dict[str, Any] = {"results": [], "states": [], "unrounded": unrounded(engine, kind), "left": []}
    for step, (parts, overflow) in enumerate(plan):
        if overflow and engine.precision != "fp16":
            continue  # it would end the run
        result = engine.step(batches(step, parts, overflow, rank), GlobalCounts(1, 1, 1, 1), step, RATE)
        record["results"].append([step, result.applied, result.loss_scale, float(result.gradient_norm)])
        state = {kind: whole(engine, kind) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        record["states"].append({**state, "steps": engine.optimizer.steps})
        record["unrounded"] += unrounded(engine, kind)
        record["left"] += [n for n, p in engine.model.named_parameters() if p.grad is not None and engine.stage < 3]
    fill_masters(engine.partition, drawn(kind))
    engine.refresh_weights()
    record["unrounded"] += unrounded(engine, kind)
    engine.step(batches(50, 1, "", rank), GlobalCounts(1, 1, 1, 1), 50, RATE)
    record["unrounded"] += unrounded(engine, kind)
    return record


@contextmanager
def without(gone: str) -> Iterator[None]:
    """Let private_names.py find nothing under the name ``gone``."""

    def look(owner: Any, name: str, default: Any) -> Any:
        return default if name == gone else getattr(owner, name, default)

    with patch.object(private_names, "getattr", look, create=True):
        yield


def make(text: str, world: World) -> Engine[Any]:
    kind, precision, stage, *rest = text.split(":")
    config = EngineConfig(int(stage), precision, "offload" in rest, initial_loss_scale=SCALE)  # type: ignore[arg-type]
    settings = trainer.engine.engine.deepspeed_config
    spoiled: Any = (lambda *given: settings(*given) | {"gradient_allreduce_op": "mean"}) if "mean" in rest else settings
    with without(text.partition("without=")[2]), patch.object(trainer.engine.engine, "deepspeed_config", spoiled):
        engine: Engine[Any] = Engine(config, Toy(kind), OPTIMIZERS[kind], world, seed=3)
    poison(engine)
    if engine._gradients is not None:  # no padding of a row may be read
        row, end = engine._gradients.row, sum(p.numel() for p in engine.model.parameters())
        row[end:] = torch.nan
        engine._gradients.weights.flat[end:] = torch.nan
    return engine


def main() -> None:
    out, plan, *texts = sys.argv[1:]
    world = from_launcher("cpu")
    join(world, 60)
    allow_fp16_on_cpus()
    engines, record = dict[str, Engine[Any]](), dict[str, Any]()
    for text in texts:
        try:
            engines[text] = make(text, world)
        except TrainerError as error:
            record[text] = str(error)
    for text, engine in engines.items():
        with backend.using("triton" if "triton" in text else "auto"):
            record[text] = take(engine, text.split(":")[0], json.loads(plan), world.rank)
    rows = [weakref.ref(engine._gradients.row) for engine in engines.values() if engine._gradients is not None]
    for engine in engines.values():
        engine.close()
    engines.clear()
    del engine
    gc.collect()
    record["alive"] = sum(row() is not None for row in rows)
    if world.is_main:
        torch.save(record, out)
    leave(0)


if __name__ == "__main__":
    main()
