"""Runs the whole pipeline on a small corpus: ``make demo``.

Text → vocabulary → shards → two ranks under the ``deepspeed`` launcher → SIGKILL → resume → evaluation →
Hugging Face export → plots. Every stage is a command that a user could type, and is printed as one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

from deploy import commands
from deploy.commands import Launch, section
from trainer.monitor.metrics_log import Record, read_lines

CORPUS = Path("deploy/demo/corpus")
CONFIG = Path("deploy/configs/demo.yaml")
ROOT = Path("runs/demo")
RUN, SHARDS, VOCABULARY, EXPORT = ROOT / "run", ROOT / "shards", ROOT / "tokenizer", ROOT / "bert-demo"
LENGTHS = {32: 10, 64: 5}  # sequence length of each phase: copies of the corpus, each with its own masks
KILL_AFTER = 60  # steps past a checkpoint; all are trained again after the kill and compared
MARGIN = 0.5  # nats by which the model must beat word frequencies, and itself on shuffled context
METRICS = "http://127.0.0.1:9464/metrics"
SENTENCES = (
    "Sherlock Holmes sat in his [MASK], and looked at the fire.",
    "The people of the United [MASK] have the right to choose.",
    "It was a dark night, and he could not [MASK] anything.",
)
command = partial(commands.command, script="demo")


def main() -> int:
    """Run all stages in order; returns the exit code."""
    started = time.monotonic()
    if shutil.which("deepspeed") is None:
        print("demo: error: no deepspeed launcher on the PATH: start the demo with `make demo`", file=sys.stderr)
        return 2
    commands.stop_on_signals("demo")
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    prepare()
    killed_at = train_until_killed()
    resume()
    compare(killed_at)
    evaluate()
    export()
    section("Plots")
    command("python", "-m", "trainer.report", RUN)
    section(f"Done in {time.monotonic() - started:.0f} s. Where to find everything")
    for path, text in {
        VOCABULARY: "the WordPiece vocabulary, loadable by transformers",
        SHARDS: "the WebDataset shards, each folder with its manifest",
        RUN / "config.yaml": "the run's resolved configuration",
        RUN / "metrics.jsonl": "the metrics of every step",
        RUN / "report.png": "the plots",
        RUN: "the checkpoints, step-…",
        ROOT / "evaluation.json": "the held-out metrics",
        EXPORT: 'the trained model: transformers.BertForPreTraining.from_pretrained("' + str(EXPORT) + '")',
        ROOT / "launcher.log": "the launcher's output",
    }.items():
        print(f"  {path!s:32} {text}")
    return 0


def prepare() -> None:
    """Train the vocabulary, then build and verify training and held-out shards of both lengths."""
    section("Vocabulary and shards")
    command(
        *("python", "-m", "data_prep", "vocab", "--input", CORPUS, "--where", "split=train"),
        *("--out", VOCABULARY, "--size", "2048"),
    )
    for length, duplicates in LENGTHS.items():
        for split, copies in (("train", duplicates), ("heldout", 1)):
            command(
                *("python", "-m", "data_prep", "build", "--input", CORPUS, "--where", f"split={split}"),
                *("--tokenizer", VOCABULARY, "--out", SHARDS / f"{split}-{length}"),
                *("--sequence-length", str(length), "--duplicates", str(copies), "--cut", "outer"),
            )
    command("python", "-m", "data_prep", "verify", "--full", *sorted(SHARDS.iterdir()))


def train_until_killed() -> int:
    """Train until KILL_AFTER steps past the second checkpoint, then SIGKILL the launcher and the ranks.

    Returns the last step whose metrics reached the disk.
    """
    section("Training")
    launched = launch()
    scraped = False
    try:
        while launched.process.poll() is None:
            time.sleep(0.2)
            lines = read_lines(RUN / "metrics.jsonl") if (RUN / "metrics.jsonl").exists() else []
            saved = [line["step"] for line in lines if line["event"] == "checkpoint"]
            steps = [line["step"] for line in lines if line["event"] == "step"]
            if steps and not scraped:
                scraped = True
                print(f"demo: {METRICS} answers: {scrape('lambert_step')}", flush=True)
            if len(saved) > 1 and steps[-1] >= saved[-1] + KILL_AFTER:
                launched.kill()
                print(f"demo: killed launcher and ranks with SIGKILL after step {steps[-1]}", flush=True)
                return int(steps[-1])
    finally:
        if launched.process.poll() is None:
            launched.kill()
    raise SystemExit("demo: error: the run ended before it could be killed; see the lines above")


def resume() -> None:
    """Run the same command again to its end."""
    section("Resuming with the same command")
    if launch().finish() != 0:
        raise SystemExit("demo: error: the resumed run failed; see the lines above")


def compare(killed_at: int) -> None:
    """Show that the steps trained twice, before the kill and after the resume, are identical."""
    section("Killed and resumed equals never killed")
    steps = [line for line in read_lines(RUN / "metrics.jsonl") if line["event"] == "step"]
    before = {line["step"]: line for line in steps if line["restarts"] == 0}
    after = {line["step"]: line for line in steps if line["restarts"] == 1}
    both = sorted(before.keys() & after.keys())
    print(f"  {'step':>6}  {'loss, never killed':>20}  {'loss, resumed':>20}")
    for step in (both[0], both[len(both) // 2], both[-1]):
        print(f"  {step:>6}  {before[step]['loss']:>20.15f}  {after[step]['loss']:>20.15f}")
    names = ("loss", "mlm_loss", "nsp_loss", "gradient_norm", "position")
    same = [step for step in both if all(before[step][name] == after[step][name] for name in names)]
    print(
        f"  {len(same)} of {len(both)} steps up to {killed_at}: loss, gradient norm and data position match bit for bit"
    )
    if len(same) < len(both):
        raise SystemExit("demo: error: the resumed run differs from the run that was killed; see the steps above")


def evaluate() -> None:
    """Print the held-out metrics, and check that the model learned from context."""
    section("Held-out evaluation")
    shards = ("--heldout", SHARDS / "heldout-64", "--train", SHARDS / "train-64")
    out = command("python", "-m", "trainer.evaluate", "--checkpoint", RUN, *shards, quiet=True)
    (ROOT / "evaluation.json").write_text(out, encoding="utf-8")
    metrics: Record = json.loads(out)
    print(f"  NSP   accuracy {metrics['nsp_accuracy']:.1%}, loss {metrics['nsp_loss']:.3f}")
    print(f"  MLM   accuracy {metrics['mlm_accuracy']:.1%}, loss {metrics['mlm_loss']:.3f} nats over all masked tokens")
    print("  on [MASK] tokens, where only context helps:")
    print(f"        {metrics['mask_loss']:.3f} nats  the model")
    print(f"        {metrics['mask_unigram_entropy']:.3f} nats  word frequencies alone")
    print(f"        {metrics['mask_loss_shuffled']:.3f} nats  the model, other tokens shuffled")
    if metrics["mask_loss"] + MARGIN > min(metrics["mask_unigram_entropy"], metrics["mask_loss_shuffled"]):
        raise SystemExit(f"demo: error: the model does not beat both by {MARGIN} nats: it did not learn from context")


def export() -> None:
    """Write the Hugging Face folder, verify it, and fill masks with it."""
    section("Hugging Face export")
    command("python", "-m", "trainer.export", "--checkpoint", RUN, "--out", EXPORT)
    command("python", "-m", "trainer.fill_mask", "--model", EXPORT, *SENTENCES)


def launch() -> Launch:
    """Start the run; its output goes to launcher.log too."""
    import torch  # here, because it takes seconds, in which Ctrl-C would end in a traceback

    ranks = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    return commands.launch(ranks, ROOT / "launcher.log", "--config", CONFIG)


def scrape(name: str) -> str:
    """Return one series of the running trainer, as Prometheus would read it."""
    with urllib.request.urlopen(METRICS, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = next((line for line in lines if line.startswith(f"{name}{{")), "")
    if not found:
        raise SystemExit(f"demo: error: {METRICS} has no series {name}")
    return found


if __name__ == "__main__":
    sys.exit(main())
