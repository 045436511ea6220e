"""Writes a run's metrics as event files, which ``tensorboard --logdir RUN/tensorboard`` shows.

TensorBoard's package encodes the records. They are appended here, because a full disk may cost events but not the run.
With a full disk, tensorboardX waits forever on its dead thread, and PyTorch's writer raises from then on.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from trainer.console import say
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import Record, tokens_per_second

_SESSION_STARTS = 1  # SessionLog.START
_OPTIMIZER = ("learning_rate", "gradient_norm", "loss_scale", "trust_min", "trust_mean", "trust_max")


class EventFiles:
    """One attempt's event file. Files are numbered, so their order is that of the attempts whatever the clocks say."""

    def __init__(self, folder: Path, step: int) -> None:
        """Create a new file in ``folder`` for steps after ``step``; TensorBoard drops later steps of older files.

        Raises TrainerError if the package is not installed, or the file cannot be created.
        """
        try:
            self._head = _encode(0.0, 0, file_version="brain.Event:2")
            self._head += _start(step)
        except ImportError as error:
            raise TrainerError(
                f"metrics.tensorboard: {error}: pip install tensorboard, or set metrics.tensorboard to false"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
            self.path = folder / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}"
            self.path.open("xb").close()
        except (OSError, ValueError) as error:
            raise TrainerError(
                f"metrics.tensorboard: cannot create an event file in {folder} ({error}): make the folder writable and "
                "use it only for Lambert, or set metrics.tensorboard to false"
            ) from None
        self._size = 0  # bytes of complete records; a record truncated by a full disk is overwritten
        self._losing = False

    def write(self, records: list[Record]) -> None:
        """Append the records' metrics. If the disk is full, events are lost and one warning is printed."""
        data = b"" if self._size else self._head
        for record in records:
            values = [{"tag": tag, "simple_value": value} for tag, value in scalars(record).items()]
            if values:
                data += _encode(record["time"], record["step"], summary={"value": values})
            if record["event"] == "rollback":
                data += _start(record["step"])
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(data)
            self._size, self._losing = self._size + len(data), False
        except OSError as error:
            if not self._losing:
                say(f"{self.path}: losing events until it can be written again: {error}")
            self._losing = True


def scalars(record: Record) -> dict[str, float]:
    """Tags and values of the metrics in one metrics log record; empty for an event that has no curve.

    A skipped step has none either: TensorBoard shows one value per step, that of the step taken.
    """
    match record["event"]:
        case "step" if record["applied"]:
            named = {f"train/{k}": v for k, v in record.items() if k == "loss" or k.endswith(("_loss", "_accuracy"))}
            named |= {"train/token_variance": record.get("token_variance")}
            named |= {f"optimizer/{key}": record.get(key) for key in _OPTIMIZER}
            named |= {"speed/seconds": record["seconds"], "speed/tokens_per_second": tokens_per_second(record)}
        case "heldout":
            named = {f"heldout/{k}": v for k, v in record.items() if k.endswith(("_loss", "_accuracy"))}
        case "checkpoint":
            named = {f"checkpoint/{key}": record.get(key) for key in ("seconds", "stall_seconds", "bytes")}
        case "ranks":
            named = {f"ranks/compute_{k}": v for k, v in zip(("min", "mean", "max"), record["compute"], strict=True)}
            named["ranks/memory_peak_bytes"] = record.get("memory_peak_bytes")
            named |= {f"parts/{part}": seconds for part, seconds in record["parts"].items()}
        case _:
            named = {}
    return {tag: float(value) for tag, value in named.items() if value is not None}


def _start(step: int) -> bytes:
    """The record that makes TensorBoard drop what it has read of steps after ``step``."""
    return _encode(0.0, step + 1, session_log={"status": _SESSION_STARTS})


def _encode(wall: float, step: int, **content: Any) -> bytes:
    """One record: an event at a Unix time in seconds and at a step, with one field of the message ``Event``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    out = io.BytesIO()
    RecordWriter(out).write(Event(wall_time=wall, step=step, **content).SerializeToString())
    return out.getvalue()
