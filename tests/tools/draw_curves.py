"""Trains one model in several ways on the same samples on GPUs, then draws the losses in one picture.

    python -m tests.tools.draw_curves OUT --shards SHARDS [--plan kernels batches warm-up stages]
    python -m tests.tools.draw_curves OUT --draw docs/curves.png

``stages``: BERT-Base with LAMB at 8,192 sequences in fp16, under ZeRO 1 and 2 on two GPUs and ZeRO 1 on four; ZeRO 3,
and ZeRO 1 on one GPU, for half as long; ZeRO 0 in fp32 for 30 steps. ``batches``: LAMB and Adam at 256 and 8,192
sequences over equally many samples. ``warm-up``: both at 8,192 after a longer warm-up, on one GPU. ``kernels``: 200
steps with the kernels and with the plain references. It is written for four GPUs. ``--small`` trains a small model at
small batches on CPUs, to see that the script works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from data_prep.manifest import load_manifest
from tests.helpers import ranks
from trainer.monitor.metrics_log import read_lines

LENGTH = 32  # of the sequences: short, for the most steps in the time
RATES = {"lamb": 4e-3, "adam": 6e-4}  # at 8,192 sequences; others are scaled by the root of the batch
SMALL = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64}


class Curve(NamedTuple):
    """One run; its name is shown in the picture."""

    name: str
    gpus: tuple[int, ...]
    stage: int = 1
    optimizer: str = "lamb"
    batch: int = 8192
    samples: int = 200 * 8192
    precision: str = "auto"
    kernels: str = "auto"
    rate: float | None = None  # None: from RATES
    warmup: int = 20  # steps of 8,192 samples; the rate stays constant after it


PLANS: dict[str, list[list[Curve]]] = {  # the runs of a row are trained at the same time
    "kernels": [
        [
            Curve("Triton kernels, 1,024", (0,), batch=1024, samples=200 * 1024),
            Curve("plain references, 1,024", (1,), batch=1024, samples=200 * 1024, kernels="torch"),
        ]
    ],
    "batches": [
        [
            Curve(f"{name}, {batch:,}", (gpu,), 1, name, batch, 60 * 8192)
            for gpu, (name, batch) in enumerate(product(RATES, (256, 8192)))
        ]
    ],
    "warm-up": [
        [
            Curve("LAMB, rate 1.4e-3", (0,), rate=1.4e-3, warmup=80),
            Curve("LAMB, rate 2.5e-3", (0,), rate=2.5e-3, warmup=80),
            Curve("Adam, rate 6e-4", (0,), optimizer="adam", warmup=80),
        ]
    ],
    "stages": [
        [Curve("ZeRO 1, 2 GPUs", (0, 1)), Curve("ZeRO 2, 2 GPUs", (2, 3), 2)],
        [
            Curve("ZeRO 1, 4 GPUs", (0, 1, 2, 3)),
            Curve("ZeRO 3, 2 GPUs", (0, 1), 3, samples=100 * 8192),
            Curve("ZeRO 1, 1 GPU", (2,), samples=100 * 8192),
            Curve("ZeRO 0, fp32, 1 GPU", (3,), 0, samples=30 * 8192, precision="fp32"),
        ],
    ],
}


def configuration(curve: Curve, shards: Path, out: Path, small: bool) -> dict[str, Any]:
    """The contents of the run's YAML."""
    by = 64 if small else 1
    batch, steps = curve.batch // by, curve.samples // curve.batch
    rate = curve.rate or RATES[curve.optimizer] * (curve.batch / 8192) ** 0.5
    phase = {
        **{"name": "all", "train": str(shards), "sequence_length": LENGTH, "steps": steps, "global_batch": batch},
        **{
            "micro_batch": min(batch, 1024),
            "learning_rate": rate,
            "warmup_steps": curve.warmup * 8192 // curve.batch,
            "power": 0.0,
        },
    }
    model: dict[str, Any] = {"vocab_size": load_manifest(shards).tokenizer.vocab_size, "decoder_prior": "zero"}
    return {
        "run": {"name": curve.name, "folder": str(out / curve.name.replace(", ", "-").replace(" ", "-")), "seed": 1},
        "model": model | (SMALL if small else {}),  # the pictures in the docs show the plateau from a bias of zero
        "optimizer": {"name": curve.optimizer, "gradient_clipping": 1.0},
        "engine": {
            **{"zero_stage": curve.stage, "precision": curve.precision, "initial_loss_scale": 2.0**20},
            "kernels": curve.kernels,
        },
        "phases": [phase],
        "checkpoint": {"every_steps": 10**6, "keep": 1},
        "metrics": {"port": None, "log_every_steps": 10},
    }


def start(curve: Curve, shards: Path, out: Path, small: bool) -> subprocess.Popen[bytes]:
    """Start the run under torchrun; its output goes into a file next to its folder."""
    config = configuration(curve, shards, out, small)
    path = Path(config["run"]["folder"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(len(curve.gpus))]
    command += ["--master_port", str(ranks.free_port()), "-m", "trainer", "--config", str(path)]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, curve.gpus)), "PYTHONPATH": os.environ["PYTHONPATH"]}
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=ranks.ROOT, env=os.environ | visible, stdout=log, stderr=log)


def train(plan: str, shards: Path, out: Path, small: bool) -> None:
    """Train every run of a plan that has GPUs, and print a line as each ends; runs share GPUs if there are few."""
    out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count() or 4
    for row in PLANS[plan]:
        shared = [curve._replace(gpus=tuple(gpu % gpus for gpu in curve.gpus)) for curve in row]
        fit = [curve for curve in shared if len(set(curve.gpus)) == len(curve.gpus)]
        for curve in (curve for curve in shared if curve not in fit):
            print(f"{curve.name}: not run, for want of GPUs", flush=True)
        running = [(curve, start(curve, shards, out, small)) for curve in fit]
        for curve, process in running:
            print(f"{curve.name}: {'trained' if process.wait() == 0 else 'failed, see its log'}", flush=True)


def draw(out: Path, picture: Path) -> None:
    """Draw losses, the loss scale and trust ratios, and the losses of the other plans; print the final values."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for plan, rows in PLANS.items():
        for curve in (curve for row in rows for curve in row):
            path = out / curve.name.replace(", ", "-").replace(" ", "-") / "metrics.jsonl"
            if not path.is_file():
                continue
            steps = [record for record in read_lines(path) if record["event"] == "step"]
            skipped, steps = sum(not r["applied"] for r in steps), [r for r in steps if r["applied"]]
            if not steps:
                continue
            last = [record["loss"] for record in steps][-10:]
            mean = sum(last) / len(last)
            print(f"{curve.name}: {len(steps)} steps, {skipped} skipped, mean loss of the last {len(last)} {mean:.4f}")
            kept = steps if curve.batch > 256 else steps[::32]
            line = {"label": curve.name, "linewidth": 1.0, "alpha": 0.8}
            if plan not in ("stages", "warm-up"):
                axes[1, 1].plot([r["position"] / 1e6 for r in kept], [r["loss"] for r in kept], **line)
                continue
            axes[0, 0].plot([r["position"] / 1e6 for r in kept], [r["loss"] for r in kept], **line)
            axes[0, 1].plot([r["position"] / 1e6 for r in kept], [r["loss_scale"] for r in kept], **line)
            if curve.optimizer != "lamb":
                continue
            own = axes[1, 0].plot([r["position"] / 1e6 for r in kept], [r["trust_mean"] for r in kept], **line)
            for bound in ("trust_min", "trust_max"):
                axes[1, 0].plot(
                    [r["position"] / 1e6 for r in kept], [r[bound] for r in kept], ":", color=own[0].get_color()
                )
    axes[0, 1].set_yscale("log", base=2)
    axes[1, 0].set_yscale("log")
    titles = ("loss at 8,192 sequences", "loss scale", "trust ratios: least, mean, largest", "loss, other runs")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("millions of samples")
        if axis.lines:
            axis.legend(frameon=False, fontsize=7)
        else:
            axis.remove()  # its runs are not there
    figure.savefig(picture, dpi=130)
    print(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards", type=Path, help=f"training shards of sequences of {LENGTH}")
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--draw", type=Path, metavar="PNG")
    given = parser.parse_args()
    if given.draw is not None:
        draw(given.out, given.draw)
        return
    for plan in given.plan:
        train(plan, given.shards, given.out, given.small)


if __name__ == "__main__":
    main()
