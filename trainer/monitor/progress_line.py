"""The line that a run prints every few seconds: losses, rate, speed and the time left."""

from __future__ import annotations

from trainer.monitor.metrics_log import LOSS_TASKS, Record


def seconds_left(records: list[Record], samples: int, seconds: float) -> float:
    """The training time left at the speed of ``records``, steps that the run has just taken.

    ``samples`` and ``seconds`` are what is left: in phases that are counted in steps, and in those that end by time.
    """
    return samples * _mean(records, "seconds") / _mean(records, "batch") + seconds


def progress_line(records: list[Record], rate: float, samples: int, seconds: float) -> str:
    """The line over ``records``, the steps since the one before; ``rate``: of the newest step.

    ``samples`` and ``seconds`` are what the run has left, as in `seconds_left`. Losses and accuracies are means over
    the steps that were applied.
    """
    duration = _mean(records, "seconds")
    left = int(seconds_left(records, samples, seconds))
    records = [record for record in records if record["applied"]] or records  # a skipped step's loss may be NaN
    tasks = [
        f"{task} {_mean(records, f'{task}_loss'):.3f} ({_mean(records, f'{task}_accuracy'):.1%})  "
        for task in LOSS_TASKS
        if any(f"{task}_loss" in record for record in records)
    ]
    return (
        f"loss {_mean(records, 'loss'):.3f}  {''.join(tasks)}lr {rate:.2e}  "
        f"grad {records[-1]['gradient_norm']:.2f}  {_mean(records, 'tokens') / duration:,.0f} tokens/s  "
        f"left {left // 60}:{left % 60:02d}"
    )


def _mean(records: list[Record], name: str) -> float:
    """The mean over the records that have this value; there must be at least one."""
    values = [float(record[name]) for record in records if name in record]
    return sum(values) / len(values)
