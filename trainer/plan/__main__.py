"""Plan a run before paying for it: memory, time and cost, without a GPU and without shards.

python -m trainer.plan --config run.yaml --gpus 8 [--nodes 4] [--card h100 | --memory 80GiB --tflops 450] [--price 2.5]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.console import complain, print_result
from trainer.errors import TrainerError, exit_code
from trainer.plan import report
from trainer.plan.estimate import Plan
from trainer.plan.options import add_hardware, hardware_of, plan_of
from trainer.run.config import load


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    options = _parser().parse_args(arguments)
    try:
        for name, suffix in (("json", ".json"), ("picture", ".png")):
            if (path := getattr(options, name)) is not None:
                check_place(f"--{name}", path, suffix)
        config = load(options.config, options.set)
        hardware = hardware_of(options)
        plan = plan_of(config, hardware)
        print_result("\n".join(report.lines(plan, config, hardware)))
        _write(plan, options)
    except (DataError, TrainerError) as error:
        complain("trainer.plan", error)
        return exit_code(error)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m trainer.plan", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    add_hardware(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan here")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also draw the memory by kind here")
    return parser


def _write(plan: Plan, options: argparse.Namespace) -> None:
    try:
        if options.json is not None:
            with replacing(options.json) as file:
                file.write((json.dumps(asdict(plan), indent=1) + "\n").encode())
        if options.picture is not None:
            report.draw(plan, options.picture)
    except OSError as error:
        raise TrainerError(f"{error.filename} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
