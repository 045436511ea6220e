"""Submits a run to Slurm or Kubernetes, after the planner's verdict and the checks that need no ranks.

python -m deploy.submit slurm --config run.yaml --nodes 4 --gpus 8 --card h100 [--dry-run] [-- SBATCH'S OPTIONS]
python -m deploy.submit kubernetes --config run.yaml --nodes 4 --gpus 8 --card h100 [--dry-run] [-- HELM'S OPTIONS]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.errors import DataError
from data_prep.options import CommandParser
from deploy.submit import kubernetes, slurm
from deploy.submit.order import Order, SubmitError, tell
from trainer.console import complain
from trainer.errors import TrainerError, exit_code
from trainer.exits import INTERRUPTED
from trainer.plan.options import add_hardware
from trainer.run.config import load_given

PROGRAM = "python -m deploy.submit"
QUEUES = {"slurm": slurm, "kubernetes": kubernetes}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, that of sbatch or helm if it failed, or 2 with one line."""
    words = sys.argv[1:] if arguments is None else arguments
    place = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:place])
    try:
        order = Order(options, *load_given(options.config, options.set), tuple(words[place + 1 :]))
        QUEUES[options.queue].submit(order)
    except KeyboardInterrupt:
        tell("interrupted: if the checks had finished, the run may have been submitted")
        return INTERRUPTED
    except SubmitError as error:
        complain("deploy.submit", error)
        return error.code
    except (DataError, TrainerError, OSError, MemoryError) as error:
        complain("deploy.submit", error)
        return exit_code(error)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog=PROGRAM, description=str(__doc__).split("\n")[0])
    queues = parser.add_subparsers(dest="queue", required=True, metavar="QUEUE")
    about = "run deploy/slurm/train.sbatch; words after -- are options of sbatch"
    _add_options(queues.add_parser("slurm", help=about, description=about))
    about = "install the chart deploy/helm/lambert; words after -- are options of helm install"
    pods = queues.add_parser("kubernetes", help=about, description=about)
    _add_options(pods)
    pods.add_argument("--namespace", metavar="NAME", help="namespace of the run")
    pods.add_argument("--kube-context", metavar="NAME", help="context of your kubeconfig")
    text = "local copy of what the pods see at /data, for the plan"
    pods.add_argument("--data", type=Path, metavar="FOLDER", help=text)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="check, and print what would be submitted")
    parser.add_argument("--no-plan", action="store_true", help="submit without asking the planner")
    add_hardware(parser)


if __name__ == "__main__":
    sys.exit(main())
