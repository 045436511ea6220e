"""Unpacks an archive of task files into the folders that ``trainer.finetune`` and ``deploy.reference`` read.

    python -m tests.tools.task_files tasks.tar.xz OUT [--rows 200]

The archive holds ``tasks/NAME/{train,dev}.{tsv,jsonl}``. Each folder of OUT has the name of its fine-tuning task. SST-2
keeps 10,000 training rows, a fixed random choice. ``--rows`` limits every file, to try things out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path

from data_prep.atomic import replacing

ROWS = {"sst2": 10_000}  # training rows to keep
FOLDERS = {  # fine-tuning task: its folder in the archive, and the ending of its files
    "sst2": ("sst2", "tsv"),
    "mrpc": ("mrpc", "tsv"),
    "rte": ("rte", "tsv"),
    "cola": ("cola", "tsv"),
    "stsb": ("stsb", "tsv"),
    "sick-entailment": ("sick", "tsv"),
    "conll2003": ("conll2003", "jsonl"),
    "squad": ("xquad_en", "jsonl"),
}
SEED = 1  # of the choice of rows


def unpack(archive: Path, out: Path, names: Iterable[str] = FOLDERS, rows: int | None = None) -> None:
    """Write the training and dev file of each task to ``out/NAME``. Raises SystemExit if the archive lacks one."""
    try:
        with tarfile.open(archive) as tar:
            for name, part in itertools.product(names, ("train", "dev")):
                folder, ending = FOLDERS[name]
                member = tar.extractfile(f"tasks/{folder}/{part}.{ending}")
                assert member is not None  # a plain file
                limits = [rows, ROWS.get(name) if part == "train" else None]
                lines = chosen(member.read().splitlines(keepends=True), ending == "tsv", limits)
                (out / name).mkdir(parents=True, exist_ok=True)
                with replacing(out / name / f"{part}.{ending}") as file:
                    file.write(b"".join(lines))
    except (OSError, KeyError, tarfile.TarError) as error:
        raise SystemExit(f"task_files: error: {archive}: {str(error).splitlines()[0]}") from None


def chosen(lines: list[bytes], header: bool, limits: list[int | None]) -> list[bytes]:
    """A random choice of the rows, in their order; all of them if no limit is smaller."""
    first, rows = (lines[:1], lines[1:]) if header else ([], lines)
    count = min([len(rows), *(limit for limit in limits if limit is not None)])
    kept = sorted(random.Random(SEED).sample(range(len(rows)), count))
    return first + [rows[place] for place in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("archive", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, help="at most so many rows in each file")
    given = parser.parse_args()
    unpack(given.archive, given.out, rows=given.rows)


if __name__ == "__main__":
    main()
