"""Plan a run before paying for it: memory, time and cost, without a GPU and without shards.

python -m trainer.plan --config run.yaml --gpus 8 [--nodes 4] [--card h100 | --memory 80GiB --tflops 450] [--price 2.5]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.console import complain, print_result
from trainer.engine.schedule import batch_of, batch_problems, resolve
from trainer.errors import PassingError, TrainerError, exit_code
from trainer.plan import report
from trainer.plan.cards import CARDS, Card, choose, read_rates
from trainer.plan.estimate import Hardware, Plan, make_plan, setting_of
from trainer.plan.lengths import Lengths, read_lengths
from trainer.plan.speed import assumed, read_network
from trainer.run.config import Config, load
from trainer.run.phases import misfits

LEAST, MOST = 1e-6, 1e9  # of a number in an option
UNITS = {"GiB": 1.0, "GB": 1e9 / 2**30, "MiB": 1 / 1024, "TiB": 1024.0}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    options = _parser().parse_args(arguments)
    try:
        for name, suffix in (("json", ".json"), ("picture", ".png")):
            if (path := getattr(options, name)) is not None:
                check_place(f"--{name}", path, suffix)
        config = load(options.config, options.set)
        setting, hardware = setting_of(config, options.gpus * options.nodes), _hardware(options)
        if setting.precision == "fp32" and options.tflops is None:
            raise TrainerError("this run computes in fp32, and the measured rates are for fp16 and bf16: give --tflops")
        plan = make_plan(config, setting, _data(config, setting.ranks), hardware)
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
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="GPUs of one node")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes (%(default)s)")
    parser.add_argument("--card", metavar="NAME", help="a card with measured rates, such as h100 or h200")
    parser.add_argument("--memory", type=_gib, metavar="SIZE", help="memory of a GPU, such as 80GiB")
    parser.add_argument("--tflops", type=_positive, metavar="X", help="TFLOP/s of forward and backward passes")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="more rates, from trainer.bench --write")
    parser.add_argument("--network", type=Path, metavar="FILE", help="from trainer.preflight --network --json")
    parser.add_argument("--price", type=_positive, metavar="X", help="price of one GPU for one hour")
    parser.add_argument("--failures", type=_positive, metavar="PER_GPU_DAY", help="failures per GPU and day")
    text = "time from a failure to the next step (%(default)g)"
    parser.add_argument("--restart", type=_positive, default=120.0, metavar="SECONDS", help=text)
    text = "rate at which all ranks together write a checkpoint (%(default)g)"
    parser.add_argument("--disk", type=_positive, default=1.0, metavar="GB/S", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan here")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also draw the memory by kind here")
    return parser


def _hardware(options: argparse.Namespace) -> Hardware:
    return Hardware(
        gpus=options.gpus,
        nodes=options.nodes,
        card=_card(options),
        network=assumed(options.gpus, options.nodes) if options.network is None else read_network(options.network),
        price=options.price,
        failures=options.failures,
        restart_seconds=options.restart,
        disk_bytes_per_second=1e9 * options.disk,
    )


def _card(options: argparse.Namespace) -> Card:
    """The card with measured rates, or the one that the options describe; they override what is measured."""
    if options.card is None and (options.memory is None or options.tflops is None):
        raise TrainerError("name a card with --card, or give both --memory and --tflops")
    if options.card is None and options.rates is not None:
        raise TrainerError("--rates is a table of cards: name one with --card")
    if options.card is None:
        return Card(f"GPU of {options.tflops:g} TFLOP/s", options.memory, (), options.tflops)
    more = [] if options.rates is None else read_rates(options.rates)
    names = {row.card for row in more}  # measured rates of the user replace ours
    found = choose([row for row in read_rates(CARDS) if row.card not in names] + more, options.card)
    return Card(found.name, options.memory or found.memory_gib, found.rates, options.tflops)


def _data(config: Config, ranks: int) -> list[Lengths]:
    """The lengths of each phase's samples. Raises TrainerError with every problem."""
    found, problems = [], []
    for number, phase in enumerate(config.phases):
        where = f"phases.{number}"
        try:
            lengths, manifest = read_lengths(phase.train, config.cache, config.run.timeout_seconds / 20)
        except PassingError:  # the rest would only wait for the same server
            raise
        except TrainerError as error:
            problems.append(f"{where}.train: {error}")
            continue
        problems += [f"{where}.train: {problem}" for problem in misfits(manifest, phase, config.model)]
        runs = resolve(phase, batch_of(phase, ranks)[0], lengths.samples)
        wrong = [*batch_problems(phase, ranks, lengths.samples), *runs.problems()]
        problems += [f"{where}.{problem}" for problem in wrong]
        found.append(lengths)
    if problems:
        raise TrainerError("; ".join(problems))
    return found


def _write(plan: Plan, options: argparse.Namespace) -> None:
    try:
        if options.json is not None:
            with replacing(options.json) as file:
                file.write((json.dumps(asdict(plan), indent=1) + "\n").encode())
        if options.picture is not None:
            report.draw(plan, options.picture)
    except OSError as error:
        raise TrainerError(f"{error.filename} cannot be written: {error.strerror}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number between 1 and {2**16:,}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} must be a number between {LEAST:f} and {MOST:,.0f}")
    return value


def _gib(text: str) -> float:
    match = re.fullmatch(r"([\d.]+) ?(GiB|GB|MiB|TiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} must be a size such as 80GiB")
    return _positive(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
