"""Measures activation checkpointing: ``python -m trainer.bench --checkpointing none cheap full``.

For each kind, one row has the time and memory of the given micro-batch, and another one those of the largest
micro-batch that ran. TFLOP/s do not count what is computed again, and GiB not what is set aside: 16 bytes per parameter
for what training on one rank keeps besides fp16 weights and gradients (fp32 weights, accumulated gradients and two
moments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.bench.model import counts_of, micro_batch, milliseconds, passes
from trainer.console import print_result
from trainer.model.bert import Bert, ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.model.flops import model_flops
from trainer.plan.memory import GIB

SET_ASIDE = 16  # bytes per parameter
HEADER = "| length | checkpointing | sequences | ms | TFLOP/s | GiB |\n|---|---|---|---|---|---|"


def largest(peak: Callable[[int], int | None], start: int, room: int) -> int:
    """The most sequences for which ``peak`` is not None; 1/64 more did not run. At least 1, without trying it.

    ``peak``: the most bytes that a micro-batch of so many sequences took, or None if it did not fit. The first guess is
    where a line through the peaks of ``start`` and twice as many sequences reaches ``room`` bytes.
    """
    low, high = peak(start), peak(2 * start)
    if low is None or high is None or high <= low:
        found = start
    else:
        found = max(1, start + (room - low) * start // (high - low))
    while found > 1 and peak(found) is None:
        found -= max(1, found // 64)
    step = max(1, found // 64)
    while peak(found + step) is not None:
        found += step
    return found


def report(model: ModelConfig, length: int, tokens: int, kinds: Sequence[Checkpointing]) -> None:
    """Print a row for each kind, for full sequences of ``length``; ``tokens``: those of the first micro-batch."""
    bert = Bert(model).cuda().half()
    parameters = sum(p.numel() for p in bert.parameters())
    held = torch.empty(SET_ASIDE * parameters, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    room = free + torch.cuda.memory_reserved()
    for kind in kinds:
        bert.checkpointing = kind
        print_result(f"| {length} | {kind} | {_columns(bert, length, tokens // length)} |")
        most = largest(partial(_peak, bert, length), max(1, tokens // length // 8), room)
        print_result(f"| {length} | {kind}, largest | {_columns(bert, length, most, repeats=3)} |")
    del held, bert
    torch.cuda.empty_cache()


def _columns(bert: Bert, length: int, sequences: int, repeats: int = 10) -> str:
    """The last four columns of HEADER."""
    _empty(bert)
    try:
        batch = micro_batch([length] * sequences, bert.model).to(torch.device("cuda"))
        ms = milliseconds(passes(bert, batch), repeats)
    except torch.cuda.OutOfMemoryError:
        return f"{sequences:,} | does not fit | | "
    flops = model_flops(bert.model, counts_of(batch))
    aside = SET_ASIDE * sum(p.numel() for p in bert.parameters())
    gib = (torch.cuda.max_memory_allocated() - aside) / GIB
    return f"{sequences:,} | {ms:.1f} | {flops / ms / 1e9:.0f} | {gib:.1f}"


def _peak(bert: Bert, length: int, sequences: int) -> int | None:
    """The most bytes reserved during two forward and backward passes; None if they do not fit."""
    _empty(bert)
    try:
        run = passes(bert, micro_batch([length] * sequences, bert.model).to(torch.device("cuda")))
        run()
        run()
    except torch.cuda.OutOfMemoryError:
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def _empty(bert: Bert) -> None:
    bert.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
