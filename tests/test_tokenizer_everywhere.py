"""A text has the same ids wherever it is tokenized: in the shards, by every command, and by `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_prep.build import build
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.settings import make_settings
from data_prep.tokenizer import load_tokenizer
from data_prep.verify import verify
from data_prep.vocab import learn_tokenizer
from tests.helpers.corpora import read_samples, write_tokenizer
from trainer.convert.folder import write_folder
from trainer.convert.weights import load_bert
from trainer.encode.__main__ import to_examples
from trainer.encode.vectors import Text
from trainer.finetune.pretrained import read_pretrained
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow

TEXTS = [
    "glad\u200bworld d😊e.",
    "one\x02two\x85three\x1ffour\x0bfive\x9dsix",
    "x≤y→z ❤\ufe0fok a👩🏽\u200d💻b 🇩🇪🇫🇷🇬 1\ufe0f\u20e3",
    "soft\u00adhyphen café cafe\u0301 \ufeffmark \ufffd می\u200cخواهم",
    "東京★タワー━東\u3000京\u2028ok",
]
PIECES = [*"abcdefghijklmnopqrstuvwxyz.", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), "glad", "world"]


@pytest.fixture(params=["learnt", "keeps accents", "cased", "published"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A sample for each of TEXTS, with a vocabulary of ours, or one that knows nothing of our cleaning."""
    corpus, tokenizer = tmp_path / "corpus.txt", tmp_path / "tokenizer"
    corpus.write_text("\n\n".join(TEXTS), "utf-8")
    if request.param == "published":
        write_tokenizer(tokenizer, PIECES)
    else:
        cased, kept = request.param == "cased", request.param == "keeps accents"
        learn_tokenizer(TEXTS, 150, cased, keep_accents=kept).tokenizer.save(tokenizer)
    settings = make_settings(200, pairs="single", short_sequence_rate=0.0)
    build([corpus], tokenizer, tmp_path / "shards", settings, processes=1)
    return tmp_path / "shards"


def test_all_give_the_ids_of_the_shards(shards: Path, tmp_path: Path) -> None:
    assert verify(shards, full=True) == []
    trained = {tuple(sample.ids.tolist()) for sample in read_samples(shards)}
    assert len(trained) == len(TEXTS)
    size = load_tokenizer(shards / TOKENIZER_FOLDER).vocab_size
    model = ModelConfig(layers=1, hidden=16, heads=2, intermediate=16, max_positions=200, vocab_size=size)
    write_folder(Bert(model).state_dict(), model, shards / TOKENIZER_FOLDER, tmp_path / "export")

    theirs = AutoTokenizer.from_pretrained(tmp_path / "export", local_files_only=True)
    assert {tuple(theirs(text)["input_ids"]) for text in TEXTS} == trained
    assert theirs.mask_token_id == 4 and theirs.model_max_length == 200 and len(theirs) == size
    pair = theirs(*TEXTS[:2])
    assert pair["token_type_ids"].index(1) == len(theirs(TEXTS[0])["input_ids"])

    _, folder, _ = load_bert(tmp_path / "export")
    texts = [Text("here", text, None, None) for text in TEXTS]
    assert {example.tokens for example, _ in to_examples(texts, load_tokenizer(folder), 200, False)} == trained

    given = read_pretrained(tmp_path / "export", None, lambda text: None)
    found = [given.tokenizer.encoder.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert {(2, *ids, 3) for ids in found} == trained
