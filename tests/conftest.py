"""Fixtures that tests share: repeatable draws, a small data set of real shards, and a model that fits it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, so set before the imports below
from hypothesis import settings

from data_prep.build import build
from data_prep.draws import bits
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from data_prep.vocab import train_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.file_server import Server
from tests.helpers.gpu_turns import turn
from trainer.data import remote
from trainer.model.bert import ModelConfig

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te")
SEQUENCE_LENGTH = 32

# A shell starts a command in the background with SIGINT ignored, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("lambert", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("lambert")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seed the global generator, so that a test does not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gpu_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share the GPU with the tests of other processes, or have it alone for a test marked ``whole_gpu``."""
    alone = request.node.get_closest_marker("whole_gpu") is not None
    if not torch.cuda.is_available() or not (alone or request.node.get_closest_marker("gpu")):
        yield
        return
    folder = Path(tempfile.gettempdir()) / f"lambert-gpu-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with turn(folder, alone):
        yield
        torch.cuda.empty_cache()  # what PyTorch keeps for the next test is not free for other processes


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of some 300 samples of up to 32 tokens in shards of 64. Read only: see ``own_shards``."""
    folder = tmp_path_factory.mktemp("tiny")
    documents = [_document(number) for number in range(36)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    train_tokenizer(documents, 120, cased=False).save(folder / "tokenizer")
    made = make_settings(SEQUENCE_LENGTH, samples_per_shard=64)
    build([folder / "corpus.txt"], folder / "tokenizer", folder / "shards", made, processes=1)
    return folder / "shards"


@pytest.fixture
def own_shards(tiny_shards: Path, tmp_path: Path) -> Path:
    """A copy of ``tiny_shards`` that a test may damage."""
    return Path(shutil.copytree(tiny_shards, tmp_path / "shards"))


@pytest.fixture(scope="session")
def five_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of five shards, the first four of 14 samples; no word occurs twice. Read only: see ``own_five``."""
    folder = tmp_path_factory.mktemp("five")
    text, tokenizer = write_corpus(folder, [20] * 10, 8)
    build([text], tokenizer, folder / "out", make_settings(32, samples_per_shard=14), 1)
    return folder / "out"


@pytest.fixture
def own_five(five_shards: Path, tmp_path: Path) -> Path:
    """A copy of ``five_shards`` that a test may damage."""
    return Path(shutil.copytree(five_shards, tmp_path / "shards"))


@pytest.fixture
def server(own_shards: Path) -> Iterator[Server]:
    """``own_shards`` over HTTP, until the test ends."""
    running = Server(own_shards)
    yield running
    running.stop()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The path of a cache for remote shards; nothing is there yet."""
    return tmp_path / "cache"


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed fetches at once."""
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01, 0.01))


@pytest.fixture(scope="session")
def tiny_model(tiny_shards: Path) -> ModelConfig:
    """The smallest BERT that fits ``tiny_shards``, with dropout."""
    vocab_size = load_manifest(tiny_shards).tokenizer.vocab_size
    return ModelConfig(
        layers=1, hidden=16, heads=2, intermediate=32, max_positions=SEQUENCE_LENGTH, vocab_size=vocab_size
    )


def _document(number: int) -> str:
    """A document of two-syllable words, a sentence per line; each word depends only on its place."""
    sentences = []
    for line in range(18):
        draws = bits(11, number, line, np.arange(25))
        first, second = draws % 12, (draws >> np.uint64(8)) % 12
        words = [SYLLABLES[a] + SYLLABLES[b] for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        sentences.append(" ".join(words[1 : 4 + int(draws[0] % 9)]) + ".")
    return "\n".join(sentences)
