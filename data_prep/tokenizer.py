"""BERT's WordPiece tokenizer: loads it, cleans and encodes text with it, and saves it for `transformers`.

Every tokenizer that is trained here or saved by a build includes the cleaning of `cleaning.py`. It is in
tokenizer.json, before BERT's own cleaning, so any program that loads that file produces the ids that the model was
trained on. The tokenizer of a published BERT lacks it, and is used unchanged until a build adds it.

BERT's own cleaning separates Chinese characters, and a word with a character outside the vocabulary becomes a single
[UNK]. "[MASK]" written in a text is three pieces, never the control id. Tokens that were added in `transformers`, for
example "[E1]", keep their ids and are found in a text before it is cleaned and split.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Encoder

from data_prep.atomic import replacing
from data_prep.cleaning import CONTROLS, SYMBOLS
from data_prep.errors import DataError
from data_prep.json_text import read_json, read_text

PIECES, TOKENIZER_JSON, SETTINGS = TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
MOST_PIECES = 2**21  # limit for any vocabulary; `vocab` makes at most half as many
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUING = "##"
MANIFESTS, RESTORE = "the manifest's tokenizer", "restore it, or build the shards again"
ENCODING_BATCH = 128  # sentences encoded at once
UNUSED = re.compile(r"\[unused\d+\]")  # pieces that only pad a vocabulary, as in the BERT that Google published
WORDPIECE_MODEL: dict[
    str, Any
] = {  # what `transformers` takes for granted; these also decide ids, and the hash need not include them
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": CONTINUING,
    "max_input_chars_per_word": 100,
}
CLEANERS = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}  # `words.py` relies on them
OURS: dict[str, tuple[str, Any]] = {  # the list in tokenizer.json that they end, and our own entry at its start
    "normalizer": ("normalizers", {"type": "Replace", "pattern": {"Regex": CONTROLS}, "content": " "}),
    "pre_tokenizer": (
        "pretokenizers",
        {"type": "Split", "pattern": {"Regex": SYMBOLS}, "behavior": "Isolated", "invert": False},
    ),
}
CLEANING = {  # names in tokenizer_config.json -> in the BertNormalizer of tokenizer.json
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
DEFAULT_SETTINGS = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": True,
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "model_max_length": 512,
} | {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}

# `transformers` rebuilds a BertTokenizer from its vocabulary and would drop our cleaning. For this class it uses
# tokenizer.json unchanged, but returns no token_type_ids unless they are listed.
KEEPS_CLEANING = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
}


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # flags of an added token that decide where it is found
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")  # they split text in the same way
CUTTING = {  # settings that decide ids in transformers' slow tokenizers, and their values in BERT
    "do_basic_tokenize": (None, True),
    "never_split": (None, []),
    "word_tokenizer_type": (None, "basic"),
    "subword_tokenizer_type": (None, "wordpiece"),
}


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
    """A vocabulary with its cleaning; ``settings`` is the content of ``tokenizer_config.json``."""

    encoder: Encoder
    pieces: list[str]  # the vocabulary in the order of its ids
    specials: SpecialIds
    settings: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """The number of ids, 0..vocab_size-1."""
        return len(self.pieces)

    @property
    def strips_accents(self) -> bool:
        """Whether combining marks are removed from letters; by default, this follows lower-casing."""
        chosen = self.settings["strip_accents"]
        return bool(self.settings["do_lower_case"] if chosen is None else chosen)

    @property
    def never(self) -> list[int]:
        """Ids that are never predicted and never a random replacement: control tokens, [UNK] and [unusedN]."""
        unused = [i for i, piece in enumerate(self.pieces) if piece[:1] == "[" and UNUSED.fullmatch(piece)]
        return sorted({*astuple(self.specials), *unused})

    @property
    def fillers(self) -> int:
        """The number of [unusedN] at the end of the vocabulary: they pad it, and a model gives them no probability."""
        return next((n for n, piece in enumerate(reversed(self.pieces)) if not UNUSED.fullmatch(piece)), 0)

    @property
    def added(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before it is split, by id: those added by `add_tokens` of `transformers`."""
        return dict(sorted(self.encoder.get_added_tokens_decoder().items()))

    def sha256(self) -> str:
        """The hash of everything that decides the ids: the vocabulary and the cleaning, not the layout of a file."""
        cleaning = (self.encoder.normalizer, self.encoder.pre_tokenizer)
        identity = [self.pieces, *(json.loads(part.__getstate__()) for part in cleaning)]
        identity += [[i, *(getattr(token, flag) for flag in FLAGS)] for i, token in self.added.items()]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def with_cleaning(self) -> Tokenizer:
        """The same vocabulary, with the build's own cleaning before BERT's."""
        encoder = Encoder(self.encoder.model)
        settings = _last("normalizer", json.loads(self.encoder.normalizer.__getstate__()))
        bert = normalizers.BertNormalizer(**{name: value for name, value in settings.items() if name != "type"})
        encoder.normalizer = normalizers.Sequence([normalizers.Replace(Regex(CONTROLS), " "), bert])
        symbols = pre_tokenizers.Split(Regex(SYMBOLS), "isolated")
        encoder.pre_tokenizer = pre_tokenizers.Sequence([symbols, pre_tokenizers.BertPreTokenizer()])
        for token in self.added.values():
            encoder.add_tokens([token])
        return replace(self, encoder=encoder, settings=self.settings | KEEPS_CLEANING)

    def encode(self, sentences: list[str]) -> Iterator[list[int]]:
        """The ids of each sentence, without control tokens; empty for a sentence without visible text."""
        for start in range(0, len(sentences), ENCODING_BATCH):
            batch = self.encoder.encode_batch_fast(sentences[start : start + ENCODING_BATCH], add_special_tokens=False)
            yield from (encoding.ids for encoding in batch)

    def files(self) -> dict[str, bytes]:
        """The files that `transformers` loads, by name: vocab.txt, tokenizer.json and tokenizer_config.json."""
        published = Encoder(self.encoder.model)
        published.normalizer, published.pre_tokenizer = self.encoder.normalizer, self.encoder.pre_tokenizer
        published.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
        for token in self.added.values():
            published.add_tokens([token])
        published.post_processor = processors.BertProcessing(("[SEP]", self.specials.sep), ("[CLS]", self.specials.cls))
        published.decoder = decoders.WordPiece(CONTINUING)
        contents = {
            PIECES: "\n".join(self.pieces),
            TOKENIZER_JSON: published.to_str(pretty=True),
            SETTINGS: json.dumps(self.settings, indent=2, sort_keys=True),
        }
        return {name: content.encode() + b"\n" for name, content in contents.items()}

    def save(self, folder: Path) -> None:
        """Writes `files` to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            with replacing(folder / name) as file:
                file.write(content)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads a WordPiece tokenizer from ``tokenizer.json``, or from ``vocab.txt`` as in Google's BERT.

    Raises DataError if neither file exists and is readable, if a control token is missing, or if an added token has an
    id that is not possible here.
    """
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; `python -m data_prep vocab` makes one")
    config, whole, vocabulary = (folder / name for name in (SETTINGS, TOKENIZER_JSON, PIECES))
    settings = DEFAULT_SETTINGS | (_read_object(config) if config.exists() else {})
    if whole.exists():
        parts = _read_object(whole)
        encoder, cleaning = _read_encoder(whole, parts)
        settings |= cleaning
    elif vocabulary.exists():
        parts = {}
        _require_bert(folder, settings)
        try:
            encoder = bert_encoder(_lines_of(vocabulary), settings)
        except TypeError as error:  # a setting that is neither true nor false
            raise DataError(f"tokenizer in {folder}: a wrong setting ({error})") from None
    else:
        raise DataError(f"tokenizer folder {folder} holds neither tokenizer.json nor vocab.txt")
    vocab = encoder.get_vocab()
    _require_ids(folder, vocab)
    specials = SpecialIds(*(vocab[name] for name in SPECIALS))
    for number, token in _added_tokens(folder, parts, settings, vocab):
        _add(encoder, number, token, folder)
    vocab = encoder.get_vocab()
    control = {vocab[name] for name in SPECIALS if name != "[UNK]"}
    for name in SPECIALS:
        if control.intersection(encoder.encode(name, add_special_tokens=False).ids):
            raise DataError(f"tokenizer in {folder}: {name} written in a text would become the control token")
    return Tokenizer(encoder, sorted(vocab, key=vocab.__getitem__), specials, settings)


def _require_ids(folder: Path, vocab: dict[str, int]) -> None:
    missing = [name for name in SPECIALS if name not in vocab]
    if missing:
        raise DataError(f"tokenizer in {folder}: the vocabulary lacks {' '.join(missing)}")
    if len(vocab) > MOST_PIECES:
        found = f"the vocabulary has {len(vocab):,} pieces"
        raise DataError(f"tokenizer in {folder}: {found}: must be {MOST_PIECES:,} or fewer")
    if len(vocab) != max(vocab.values()) + 1:
        raise DataError(f"tokenizer in {folder}: the vocabulary has repeated pieces or gaps between its ids")


def load_proven(folder: Path, sha256: str, whose: str = MANIFESTS, remedy: str = RESTORE) -> Tokenizer:
    """Load a tokenizer and verify that it is the one whose `Tokenizer.sha256` is on record.

    Every reader of a data set or a run loads its tokenizer here. A different one of the same size would change the
    meaning of every id, and nothing else would notice. The files only for `transformers` must match tokenizer.json.

    Raises DataError as `load_tokenizer` does, and for a different tokenizer; each message ends with the ``remedy``.
    """
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist: {remedy}")
    try:
        loaded = load_tokenizer(folder)
        require_sha256(loaded, sha256, folder, whose)
        if (folder / TOKENIZER_JSON).exists():
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
        raise DataError(f"{folder / PIECES} has other pieces than {TOKENIZER_JSON} next to it")
    said = DEFAULT_SETTINGS | _read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else tokenizer.settings
    for name in CLEANING:
        there, here = json.dumps(said[name]), json.dumps(tokenizer.settings[name])
        if there != here:
            raise DataError(f"{folder / SETTINGS} has {name} {there}, {TOKENIZER_JSON} next to it has {here}")


@lru_cache(1)
def load_once(folder: Path, sha256: str) -> Tokenizer:
    """`load_proven` with a cache per process: workers load the build's own copy for each task."""
    return load_proven(folder, sha256, "the tokenizer that the build began with", "leave it alone, and build again")


def bert_encoder(pieces: list[str], settings: dict[str, Any]) -> Encoder:
    """The library's BERT tokenizer, with only BERT's own cleaning."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    encoder = Encoder(models.WordPiece(vocab, unk_token="[UNK]", continuing_subword_prefix=CONTINUING))
    encoder.normalizer = normalizers.BertNormalizer(**{ours: settings[theirs] for theirs, ours in CLEANING.items()})
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return encoder


def _require_bert(folder: Path, settings: dict[str, Any]) -> None:
    """Raises DataError if the folder's ``vocab.txt`` is for a tokenizer that splits text differently from BERT's."""
    config = folder / "config.json"
    of_model = _read_object(config).get("tokenizer_class") if config.exists() else None
    if settings["tokenizer_class"] == KEEPS_CLEANING["tokenizer_class"]:
        raise DataError(f"tokenizer in {folder}: tokenizer.json is missing, and it defines the cleaning; copy it again")
    for kind in (of_model, settings["tokenizer_class"]):
        if kind is not None and str(kind).removesuffix("Fast") not in BERT_CLASSES:
            raise DataError(f"tokenizer in {folder}: tokenizer_class is {kind}, which does not split text as BERT does")
    for name, allowed in CUTTING.items():
        if settings.get(name) not in allowed:
            raise DataError(f"tokenizer in {folder}: {name} is {settings[name]!r}; only {allowed[1]!r} is supported")


def _added_tokens(
    folder: Path, parts: dict[str, Any], settings: dict[str, Any], vocab: dict[str, int]
) -> list[tuple[int, AddedToken]]:
    """Tokens that were added to the vocabulary, by id, except control tokens; from every place that may list them.

    The places are tokenizer.json, `added_tokens_decoder` in tokenizer_config.json and, in older versions,
    added_tokens.json, or only the names of the special tokens.
    """
    beside, names = folder / "added_tokens.json", folder / "special_tokens_map.json"
    found: dict[str, tuple[int, AddedToken]] = {}
    try:
        special: list[Any] = []  # their names, or objects that contain the names
        for source in (settings, _read_object(names) if names.exists() else {}):
            more = source.get("additional_special_tokens") or source.get("extra_special_tokens") or ()
            special += more.values() if isinstance(more, dict) else more
        listed = [(entry["id"], entry) for entry in parts.get("added_tokens") or ()]
        listed += [(int(number), entry) for number, entry in (settings.get("added_tokens_decoder") or {}).items()]
        for name, number in (_read_object(beside) if beside.exists() else {}).items():
            listed.append((number, {"content": name, "special": name in special}))
        listed += [(None, entry if isinstance(entry, dict) else {"content": entry}) for entry in special]
        for number, entry in listed:
            name, is_special = entry["content"], bool(entry.get("special", number is None))
            if name not in SPECIALS and name not in found:
                flags = {flag: bool(entry.get(flag, flag == "normalized" and not is_special)) for flag in FLAGS}
                end = max([*vocab.values(), *(each for each, _ in found.values())]) + 1
                where = vocab.get(name, end) if number is None else int(number)
                found[name] = (where, AddedToken(name, special=is_special, **flags))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"tokenizer in {folder}: its added tokens cannot be read ({error!r})") from None
    return sorted(found.values(), key=lambda pair: pair[0])


def _add(encoder: Encoder, number: int, token: AddedToken, folder: Path) -> None:
    encoder.add_tokens([token])
    if encoder.token_to_id(token.content) != number:
        raise DataError(
            f"tokenizer in {folder}: the added token {token.content!r} has id {number}, which is not its id in the "
            "vocabulary, nor the next one after it: save the tokenizer again with tokens added in order"
        )


def _read_encoder(path: Path, parts: dict[str, Any]) -> tuple[Encoder, dict[str, Any]]:
    """The encoder without its added tokens, and the settings implied by its cleaning, whatever the config file says."""
    model = parts.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path} is not a tokenizer of the `tokenizers` library")
    for name, wanted in WORDPIECE_MODEL.items():
        found = model.get(name, "WordPiece" if name == "type" else None)  # files of 2020 do not state their type
        if found != wanted:
            raise DataError(f"{path}: wanted a model of {name} {wanted}, found {found!s:.80}")
    bert = {part: _last(part, parts.get(part)) for part in CLEANERS}
    for part, wanted in CLEANERS.items():
        found = bert[part].get("type")
        if found != wanted:
            raise DataError(f"{path}: wanted a {part} of type {wanted}, BERT's own, found {found!s:.80}")
    bare: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    bare["model"] = model | {"vocab": {"[UNK]": 0}}  # the library is slow at reading a large one
    try:
        encoder = Encoder.from_str(json.dumps(parts | bare))
        encoder.model = models.WordPiece(model["vocab"], unk_token="[UNK]", continuing_subword_prefix=CONTINUING)
    except Exception as error:  # `tokenizers` raises no narrower class
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a tokenizer of the `tokenizers` library ({reason})") from None
    normalizer = bert["normalizer"]
    return encoder, {theirs: normalizer[ours] for theirs, ours in CLEANING.items() if ours in normalizer}


def _last(part: str, found: Any) -> dict[str, Any]:
    """The part of the cleaning after our own; ``found`` unchanged if it does not begin with ours."""
    name, ours = OURS[part]
    whole: dict[str, Any] = found if isinstance(found, dict) else {}
    match whole.get(name):
        case [first, dict() as last] if first == ours:
            return dict(last)
    return whole


def _lines_of(path: Path) -> list[str]:
    try:
        return read_text(path).rstrip("\n").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: not UTF-8 ({error})") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: wanted an object, found {type(value).__name__}")
    return value
