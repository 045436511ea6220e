"""Writes a run's metrics as event files, which ``tensorboard --logdir RUN/tensorboard`` shows.

The files are written byte by byte with only the standard library, because a full disk may cost events but not the
run. With a full disk, tensorboardX waits forever on its dead thread, and PyTorch's writer raises from then on.

A file is a sequence of TFRecords (https://www.tensorflow.org/tutorials/load_data/tfrecord): length, checksum of the
length, data, checksum of the data. The data is a protocol buffer ``Event`` (tensorflow/core/util/event.proto) with
fields 1 wall time, 2 step, 3 file version, 5 summary, 7 session. A summary is a list of values: 1 tag, 2 float.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from trainer.errors import TrainerError
from trainer.monitor.journal import Record, say, tokens_per_second

_SESSION_STARTS = b"\x08\x01"  # SessionLog: 1 status = START
_LARGEST = 3.4028235e38  # largest 32-bit float
_OPTIMIZER = ("learning_rate", "gradient_norm", "loss_scale", "trust_min", "trust_mean", "trust_max")


class EventFiles:
    """One attempt's event file. Files are numbered, so their order is that of the attempts whatever the clocks say."""

    def __init__(self, folder: Path, step: int) -> None:
        """Create a new file in ``folder`` for steps after ``step``; TensorBoard drops later steps of older files.

        Raises TrainerError if the file cannot be created.
        """
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
        self._head = _event(0.0, None, _bytes(3, b"brain.Event:2"))
        self._head += _event(0.0, step + 1, _bytes(7, _SESSION_STARTS))

    def write(self, records: list[Record]) -> None:
        """Append the records' metrics. If the disk is full, events are lost and one warning is printed."""
        data = b"" if self._size else self._head
        for record in records:
            values = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(v)) for tag, v in scalars(record).items())
            if values:
                data += _event(record["time"], record["step"], _bytes(5, values))
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
    """Tags and values of the metrics in one journal record; empty for an event that has no curve.

    A skipped step has none either: TensorBoard shows one value per step, that of the step taken.
    """
    match record["event"]:
        case "step" if record["applied"]:
            named = {f"train/{k}": v for k, v in record.items() if k == "loss" or k.endswith(("_loss", "_accuracy"))}
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


def _event(wall: float, step: int | None, content: bytes) -> bytes:
    """One TFRecord: an event at a Unix time in seconds, and at a step unless it is None."""
    data = b"\x09" + struct.pack("<d", wall) + (b"" if step is None else b"\x10" + _varint(step)) + content
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _bytes(field: int, content: bytes) -> bytes:
    """A protocol buffer field that contains text, bytes or another message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _float(value: float) -> bytes:
    """Field 2 of a summary's value, as 32 bits; larger numbers become infinity."""
    if abs(value) > _LARGEST:  # false for NaN, which stays as it is
        value = math.copysign(math.inf, value)
    return b"\x15" + struct.pack("<f", value)


def _varint(number: int) -> bytes:
    """An integer as seven bits per byte, lowest first, with the eighth bit set if more bytes follow."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), masked as TFRecords require: rotated right by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
