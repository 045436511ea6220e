"""Export a checkpoint as a Hugging Face BERT: ``python -m trainer.export --checkpoint RUN_OR_STEP --out FOLDER``.

The folder holds ``model.safetensors`` in fp32, ``config.json``, the tokenizer's own files, a model card and, with
``--onnx``, ``model.onnx``. ``transformers`` loads it as ``BertForPreTraining``, or as ``MegatronBertForPreTraining`` if
the model is pre-LN, with no missing and no unexpected name.
This is the command; the conversion and its check are in :mod:`trainer.convert.folder`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from data_prep.options import CommandParser
from data_prep.tokenizer import load_tokenizer
from trainer.checkpoint.average import average, select, steps
from trainer.checkpoint.fetched import fetched
from trainer.checkpoint.reading import model_of
from trainer.checkpoint.trained_tokenizer import tokenizer_of
from trainer.console import complain, print_result, teller
from trainer.convert import onnx
from trainer.convert.folder import LOGIT_TOLERANCE, random_batch, write_folder
from trainer.convert.model_card import write_card
from trainer.errors import TrainerError, exit_code
from trainer.options import CHECKPOINT, add_average, path_or_address
from trainer.store.objects import Objects

CONFIG = "config.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(prog="python -m trainer.export", description="Export a checkpoint as a Hugging Face BERT.")
    parser.add_argument("--checkpoint", required=True, type=path_or_address, help=CHECKPOINT)
    add_average(parser)
    parser.add_argument("--out", required=True, type=path_or_address, help="the new folder to write, or an address")
    parser.add_argument("--tokenizer", type=Path, help="by default the one stored in the run's folder")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the export with the checkpoint in transformers (on)",
    )
    tasks = " or ".join(onnx.OUTPUTS)
    parser.add_argument(
        "--onnx", nargs="?", const="fill-mask", choices=onnx.OUTPUTS, help=f"also write model.onnx, for {tasks}"
    )
    parser.add_argument("--license", help="for the model card, as Hugging Face spells it: apache-2.0")
    parser.add_argument("--language", help="for the model card, as Hugging Face spells it: en")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (TrainerError, OSError, SafetensorError, MemoryError) as error:
        complain("trainer.export", error)
        return exit_code(error)
    return 0


def _run(options: argparse.Namespace) -> None:
    if isinstance(options.out, Path):
        print_result(_export(options, options.out))
        return
    objects = Objects(options.out)
    if objects.names():
        raise TrainerError(f"{options.out} is not empty: name another address, or remove what is there")
    with TemporaryDirectory(prefix="lambert-") as above:
        folder = Path(above) / "model"
        text = _export(options, folder)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.name == CONFIG):  # last: without it there is no model
            objects.put(path, path.relative_to(folder).as_posix())
    print_result(text)


def _export(options: argparse.Namespace, out: Path) -> str:
    """Write the folder ``out``, and return what was written."""
    tell = teller("trainer.export")
    checkpoints = select(fetched(options.checkpoint, tell, options.average), options.average, tell)
    found = checkpoints[0]
    folder, tokenizer = tokenizer_of(found, tell, options.tokenizer)
    weights, model = average(checkpoints), model_of(found)
    said = [f"{options.out}: {steps(checkpoints)} of {found.folder.parent}"]

    def finish(folder: Path) -> None:
        write_card(folder, checkpoints, options.license, options.language)
        if options.onnx:
            fillers, batch = load_tokenizer(folder).fillers, random_batch(model, 0)
            worst = onnx.export_checked(weights, model, options.onnx, folder / "model.onnx", batch, fillers)
            said.append(
                f"onnxruntime's outputs of model.onnx differ from the checkpoint's by at most {worst:.1e} of the "
                f"largest; {onnx.TOLERANCE:.0e} is allowed"
            )

    worst = write_folder(weights, model, folder, out, options.check, finish, tokenizer.sha256())
    if worst is not None:
        said.append(
            "transformers finds every name, and its logits differ from the checkpoint's by at most "
            f"{worst.mlm:.1e} (MLM) and {worst.nsp:.1e} (NSP) of the largest; {LOGIT_TOLERANCE:.0e} is allowed"
        )
    return "\n".join(said)


if __name__ == "__main__":
    sys.exit(main())
