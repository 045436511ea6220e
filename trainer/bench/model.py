"""BERT's forward and backward pass, timed against Hugging Face's.

One GPU, fp16, dropout 0.1, 32,768 tokens per micro-batch: full sequences and, with ``--shards``, sequences as long as
those in prepared shards. TFLOP/s count only the model's own operations (6 N per token, plus attention and heads), so
padding counts as lost time. Hugging Face's BertForPreTraining runs with SDPA, padded to the longest sequence of the
batch, with its MLM head on the masked positions only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from data_prep.draws import bits
from data_prep.manifest import load_manifest, read_histogram
from kernels.dropout import token_keys
from trainer.console import print_result
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert, ModelConfig
from trainer.model.flops import model_flops
from trainer.plan.cards import Rate
from trainer.plan.memory import GIB
from trainer.profile.parts import kernel_part

TOKENS = 32_768
MODEL_SIZES = {
    "base": ModelConfig(),
    "large": ModelConfig(layers=24, hidden=1024, heads=16, intermediate=4096),
    "1.3b": ModelConfig(layers=24, hidden=2048, heads=32, intermediate=8192),
}


def micro_batch(lengths: list[int], model: ModelConfig) -> MicroBatch:
    """A micro-batch of random tokens in sequences of these lengths, 15 % of them masked."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    masked = torch.randperm(tokens, generator=generator)[: round(0.15 * tokens)].sort().values
    return MicroBatch(
        tokens=torch.randint(0, model.vocab_size, (tokens,), generator=generator),
        segments=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        samples=torch.arange(len(lengths)),
        masked=masked,
        labels=torch.randint(0, model.vocab_size, masked.shape, generator=generator),
        is_next=torch.zeros(len(lengths), dtype=torch.int64),
    )


def shard_lengths(folder: Path) -> list[int]:
    """Sequence lengths drawn from a data set's distribution, about 32,768 tokens. Raises DataError."""
    counts = read_histogram(folder, load_manifest(folder).length_counts)
    draws = bits(0, np.arange(TOKENS // 8)) % np.uint64(counts.sum())
    lengths = np.searchsorted(counts.cumsum(), draws, side="right")
    return [int(n) for n in lengths[: np.searchsorted(lengths.cumsum(), TOKENS)]]


def counts_of(batch: MicroBatch, times: int = 1) -> GlobalCounts:
    """The counts of a global batch of ``times`` such micro-batches."""
    squares = int(batch.cu_seqlens.diff().square().sum())
    sizes = batch.masked.numel(), batch.samples.numel(), batch.tokens.numel(), squares
    return GlobalCounts(*(times * size for size in sizes))


def passes(bert: Bert, batch: MicroBatch) -> Callable[[], object]:
    """The forward and backward pass of this model, with dropout."""
    keys = token_keys(0, 1, batch.samples, batch.positions, batch.cu_seqlens)

    def run() -> None:
        bert.zero_grad()
        out = bert(batch, keys)
        loss = out.mlm_loss / batch.masked.numel() + out.nsp_loss / batch.samples.numel()
        torch.autograd.backward(loss * 2.0**14)

    return run


def theirs(model: ModelConfig, batch: MicroBatch, compiled: bool) -> Callable[[], object]:
    """The forward and backward pass of transformers' BertForPreTraining, over the padded batch."""
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=model.vocab_rows,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate,
        attn_implementation="sdpa",
    )
    bert = BertForPreTraining(config).cuda().half().train()
    present = torch.arange(batch.max_seqlen, device="cuda") < batch.cu_seqlens.diff()[:, None]  # (B, S)
    tokens = torch.zeros(present.shape, dtype=torch.int64, device="cuda").masked_scatter(present, batch.tokens)
    masked = present.flatten().nonzero().squeeze(1)[batch.masked]  # (P,) of B * S
    mask = None if bool(present.all()) else present.long()

    def loss() -> torch.Tensor:
        out = bert.bert(input_ids=tokens, attention_mask=mask)
        rows = out.last_hidden_state.flatten(0, 1).index_select(0, masked)  # (P, D)
        logits = bert.cls.predictions(rows).float()
        nsp = bert.cls.seq_relationship(out.pooler_output).float()
        return F.cross_entropy(logits, batch.labels) + F.cross_entropy(nsp, batch.is_next)

    chosen: Callable[[], Any] = torch.compile(loss, dynamic=False) if compiled else loss

    def run() -> None:
        bert.zero_grad()
        torch.autograd.backward(chosen() * 2.0**14)

    return run


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The median time of ``run``, after three warm-up calls."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def by_kernel(run: Callable[[], object]) -> dict[str, float]:
    """GPU milliseconds of one ``run``, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}


def parts(run: Callable[[], object]) -> dict[str, float]:
    """GPU milliseconds of one ``run``, by the part that a kernel's name stands for, largest first."""
    spent: dict[str, float] = {}
    for name, ms in by_kernel(run).items():
        part = kernel_part(name) or "rest"
        spent[part] = spent.get(part, 0.0) + ms
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def rates(model: ModelConfig, lengths: Sequence[int], tokens: Sequence[int]) -> Iterator[Rate]:
    """Time one model over full sequences, at each length and size of micro-batch, as rows of the planner's table."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    bert = Bert(model).cuda().half()
    for length, size in product(lengths, tokens):
        sequences = size // length
        batch = micro_batch([length] * sequences, model).to(torch.device("cuda"))
        ms = milliseconds(passes(bert, batch))
        yield Rate(
            card=properties.name,
            memory_gib=round(properties.total_memory / GIB, 1),
            layers=model.layers,
            hidden=model.hidden,
            length=length,
            tokens=sequences * length,
            milliseconds=round(ms, 2),
            tflops=round(model_flops(model, counts_of(batch)) / ms / 1e9, 1),
            date=datetime.now(UTC).date().isoformat(),
            source=f"python -m trainer.bench, torch {torch.__version__}",
        )


def report(name: str, model: ModelConfig, lengths: list[int], compiled: bool) -> None:
    """Print a row for each contender, and where ours spends its time."""
    batch = micro_batch(lengths, model).to(torch.device("cuda"))
    flops = model_flops(model, counts_of(batch))
    for who in ("Lambert", "Hugging Face", *(["Hugging Face, compiled"] if compiled else [])):
        ours = who == "Lambert"
        run = passes(Bert(model).cuda().half(), batch) if ours else theirs(model, batch, who.endswith("compiled"))
        ms = milliseconds(run)
        speed = f"{flops / ms / 1e9:.0f} | {sum(lengths) / ms * 1e3:,.0f}"
        print_result(f"| {name} | {who} | {ms:.1f} | {speed} | {torch.cuda.max_memory_allocated() / GIB:.1f} |")
        if ours:
            spent = ", ".join(f"{part} {ms:.1f}" for part, ms in parts(run).items())
            print_result(f"| | by part, ms | {spent} | | | |")
        del run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
