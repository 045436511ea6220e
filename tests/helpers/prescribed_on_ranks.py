"""Takes the engine's steps on prescribed gradients; test_trainer_optimizer.py and test_gpu.py run it on each rank.

    python tests/helpers/prescribed_on_ranks.py OUT ZERO_STAGES [key=value …]

Bert's forward is replaced by the sum of all weights, each times its prescribed gradient; every rank contributes its
share of the elements. All padding of the masters and moments is NaN. OUT gets the masters under each of ZERO_STAGES
("1,2,3"), and the gradient norms of the steps. ``optimizer``: one of OPTIMIZERS. ``scales=1,256``: loss scales,
repeated.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.helpers.engine_on_ranks import allow_fp16_on_cpus, whole
from trainer.checkpoint.reading import flat_tensors
from trainer.data.collate import filler
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert, Layer, ModelConfig, Output
from trainer.ranks.world import from_launcher, join, leave

# BERT-Tiny with fewer layers and words
MODEL = ModelConfig(layers=1, hidden=128, heads=2, intermediate=512, max_positions=128, vocab_size=1000)
STEPS, RATE = 20, 0.01
OPTIMIZER = OptimizerConfig(gradient_clipping=1.0)  # of norms around 20
OPTIMIZERS = {
    "lamb": OPTIMIZER,
    "adam": replace(OPTIMIZER, name="adam"),
    # DeepSpeed's LAMB; there are ratios below, within and above the bounds
    "bounded": replace(OPTIMIZER, bias_correction=False, adapted="all", min_trust_ratio=0.01, max_trust_ratio=0.3),
}


def gradient(step: int, name: str, shape: torch.Size) -> Tensor:
    """A parameter's prescribed gradient; across parameters, sizes differ by a factor of a hundred."""
    seed = zlib.crc32(f"{step} {name}".encode())
    size = 10.0 ** -(1 + zlib.crc32(name.encode()) % 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def batch_of(step: int, part: int, parts: int) -> MicroBatch:
    """A batch whose sample number is the place that the replaced forwards read."""
    return replace(filler(0, 0), samples=torch.tensor([(step * 100 + parts) * 100 + part]))


def weighed(module: nn.Module, batch: MicroBatch, prefix: str) -> Tensor:
    """The sum of a module's own weights, each times its prescribed gradient if it is this part's turn: () fp32."""
    place, part = divmod(int(batch.samples), 100)
    step, parts = divmod(place, 100)
    total = torch.zeros((), device=batch.tokens.device)
    for name, parameter in module.named_parameters(recurse=False):
        prescribed = gradient(step, prefix + name, parameter.shape).view(-1)[part::parts]
        total = total + (parameter.view(-1)[part::parts].float() * prescribed.to(total.device)).sum()
    return total


def replace_forwards() -> None:
    """Replace the forwards of Bert and its layers, so that each module uses its own parameters."""

    def layer(self: Layer, x: Tensor, residual: Tensor, batch: MicroBatch, keys: Tensor | None) -> tuple[Tensor, ...]:
        both = x + residual
        return both, weighed(self, batch, f"layers.{self.site // 4 - 1}.")

    def bert(self: Bert, batch: MicroBatch, keys: Tensor | None = None) -> Output:
        x, residual = weighed(self, batch, ""), torch.zeros((), device=batch.tokens.device)
        for each in self.layers:
            x, residual = each(x, residual, batch, keys)
        x = x + residual
        zero = torch.zeros((), dtype=torch.int64, device=x.device)
        return Output(x, torch.zeros_like(x), zero, zero, zero[None])

    Layer.forward, Bert.forward = layer, bert  # type: ignore[assignment, method-assign]


@torch.no_grad()
def poison(engine: Engine[Bert]) -> None:
    """Write NaN wherever a buffer holds no parameter."""
    for buffer in engine.partition.buffers:
        padding = torch.ones(buffer.master.numel(), dtype=torch.bool)
        for part in buffer.slices:
            padding[part.offset : part.offset + part.length] = False
        for flat in flat_tensors(engine.optimizer, buffer).values():
            flat[padding.to(flat.device)] = torch.nan


def main() -> None:
    out, stages = sys.argv[1:3]
    options = {
        "device": "cpu",
        "precision": "fp32",
        "scales": "1",
        "optimizer": "lamb",
        "steps": str(STEPS),
        "offload": "",
    }
    options |= dict(option.split("=", 1) for option in sys.argv[3:])
    world = from_launcher(options["device"])
    join(world, 60)
    if options["device"] == "cpu":
        allow_fp16_on_cpus()
    replace_forwards()
    record, scales = {}, [float(scale) for scale in options["scales"].split(",")]
    for stage in map(int, stages.split(",")):
        config = EngineConfig(stage, options["precision"], bool(options["offload"]))  # type: ignore[arg-type]
        engine = Engine(config, Bert(MODEL, 3), OPTIMIZERS[options["optimizer"]], world, seed=3)
        poison(engine)
        norms = []
        for step in range(int(options["steps"])):
            engine.loss_scale = replace(engine.loss_scale, scale=scales[step % len(scales)])
            mine = [batch_of(step, world.rank, world.size)]
            norms.append(float(engine.step(mine, GlobalCounts(1, 1, 1, 1), step, RATE).gradient_norm))
        record[stage] = {"weights": whole(engine, "weight"), "norms": norms}
    if world.is_main:
        torch.save(record, out)
    leave(0)


if __name__ == "__main__":
    main()
