"""The state of a build that every worker shares, and the claim of a build on its folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import TEMPORARY, hold, replacing
from data_prep.errors import DataError
from data_prep.manifest import MANIFEST, SHARDS_FORMAT, SHARDS_VERSION, TOKENIZER_FOLDER, TokenizerRecord, load_manifest
from data_prep.masking import Vocabulary, make_vocabulary
from data_prep.pairs import PAIR_DTYPE
from data_prep.settings import LATER, Settings
from data_prep.shards import SHARD_PREFIX
from data_prep.store import COUNTS_FILE, Counted, Store, open_store
from data_prep.streams import warn
from data_prep.tokenizer import load_once
from data_prep.verify import verify

WORK = ".work"  # inside the output folder, removed at the end
FINGERPRINT = "fingerprint"  # name of the file that marks a folder as claimed by a build or a store
REMEDY = "choose another or remove it"
ANOTHER = f"of other text or settings; {REMEDY}"
CLAIM = f"{FINGERPRINT}.claim"  # link with the mark of the builder that is about to write it
# Settings that decide the content of a store.
OF_STORE = ("language", "where", "text_field", "bad_bytes", "given_words", "tokenizers", "sentencex", "format")


@dataclass(frozen=True)
class BuildJob:
    """The settings and folders of a build."""

    out: Path
    store: Path  # folder of the tokenized corpus
    settings: Settings
    tokenizer: TokenizerRecord

    @property
    def work(self) -> Path:
        """The folder of everything that the build needs until it is done."""
        return self.out / WORK

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer copy that the workers load; the user's own folder may change during the build."""
        return self.work / TOKENIZER_FOLDER

    @property
    def selection(self) -> Path:
        """The file of the selected documents."""
        return self.work / "selection"

    @property
    def plan(self) -> Path:
        """The file of pairs: raw PAIR_DTYPE records in corpus order."""
        return self.work / "plan"

    @property
    def selected(self) -> Path:
        """The counts of the selection, written after it."""
        return self.work / "selected.npy"

    @property
    def planned(self) -> Path:
        """The counts of the plan, written after it."""
        return self.work / "plan.npy"

    @property
    def vocabulary(self) -> Vocabulary:
        """The ids that can be predicted."""
        return _load_vocabulary(self.tokenizer_folder, self.tokenizer.sha256)

    def open_store(self) -> Store:
        """The token store, mapped into memory."""
        return open_store(self.store, self.selection, self.tokenizer.vocab_size)

    def open_plan(self) -> NDArray[np.void]:
        """Maps the plan, PAIR_DTYPE[samples]."""
        return np.memmap(self.plan, PAIR_DTYPE, "r")


def fingerprint(job: BuildJob, sources: list[tuple[str, str]]) -> str:
    """Hash of everything that decides the data set, ``sources`` (name, sha256) included. Equal hashes, equal bytes."""
    settings = asdict(job.settings)
    for field in fields(Settings):
        if field.metadata == LATER and settings[field.name] == field.default:
            del settings[field.name]
    return _hash([SHARDS_FORMAT, SHARDS_VERSION, settings, asdict(job.tokenizer), sources])


def claim(job: BuildJob, mark: str, shared: bool = False) -> None:
    """Claims an empty folder, or one in which the same build was started. Raises DataError for any other.

    ``shared``: other builders may work there now.
    """
    out, known = job.out, job.work / FINGERPRINT
    found = sorted(path.name for path in out.iterdir() if path.name != WORK) if out.exists() else []
    if _is_marked(known, mark):
        if not shared:
            remove_temporary(out)
        return
    if (known.exists() and not shared) or any(name.startswith(SHARD_PREFIX) for name in found):
        raise DataError(f"--out {out} holds another build, {ANOTHER}")
    if found:
        raise DataError(f"--out {out} holds other files ({found[0]}); {REMEDY}")
    if not shared:
        shutil.rmtree(job.work, ignore_errors=True)  # without a mark, its origin is unknown
    job.work.mkdir(parents=True, exist_ok=shared)
    if not _mark(job.work, mark, shared):
        raise DataError(f"--out {out} holds another build, {ANOTHER}")


def claim_store(job: BuildJob, sources: list[tuple[str, str]], shared: bool = False) -> None:
    """Claims the store's folder in the same way. Builds of different samples from the same text share it."""
    settings = asdict(job.settings)
    held = [settings[name] for name in OF_STORE]
    mark = _hash([SHARDS_FORMAT, SHARDS_VERSION, list(Counted.__members__), held, asdict(job.tokenizer), sources])
    marking = f"{FINGERPRINT}."  # names that others use while they mark the folder
    empty = not job.store.exists() or all(path.name.startswith(marking) for path in job.store.iterdir())
    if _is_marked(job.store / FINGERPRINT, mark):
        return
    if empty:
        job.store.mkdir(parents=True, exist_ok=True)
        if _mark(job.store, mark, shared):
            return
    raise DataError(f"--store {job.store} holds the tokens of other text or settings, or of another version; {REMEDY}")


def remove_temporary(out: Path) -> None:
    """Removes the temporary files of builds that were killed. A builder that still works loses what it is writing."""
    for path in out.rglob(f"*{TEMPORARY}"):
        with suppress(OSError):  # a leftover blocks nobody: see `replacing`
            path.unlink(missing_ok=True)


def release(job: BuildJob) -> None:
    """Removes the leftovers of a build that has no shard yet; a complete store is kept."""
    if not (job.store / COUNTS_FILE).exists():
        shutil.rmtree(job.store, ignore_errors=True)
    release_work(job)


def release_work(job: BuildJob) -> None:
    """Same as `release`, but keeps the store: a store that was refused may be another user's folder."""
    if not list(job.out.glob(SHARD_PREFIX + "*")):
        shutil.rmtree(job.work, ignore_errors=True)
        with suppress(OSError):  # not empty, or a mount point
            job.out.rmdir()


def remove_work(job: BuildJob) -> None:
    """Removes the working files of a finished build. A failure to remove them is only a warning."""
    try:
        shutil.rmtree(job.work)
    except FileNotFoundError:
        pass  # another builder has removed them
    except OSError as error:
        warn(f"{job.work} cannot be removed ({error}): remove it by hand")


def is_complete(job: BuildJob, mark: str) -> bool:
    """Whether this build is complete. Raises DataError if it is damaged, or if the folder has another build."""
    if not (job.out / MANIFEST).exists():
        return False
    if load_manifest(job.out).fingerprint != mark:
        raise DataError(f"--out {job.out} holds another build, {ANOTHER}")
    remove_temporary(job.out)  # a builder that was killed leaves some; one that still works finds that all is done
    problems = verify(job.out)
    if problems:
        raise DataError(f"{job.out} was built but is damaged: {problems[0]}; remove it and build again")
    return True


@lru_cache(1)
def _load_vocabulary(tokenizer: Path, sha256: str) -> Vocabulary:
    loaded = load_once(tokenizer, sha256)
    return make_vocabulary(loaded.vocab_size, loaded.never, loaded.specials.mask)


def _mark(folder: Path, mark: str, shared: bool) -> bool:
    """Marks a folder; returns False if it is ``shared`` and another builder has just marked it in another way."""
    known, link = folder / FINGERPRINT, folder / CLAIM
    if shared:
        with suppress(FileNotFoundError):  # the other one has marked the folder, and removed its link
            if hold(link, mark) != mark:
                return False
        if known.exists():
            link.unlink(missing_ok=True)
            return _is_marked(known, mark)
    with replacing(known) as file:
        file.write(mark.encode())
    link.unlink(missing_ok=True)
    return True


def _is_marked(known: Path, mark: str) -> bool:
    return known.exists() and known.read_bytes() == mark.encode()


def _hash(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
