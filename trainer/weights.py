"""Write a checkpoint's weights as one file: ``python -m trainer.weights RUN_OR_CHECKPOINT OUT.safetensors``.

The safetensors file holds every parameter, unsharded, in fp32, under Lambert's own names; its metadata holds the
model's configuration and the tokenizer's sha256. It has no moments and no step. The command needs no engine and no
launcher. This is the command; the file is written and read by :mod:`trainer.convert.weights`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import SafetensorError

from data_prep.errors import DataError
from data_prep.options import CommandParser
from trainer.checkpoint.average import average, select, steps
from trainer.checkpoint.fetched import fetched
from trainer.checkpoint.reading import model_of
from trainer.checkpoint.trained_tokenizer import own_folder, recorded, tokenizer_of
from trainer.console import complain, print_result, teller
from trainer.convert.weights import require_new, write
from trainer.errors import TrainerError, exit_code
from trainer.options import CHECKPOINT, add_average, path_or_address


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(
        prog="python -m trainer.weights", description="Write a checkpoint's weights as one safetensors file."
    )
    parser.add_argument("checkpoint", type=path_or_address, help=CHECKPOINT)
    parser.add_argument("out", type=Path, help="the safetensors file to write; must not exist")
    add_average(parser)
    options = parser.parse_args(arguments)
    try:
        require_new(options.out)
        tell = teller("trainer.weights")
        checkpoints = select(fetched(options.checkpoint, tell, options.average), options.average, tell)
        weights, found = average(checkpoints), checkpoints[0]
        sha256 = tokenizer_of(found, tell)[1].sha256() if own_folder(found).is_dir() else recorded(found.record)
        write(weights, model_of(found), options.out, sha256)
        source = found.folder if len(checkpoints) == 1 else f"{steps(checkpoints)} of {found.folder.parent}"
        print_result(f"{options.out}: {source}")
    except (TrainerError, DataError, OSError, SafetensorError, MemoryError) as error:
        complain("trainer.weights", error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
