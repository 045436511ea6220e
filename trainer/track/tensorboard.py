"""Writes a run's metrics as event files, which ``tensorboard --logdir RUN/tensorboard`` shows.

TensorBoard's package encodes the records. They are appended here, because a full disk must only delay them. With a full
disk, tensorboardX waits forever on its dead thread, and PyTorch's writer raises from then on.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from trainer.errors import PassingError, TrainerError
from trainer.track.about import About
from trainer.track.journal import Batch, Standing

_SESSION_STARTS = 1  # SessionLog.START
_FILES = "events.out.tfevents."


class EventFiles:
    """The event files in a run's folder. Each sender writes its own; they are numbered in the order of writing."""

    lasting = True

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._path: Path | None = None  # this sender's file, once it has something to write
        self._size = 0  # bytes of complete records; a record truncated by a full disk is overwritten
        self._highest = 0  # the last step in older files that counts

    def open(self, about: About, standing: Standing) -> Standing:
        """Look for the files of earlier senders. Raises TrainerError if the folder has files of other programs."""
        self._folder = about.folder / "tensorboard"
        if self._path is None and not self._numbers():
            standing = Standing()
        self._highest = standing.highest
        return standing

    def describe(self, about: About, facts: dict[str, str]) -> None:
        """Do nothing: TensorBoard gets only the metrics."""

    def send(self, batch: Batch) -> None:
        """Append a batch. TensorBoard drops what older files have of later steps, and steps that the run takes back."""
        data = b"" if batch.back is None else start(batch.back)
        for point in batch.points:
            values = [{"tag": name, "simple_value": value} for name, value in point.values.items()]
            data += encode(point.time, point.step, summary={"value": values})
        if not data:
            return
        if not self._size:
            data = encode(0.0, 0, file_version="brain.Event:2") + start(self._highest) + data
        try:
            path = self._path = self._path or self._create()
            with path.open("r+b") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(data)
        except OSError as error:
            raise PassingError(
                f"tensorboard: {self._path or self._folder} cannot be written: {error.strerror}"
            ) from None
        self._size += len(data)

    def close(self, state: str, standing: Standing) -> None:
        """Do nothing: TensorBoard has no state of a run."""

    @property
    def place(self) -> str:
        """The command that shows the files."""
        return f"tensorboard --logdir {self._folder}"

    def _create(self) -> Path:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{_FILES}{max(self._numbers(), default=0) + 1:010d}"
        path.open("xb").close()
        return path

    def _numbers(self) -> list[int]:
        assert self._folder is not None
        try:
            return [int(path.name.split(".")[3]) for path in self._folder.glob(f"{_FILES}*")]
        except ValueError:
            raise TrainerError(f"{self._folder} has event files of another program: move them elsewhere") from None


def start(step: int) -> bytes:
    """The record that makes TensorBoard drop what it has read of steps after ``step``."""
    return encode(0.0, step + 1, session_log={"status": _SESSION_STARTS})


def encode(wall: float, step: int, **content: Any) -> bytes:
    """One record: an event at a Unix time in seconds and at a step, with one field of the message ``Event``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    out = io.BytesIO()
    RecordWriter(out).write(Event(wall_time=wall, step=step, **content).SerializeToString())
    return out.getvalue()
