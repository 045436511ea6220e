"""BERT's WordPiece tokenizer: train it, load it, write it for `transformers`.

The text is cleaned as BERT cleans it: control and zero-width characters vanish (and join what they part),
Chinese characters stand alone, a word with a character outside the vocabulary becomes [UNK] as a whole.
The encoder here knows no added tokens, so "[MASK]" written in a text is three pieces, never the control id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Encoder

from data_prep.atomic import replacing
from data_prep.errors import DataError

PIECES, WHOLE, SETTINGS = TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUING = "##"
LARGEST_ALPHABET = 1_000  # characters; rarer ones become [UNK]
LARGEST_VOCABULARY = 1_000_000  # pieces; the largest of a published BERT, LaBSE, is half of it
LARGEST_MULTIPLE = 65_536  # no matrix product asks for more
MANIFESTS, RESTORE = "the manifest's tokenizer", "restore it, or build the shards again"
BATCH = 128  # sentences encoded at once
UNUSED = re.compile(r"\[unused\d+\]")  # pieces that only fill up a vocabulary, as Google published BERT with
MODEL: dict[
    str, Any
] = {  # what `transformers` takes for granted; these decide ids too, and the hash need not name them
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": CONTINUING,
    "max_input_chars_per_word": 100,
}
CLEANERS = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}  # `words.py` relies on them
CLEANING = {  # names in tokenizer_config.json, and in the BertNormalizer of tokenizer.json
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
DEFAULTS = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": True,
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "model_max_length": 512,
} | {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the control tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with its cleaning; ``settings`` is its ``tokenizer_config.json``."""

    encoder: Encoder
    pieces: list[str]  # the vocabulary in the order of its ids
    specials: SpecialIds
    settings: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""
        return len(self.pieces)

    @property
    def never(self) -> list[int]:
        """Ids that are never predicted and never a random replacement: control tokens, [UNK] and [unusedN]."""
        unused = [i for i, piece in enumerate(self.pieces) if piece[:1] == "[" and UNUSED.fullmatch(piece)]
        return sorted({*astuple(self.specials), *unused})

    def sha256(self) -> str:
        """Of what decides the ids: the vocabulary and the cleaning, not the layout of a file."""
        cleaning = (self.encoder.normalizer, self.encoder.pre_tokenizer)
        identity = [self.pieces, *(json.loads(part.__getstate__()) for part in cleaning)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def encode(self, sentences: list[str]) -> Iterator[list[int]]:
        """The ids of each sentence, without control tokens; empty for a sentence without visible text."""
        for start in range(0, len(sentences), BATCH):
            batch = self.encoder.encode_batch_fast(sentences[start : start + BATCH], add_special_tokens=False)
            yield from (encoding.ids for encoding in batch)

    def files(self) -> dict[str, bytes]:
        """What `transformers` loads, by name: vocab.txt, tokenizer.json and tokenizer_config.json."""
        published = Encoder(self.encoder.model)
        published.normalizer, published.pre_tokenizer = self.encoder.normalizer, self.encoder.pre_tokenizer
        published.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
        published.post_processor = processors.BertProcessing(("[SEP]", self.specials.sep), ("[CLS]", self.specials.cls))
        published.decoder = decoders.WordPiece(CONTINUING)
        contents = {
            PIECES: "\n".join(self.pieces),
            WHOLE: published.to_str(pretty=True),
            SETTINGS: json.dumps(self.settings, indent=2, sort_keys=True),
        }
        return {name: content.encode() + b"\n" for name, content in contents.items()}

    def save(self, folder: Path) -> None:
        """Writes `files`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            with replacing(folder / name) as file:
                file.write(content)


def load_tokenizer(folder: Path) -> Tokenizer:
    """A WordPiece tokenizer from ``tokenizer.json``, or from ``vocab.txt`` as Google published BERT.

    Raises DataError when neither is there or readable, or when a control token is missing.
    """
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; `python -m data_prep vocab` makes one")
    config, whole, vocabulary = (folder / name for name in (SETTINGS, WHOLE, PIECES))
    settings = DEFAULTS | (_read_object(config) if config.exists() else {})
    if whole.exists():
        encoder, cleaning = _read_encoder(whole)
        settings |= cleaning
    elif vocabulary.exists():
        try:
            encoder = _bert_encoder(_lines_of(vocabulary), settings)
        except TypeError as error:  # a setting that is no true or false
            raise DataError(f"tokenizer in {folder}: a wrong setting ({error})") from None
    else:
        raise DataError(f"tokenizer folder {folder} holds neither tokenizer.json nor vocab.txt")
    vocab = encoder.get_vocab()
    missing = [name for name in SPECIALS if name not in vocab]
    if missing:
        raise DataError(f"tokenizer in {folder}: the vocabulary lacks {' '.join(missing)}")
    specials = SpecialIds(*(vocab[name] for name in SPECIALS))
    if len(vocab) != max(vocab.values()) + 1:
        raise DataError(f"tokenizer in {folder}: the vocabulary has repeated pieces or gaps between its ids")
    control = {vocab[name] for name in SPECIALS if name != "[UNK]"}
    for name in SPECIALS:
        if control.intersection(encoder.encode(name, add_special_tokens=False).ids):
            raise DataError(f"tokenizer in {folder}: {name} written in a text would become the control token")
    return Tokenizer(encoder, sorted(vocab, key=vocab.__getitem__), specials, settings)


def load_proven(folder: Path, sha256: str, whose: str = MANIFESTS, remedy: str = RESTORE) -> Tokenizer:
    """Load a tokenizer and prove that it is the one whose `Tokenizer.sha256` is on record.

    Every reader of a data set or a run loads its tokenizer here: another one of the same size gives every id another
    meaning, and nothing else would notice. The files that only `transformers` reads must agree with tokenizer.json.

    Raises DataError as `load_tokenizer` does, and for another tokenizer; each ends with the ``remedy``.
    """
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist: {remedy}")
    try:
        loaded = load_tokenizer(folder)
        require_sha256(loaded, sha256, folder, whose)
        if (folder / WHOLE).exists():
            _require_agreement(folder, loaded)
    except DataError as error:
        raise DataError(f"{error}: {remedy}") from None
    return loaded


def require_sha256(tokenizer: Tokenizer, sha256: str, folder: Path, whose: str = MANIFESTS) -> None:
    """Raises DataError if the tokenizer of ``folder`` is not the one whose `Tokenizer.sha256` is on record."""
    if tokenizer.sha256() != sha256:
        raise DataError(f"{folder} is not {whose} (its sha256 differs)")


def _require_agreement(folder: Path, tokenizer: Tokenizer) -> None:
    if (folder / PIECES).exists() and _lines_of(folder / PIECES) != tokenizer.pieces:
        raise DataError(f"{folder / PIECES} has other pieces than {WHOLE} beside it")
    said = DEFAULTS | _read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else tokenizer.settings
    for name in CLEANING:
        there, here = json.dumps(said[name]), json.dumps(tokenizer.settings[name])
        if there != here:
            raise DataError(f"{folder / SETTINGS} has {name} {there}, {WHOLE} beside it has {here}")


@lru_cache(1)
def load_once(folder: Path, sha256: str) -> Tokenizer:
    """`load_proven`, once in a process: workers come for each task to a build's own copy."""
    return load_proven(folder, sha256, "the tokenizer that the build began with", "leave it alone, and build again")


def train_tokenizer(paragraphs: Iterable[str], size: int, cased: bool, multiple_of: int = 1) -> Tokenizer:
    """Learns a vocabulary of at most ``size`` pieces; the same text gives the same vocabulary.

    It is filled up with [unused0], [unused1], ... to a size that is a multiple of ``multiple_of`` (matrix products
    are fastest for multiples of 8 to 64); these never stand in a text and are never predicted.

    `tokenizers` numbers the characters in the order of a hash table, which differs from run to run, and
    breaks ties by these numbers. So they are given to it in a fixed order, as if they were special.
    """
    settings = DEFAULTS | {"do_lower_case": not cased}
    encoder = _bert_encoder(list(SPECIALS), settings)
    words = _count_words(encoder, paragraphs)
    alphabet, pieces = _alphabet(words)
    if not words:
        raise DataError("no text found to learn a vocabulary from")
    if len(SPECIALS) + len(pieces) > size:
        needed = len(SPECIALS) + len(pieces)
        raise DataError(f"--size {size} is too small: the characters alone need {needed}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIALS, *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    encoder.train_from_iterator(_repeated(words), trainer)
    vocab = encoder.get_vocab()
    learnt = sorted(vocab, key=vocab.__getitem__)
    learnt += [f"[unused{i}]" for i in range(-len(learnt) % multiple_of)]
    encoder = _bert_encoder(learnt, settings)
    return Tokenizer(encoder, learnt, SpecialIds(*range(len(SPECIALS))), settings)


def _count_words(encoder: Encoder, paragraphs: Iterable[str]) -> Counter[str]:
    words: Counter[str] = Counter()
    for paragraph in paragraphs:
        clean = encoder.normalizer.normalize_str(paragraph)
        words.update(word for word, _ in encoder.pre_tokenizer.pre_tokenize_str(clean))
    return words


def _alphabet(words: Counter[str]) -> tuple[list[str], list[str]]:
    """The most frequent characters, and the pieces they occur as: ``c`` first in a word, ``##c`` after."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    kept = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:LARGEST_ALPHABET]
    following = {character for word in words for character in word[1:]}.intersection(kept)
    return sorted(kept), sorted(kept) + [CONTINUING + character for character in sorted(following)]


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Each word as often as it was counted: the trainer takes texts, not counts."""
    for word, count in words.items():
        for start in range(0, count, BATCH):
            yield " ".join([word] * min(BATCH, count - start))


def _bert_encoder(pieces: list[str], settings: dict[str, Any]) -> Encoder:
    vocab = {piece: number for number, piece in enumerate(pieces)}
    encoder = Encoder(models.WordPiece(vocab, unk_token="[UNK]", continuing_subword_prefix=CONTINUING))
    encoder.normalizer = normalizers.BertNormalizer(**{ours: settings[theirs] for theirs, ours in CLEANING.items()})
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return encoder


def _read_encoder(path: Path) -> tuple[Encoder, dict[str, Any]]:
    """Without its added tokens; and the settings that its cleaning amounts to, whatever the config beside it says."""
    parts = _read_object(path)
    model = parts.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path} is no tokenizer of the `tokenizers` library")
    for name, wanted in MODEL.items():
        found = model.get(name, "WordPiece" if name == "type" else None)  # files of 2020 do not say their type
        if found != wanted:
            raise DataError(f"{path}: wanted a model of {name} {wanted}, found {found}")
    for part, wanted in CLEANERS.items():
        given = parts.get(part)
        found = given.get("type") if isinstance(given, dict) else repr(given)
        if found != wanted:
            raise DataError(f"{path}: wanted a {part} of type {wanted}, BERT's own, found {found}")
    bare: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    bare["model"] = model | {"vocab": {"[UNK]": 0}}  # the library reads a large one slowly
    try:
        encoder = Encoder.from_str(json.dumps(parts | bare))
        encoder.model = models.WordPiece(model["vocab"], unk_token="[UNK]", continuing_subword_prefix=CONTINUING)
    except Exception as error:  # `tokenizers` raises nothing narrower
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is no tokenizer of the `tokenizers` library ({reason})") from None
    normalizer = parts["normalizer"]
    return encoder, {theirs: normalizer[ours] for theirs, ours in CLEANING.items() if ours in normalizer}


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").rstrip("\n").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error})") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: wanted an object, found {type(value).__name__}")
    return value
