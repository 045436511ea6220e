"""The picture: its numbers against the samples themselves, and a PNG of data with a second task and without one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from data_prep.build import build
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, file_sha256, load_manifest
from data_prep.picture import draw, make_spread, masked_share, padding_share, read_histograms
from data_prep.settings import make_settings
from data_prep.tokenizer import load_tokenizer
from tests.helpers.corpora import read_samples, write_corpus

PAIRS = ("nsp", "sop", "single")


@pytest.fixture(scope="module", params=PAIRS)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, in a vocabulary of which some was never seen."""
    folder = tmp_path_factory.mktemp(request.param)
    text, tokenizer = write_corpus(folder, [12] * 8, 8)
    with (tokenizer / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("absent\n[unused0]\n")
    settings = make_settings(32, pairs=request.param, samples_per_shard=9, short_sequence_rate=0.5)
    build([text], tokenizer, folder / "out", settings, 1)
    return folder / "out"


def test_what_is_drawn_is_what_the_samples_hold(data: Path) -> None:
    manifest, samples = load_manifest(data), list(read_samples(data))
    histograms = read_histograms(data, manifest)
    lengths, masked = [len(sample.ids) for sample in samples], [len(sample.positions) for sample in samples]
    assert np.array_equal(histograms.lengths, np.bincount(lengths, minlength=33)) and len(histograms.lengths) == 33
    assert np.array_equal(histograms.masks, np.bincount(masked, minlength=len(histograms.masks)))
    tokenizer = load_tokenizer(data / TOKENIZER_FOLDER)
    counts = np.bincount(np.concatenate([sample.ids for sample in samples]), minlength=tokenizer.vocab_size)
    assert np.array_equal(histograms.tokens, np.delete(counts, tokenizer.never))
    assert len(histograms.tokens) == tokenizer.vocab_size - 6 and histograms.tokens[-1] == 0
    assert padding_share(histograms.lengths) == pytest.approx(1 - sum(lengths) / (32 * len(samples)))
    ordinary = sum(np.isin(sample.ids, tokenizer.never, invert=True).sum() for sample in samples)
    assert masked_share(manifest) == pytest.approx(sum(masked) / ordinary)


def test_the_spread_is_that_of_the_shards(data: Path) -> None:
    manifest, samples = load_manifest(data), list(read_samples(data))
    spread = make_spread(manifest, read_histograms(data, manifest).lengths)
    single = manifest.settings.pairs == "single"
    values = np.array([len(sample.ids) if single else sample.is_next == 1 for sample in samples])
    shards = np.split(values, np.cumsum([shard.samples for shard in manifest.shards])[:-1])
    assert len(shards) > 2
    assert spread.values == pytest.approx([shard.mean() for shard in shards])
    assert spread.mean == pytest.approx(values.mean())
    orders = np.random.default_rng(0).permuted(np.tile(values, (4000, 1)), axis=1)  # (orders, samples)
    for number, size in ((0, len(shards[0])), (-1, len(shards[-1]))):
        assert spread.error[number] == pytest.approx(orders[:, :size].mean(axis=1).std(), rel=0.05)
    far = sum(abs(shard.mean() - spread.mean) > 1.96 * error for shard, error in zip(shards, spread.error, strict=True))
    assert spread.inside() == len(shards) - far


def test_a_single_shard_is_the_mean(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [12] * 8, 8)
    build([text], tokenizer, tmp_path / "out", make_settings(32), 1)
    manifest = load_manifest(tmp_path / "out")
    spread = make_spread(manifest, read_histograms(tmp_path / "out", manifest).lengths)
    assert (len(spread.values), spread.error[0], spread.inside()) == (1, 0, 1)


@pytest.mark.parametrize("data", ["nsp", "single"], indirect=True)  # another title is all that is "sop"'s own
def test_a_picture_is_drawn(data: Path, tmp_path: Path) -> None:
    draw(data, tmp_path / "data.png")
    pixels = imread(tmp_path / "data.png")
    assert pixels.shape[:2] == (1200, 1800)
    for part in (pixels[:600, :900], pixels[:600, 900:], pixels[600:, :900], pixels[600:, 900:]):
        assert part.std() > 0.05  # each panel holds something
    assert [path.name for path in tmp_path.iterdir()] == ["data.png"]


def test_a_damaged_data_set_costs_one_line(data: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    index = np.load(copy / "shard-00001.idx.npy")
    index[0, 2] = 33
    np.save(copy / "shard-00001.idx.npy", index)
    with pytest.raises(DataError, match=r"shard-00001\.idx\.npy: not the index in the manifest"):
        draw(copy, tmp_path / "data.png")
    manifest, known = copy / "manifest.json", file_sha256(data / "shard-00001.idx.npy")
    text = manifest.read_text()
    manifest.write_text(text.replace(known, file_sha256(copy / "shard-00001.idx.npy")))
    with pytest.raises(DataError, match=r"shard-00001\.idx\.npy: a sample of 33 tokens"):
        draw(copy, tmp_path / "data.png")
    shutil.copy(data / "shard-00001.idx.npy", copy)
    manifest.write_text(text)
    for content in (b"no array", (data / "length_counts.npy").read_bytes()):
        (copy / "token_counts.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"token_counts\.npy"):
            draw(copy, tmp_path / "data.png")
    assert not (tmp_path / "data.png").exists()


def test_without_matplotlib_it_costs_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from pathlib import Path; from data_prep.picture import draw\n"
        "try: draw(Path('absent'), Path('data.png'))\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install matplotlib" in done.stdout and done.stdout.count("\n") == 1
