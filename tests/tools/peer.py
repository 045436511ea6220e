"""Train transformers' BERT for a given time on the shards of a Lambert run: the peer of docs/reference.md.

    python -m tests.tools.peer OUT.json --train FOLDER [--train FOLDER …] --heldout FOLDER --seconds 480 --rate 3e-4

BertForPreTraining, ``torch.compile``, bf16 autocast, fused AdamW, padded to the shards' length, its MLM head on the
masked positions only. The rate warms up and decays linearly over the time; compilation and evaluation do not count.
With several ``--train`` folders, each gets an equal share of the time, or the shares of ``--shares``, so that the peer
can follow a schedule of lengths; ``--prior`` gives it Lambert's start of the decoder's bias. ``--save`` writes the
trained model with its tokenizer as a Hugging Face folder. One GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, load_manifest, read_histogram
from data_prep.options import CommandParser
from data_prep.tokenizer import load_tokenizer
from trainer.data.loader import Loader
from trainer.data.order import Order
from trainer.model.batch import IGNORED, MicroBatch
from trainer.model.bert import log_unigrams, nsp_classes

MOST_MASKED = 0.16  # of a batch's padded positions: the targets are padded to this, so that shapes never change
GPU = torch.device("cuda")


class Peer(nn.Module):
    """transformers' BertForPreTraining; returns the summed MLM loss, and the summed NSP loss."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.bert = BertForPreTraining(BertConfig(attn_implementation="sdpa", **shape))

    def forward(
        self, tokens: Tensor, segments: Tensor, mask: Tensor, masked: Tensor, labels: Tensor, nsp: Tensor
    ) -> Any:
        out = self.bert.bert(input_ids=tokens, token_type_ids=segments, attention_mask=mask)
        rows = out.last_hidden_state.flatten(0, 1).index_select(0, masked)  # (P, D)
        logits = self.bert.cls.predictions(rows).float()
        pairs = self.bert.cls.seq_relationship(out.pooler_output).float()
        mlm = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return mlm, F.cross_entropy(pairs, nsp, ignore_index=IGNORED, reduction="sum"), (pairs.argmax(1) == nsp).sum()


def padded(batch: MicroBatch, length: int) -> list[Tensor]:
    """The batch as the peer takes it: (B, S) tokens, segments and mask; (P,) places and labels; (B,) NSP classes."""
    batch = batch.to(GPU)
    present = torch.arange(length, device=GPU) < batch.cu_seqlens.diff()[:, None]  # (B, S)
    empty = torch.zeros(present.shape, dtype=torch.int64, device=GPU)
    places = present.flatten().nonzero().squeeze(1)[batch.masked]
    room = int(MOST_MASKED * present.numel()) - len(places)
    if room < 0:
        raise SystemExit(f"peer: error: {len(places)} targets in {present.numel()} positions: raise MOST_MASKED")
    return [
        empty.masked_scatter(present, batch.tokens),
        empty.masked_scatter(present, batch.segments),
        present.long(),
        F.pad(places, (0, room)),
        F.pad(batch.labels, (0, room), value=IGNORED),
        nsp_classes(batch),
    ]


class Training:
    """The peer, its optimizer, and the time it has trained."""

    def __init__(self, shape: dict[str, int], rate: float, seconds: float, warmup: float) -> None:
        torch.manual_seed(1)
        self.rate, self.seconds, self.warmup, self.spent = rate, seconds, warmup, 0.0
        self.module = Peer(shape).to(GPU)
        self.run = torch.compile(self.module, dynamic=False)
        decayed = [p for p in self.module.parameters() if p.dim() > 1]
        others = [p for p in self.module.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)

    def set_prior(self, folder: Path) -> None:
        """Start the decoder's bias at the log of the shards' word frequencies, as `Bert.set_decoder_prior` does."""
        logs = log_unigrams(torch.from_numpy(read_histogram(folder, load_manifest(folder).token_counts)))
        bias = self.module.bert.cls.predictions.bias
        with torch.no_grad():
            bias.fill_(logs.min())[: len(logs)] = logs.to(bias)

    def loss(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            found: tuple[Tensor, Tensor, Tensor] = self.run(*inputs)
        return found

    def backward(self, inputs: list[Tensor]) -> Tensor:
        """Leave the gradients of the batch's mean loss; returns its MLM loss."""
        self.optimizer.zero_grad(set_to_none=True)
        mlm, nsp, _ = self.loss(inputs)
        mlm = mlm / (inputs[4] != IGNORED).sum()
        torch.autograd.backward(mlm + nsp / len(inputs[5]))
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        return mlm.detach()

    def train(self, batches: Iterator[list[Tensor]], until: float) -> tuple[int, float]:
        """Step until ``until`` seconds of training are spent; returns the steps and the last MLM loss."""
        self.module.train()
        self.backward(next(batches))  # compiles
        self.backward(next(batches))
        torch.cuda.synchronize()
        begun, before, steps, mlm = time.perf_counter(), self.spent, 0, torch.zeros(())
        while self.spent < until:
            done = self.spent / self.seconds
            factor = min(done / self.warmup, 1 - done)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * max(factor, 0.0)
            mlm = self.backward(next(batches))
            self.optimizer.step()
            steps += 1
            if steps % 10 == 0:
                torch.cuda.synchronize()
                self.spent = before + time.perf_counter() - begun
        return steps, float(mlm)

    @torch.no_grad()
    def evaluate(self, loader: Loader, length: int) -> dict[str, float]:
        self.module.eval()
        sums = torch.zeros(3, device=GPU)
        targets = pairs = 0
        for batch in loader.sweep(256):
            inputs = padded(batch, length)
            sums += torch.stack([each.float() for each in self.loss(inputs)])
            targets, pairs = targets + len(batch.labels), pairs + len(batch.is_next)
        mlm, nsp, right = sums.tolist()
        return {"mlm_loss": mlm / targets, "nsp_loss": nsp / pairs, "nsp_accuracy": right / pairs}


def save(bert: BertForPreTraining, tokenizer: Path, out: Path) -> None:
    """Write the model and its tokenizer so that ``trainer.finetune`` and transformers can load them.

    The vocabulary's rows that pad it stay, and no token has their numbers.
    """
    bert.save_pretrained(out)
    load_tokenizer(tokenizer).save(out)


def main() -> None:
    parser = CommandParser("python -m tests.tools.peer", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=Path, action="append", required=True)
    parser.add_argument("--shares", type=float, nargs="*", help="of the time, one for each --train; the same for each")
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--warmup", type=float, default=0.095, help="share of the time (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", help="padded tokens a step, one for each --train (65536)")
    parser.add_argument("--prior", action="store_true", help="start the decoder's bias at the log of the unigrams")
    parser.add_argument("--evaluations", type=int, default=8, help="in each phase (%(default)s)")
    parser.add_argument("--save", type=Path, help="a new folder for the trained model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    given = parser.parse_args()
    if given.save is not None and given.save.exists():
        parser.error(f"--save {given.save} already exists: name a new folder")
    try:
        held, *manifests = [load_manifest(folder) for folder in (given.heldout, *given.train)]
    except DataError as error:
        parser.error(str(error))
    torch.set_float32_matmul_precision("high")
    shape = {
        "vocab_size": -(-held.tokenizer.vocab_size // 64) * 64,
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.hidden // 64,
        "intermediate_size": 4 * given.hidden,
    }
    training = Training(shape, given.rate, given.seconds, given.warmup)
    heldout = Loader(given.heldout, held, 0, 1)
    shares = given.shares or [1 / len(given.train)] * len(given.train)
    tokens = given.tokens or [65536] * len(given.train)
    if given.prior:
        training.set_prior(given.train[0])
    curve, steps, samples, end = [], 0, 0, 0.0
    for folder, manifest, share, size_tokens in zip(given.train, manifests, shares, tokens, strict=True):
        length, begin = manifest.settings.sequence_length, end
        size, end = size_tokens // length, end + share * given.seconds
        order = Order(tuple(shard.samples for shard in manifest.shards), 1, 8)
        reader = Loader(folder, manifest, 0, 1, device=GPU).steps(order, samples, size, 1)
        batches = (padded(step.micro_batches[0], length) for step in reader)
        for part in range(given.evaluations):
            more, mlm = training.train(batches, begin + (end - begin) * (part + 1) / given.evaluations)
            steps, samples = steps + more, samples + more * size
            found = training.evaluate(heldout, held.settings.sequence_length)
            curve.append(
                {"seconds": round(training.spent, 2), "step": steps, "samples": samples, "train": mlm, **found}
            )
            print(json.dumps(curve[-1]), flush=True)
        reader.close()
    given.out.write_text(json.dumps({"rate": given.rate, "curve": curve}))
    if given.save is not None:
        save(training.module.bert, given.heldout / TOKENIZER_FOLDER, given.save)


if __name__ == "__main__":
    main()
