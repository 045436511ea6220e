"""A fresh start: the model that a run without a checkpoint begins with."""

from __future__ import annotations

from pathlib import Path

from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer import load_proven
from trainer.checkpoint.trained_tokenizer import token_counts
from trainer.console import Tell
from trainer.convert.weights import start_from
from trainer.data.loader import Loader
from trainer.engine.optimizer import LambertOptimizer
from trainer.errors import TrainerError
from trainer.model.bert import Bert
from trainer.run.phases import Plan


def build_model(plan: Plan) -> Bert:
    """Build the model with random weights and ``model.decoder_prior``. A checkpoint or ``run.weights`` replace them."""
    model, first = plan.config.model, plan.phases[0].loader
    module = Bert(model, plan.config.run.seed, _fillers(first))
    if model.decoder_prior == "unigram":
        module.set_decoder_prior(token_counts(first.folder, first.manifest))
    return module


def start(plan: Plan, optimizer: LambertOptimizer, tell: Tell) -> None:
    """Fill the masters from ``run.weights`` if it is set; report where the run starts."""
    run = plan.config.run
    source = f"the seed {run.seed}"
    if run.weights is not None:
        tokenizer = plan.phases[0].loader.folder / TOKENIZER_FOLDER
        start_from(Path(run.weights), plan.config.model, optimizer, tell, tokenizer)
        source = run.weights
    tell(f"no checkpoint in {run.folder}: a fresh start from {source}")


def _fillers(loader: Loader) -> int:
    """Count the padding entries at the end of the shards' vocabulary. Raises TrainerError if the tokenizer differs."""
    try:
        return load_proven(loader.folder / TOKENIZER_FOLDER, loader.manifest.tokenizer.sha256).fillers
    except DataError as error:
        raise TrainerError(str(error)) from None
