"""A tokenizer decides what every id means: every command refuses one that differs from the recorded one, by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer.evaluate
from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_proven, load_tokenizer
from tests.helpers import ranks
from tests.helpers.file_server import Server
from tests.helpers.finetune_inputs import write_data
from tests.helpers.runs import write_config
from trainer import export, fill_mask, weights
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.reading import tree_sha256
from trainer.convert.folder import write_folder
from trainer.convert.weights import load_bert
from trainer.data.cache import CacheConfig, open_cache
from trainer.encode import __main__ as encode
from trainer.errors import TrainerError
from trainer.finetune.pretrained import read_pretrained

pytestmark = pytest.mark.slow

RANDOM = random.Random(18).randbytes(4096)


def reverse(folder: Path) -> None:
    """Give the ordinary pieces the ids of one another: a vocabulary of the same pieces, and of the same size."""
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    pieces = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].__getitem__)
    tree["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces[:5] + pieces[:4:-1])}
    path.write_text(json.dumps(tree))


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return alter


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return alter


def alone(folder: Path) -> None:
    """Leave vocab.txt, with another piece."""
    replace("vocab.txt", "ba\n", "bo\n")(folder)
    (folder / "tokenizer.json").unlink()


ALTERED: dict[str, tuple[Callable[[Path], None], str]] = {  # and what is said of the folder
    "reversed": (reverse, " is not "),
    "random bytes": (write("tokenizer.json", RANDOM), "/tokenizer.json: not JSON ("),
    "empty": (write("tokenizer.json", b""), "/tokenizer.json: not JSON ("),
    "cased": (replace("tokenizer.json", '"lowercase": true', '"lowercase": false'), " is not "),
    "gone": (shutil.rmtree, " does not exist: "),
    "vocab.txt": (replace("vocab.txt", "ba\n", "bo\n"), "/vocab.txt has other pieces than tokenizer.json next to it"),
    "vocab.txt of random bytes": (write("vocab.txt", RANDOM), "/vocab.txt: not UTF-8 ("),
    "settings": (
        replace("tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false'),
        "/tokenizer_config.json has do_lower_case false, tokenizer.json next to it has true",
    ),
    "vocab.txt alone": (alone, ": tokenizer.json is missing, and it defines the cleaning"),
}


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that evaluated, whose shards are gone; read only."""
    home = tmp_path_factory.mktemp("trained")
    shards = shutil.copytree(tiny_shards, home / "shards")
    config = write_config(home, shards, 2)
    [(code, said)] = ranks.finish(
        ranks.fork(1, "trainer/__main__.py", "--config", str(config), "--set", f"phases.0.heldout={tiny_shards}")
    )
    assert code == 0, said
    shutil.rmtree(shards)
    return home / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of ``trained`` that a test may alter."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def forget(run: Path) -> None:
    """Make the run's checkpoint one that was saved before the hash was recorded."""
    path = checkpoint.find(run).folder / "checkpoint.json"
    tree = json.loads(path.read_text())
    del tree["sha256"], tree["record"]["identity"]["tokenizer"]
    path.write_text(json.dumps({**tree, "sha256": tree_sha256(tree)}))


COMMANDS = ("encode", "evaluate", "export", "fill_mask", "weights")


def command(name: str, run: Path, shards: Path, *more: str) -> int:
    """Run a command; returns its exit code. Its output is next to the run."""
    out = run.parent / "out"
    commands: dict[str, tuple[Callable[[list[str]], int], list[object]]] = {
        "encode": (encode.main, ["--model", run, "--out", out.with_suffix(".npy"), "bade"]),
        "evaluate": (trainer.evaluate.main, ["--checkpoint", run, "--heldout", shards, "--train", shards]),
        "export": (export.main, ["--checkpoint", run, "--out", out]),
        "fill_mask": (fill_mask.main, ["--model", run, "[MASK]"]),
        "weights": (weights.main, [run, out]),
    }
    main, arguments = commands[name]
    return main([*more, *map(str, arguments)])


# ---- before a step is taken ----------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["__main__", "preflight"])
@pytest.mark.parametrize("use", ["train", "heldout"])
def test_training_and_preflight_refuse_shards_with_another_tokenizer(
    tiny_shards: Path, own_shards: Path, tmp_path: Path, program: str, use: str
) -> None:
    """This is a bug that was found: the pieces reversed, with static masks. Nothing is started."""
    reverse(own_shards / "tokenizer")
    config = write_config(tmp_path, tiny_shards, 2)
    more = ("--set", f"phases.0.{use}={own_shards}")
    [(code, said)] = ranks.finish(ranks.fork(1, f"trainer/{program}.py", "--config", str(config), *more))
    assert code == 2 and said.splitlines()[-1] == (
        f"  - phases.0.{use}: {own_shards / 'tokenizer'} is not the manifest's tokenizer (its sha256 differs): "
        "restore it, or build the shards again"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ALTERED)
def test_whatever_was_altered_in_a_tokenizers_folder_is_named(own_shards: Path, kind: str) -> None:
    folder, known = own_shards / "tokenizer", load_manifest(own_shards).tokenizer.sha256
    assert load_proven(folder, known).sha256() == known
    alter, said = ALTERED[kind]
    alter(folder)
    with pytest.raises(DataError) as error:
        load_proven(folder, known)
    assert f"{folder}{said}" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(": restore it, or build the shards again")


def test_what_says_nothing_else_about_ids_may_change(own_shards: Path) -> None:
    """A longer limit, another layout of the file, files that other programs add."""
    folder, known = own_shards / "tokenizer", load_manifest(own_shards).tokenizer.sha256
    replace("tokenizer_config.json", '"model_max_length": 512', '"model_max_length": 32')(folder)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text())))
    (folder / "special_tokens_map.json").write_text("{}")
    load_proven(folder, known)
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer_config.json").unlink()
    load_proven(folder, known)


def test_a_tokenizer_that_rots_in_the_cache_is_fetched_again(server: Server, cache: Path) -> None:
    def opened() -> Path:
        return open_cache(server.address, CacheConfig(str(cache)), 30, 0).folder

    folder = opened()
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.stat().st_size}
    for name in ("tokenizer/tokenizer.json", "tokenizer/vocab.txt", "token_counts.npy", "manifest.json"):
        (folder / name).write_bytes(RANDOM)
        assert opened() == folder and all(path.read_bytes() == content for path, content in kept.items())
    asked = len(server.gets)
    assert opened() == folder and len(server.gets) == asked + 1  # the manifest alone


# ---- after training ------------------------------------------------------------------------------------------


def test_a_checkpoint_records_its_tokenizer_and_a_resume_refuses_another(
    trained: Path, tiny_shards: Path, own_shards: Path, tmp_path: Path
) -> None:
    known = load_manifest(tiny_shards).tokenizer.sha256
    assert checkpoint.find(trained).record["identity"]["tokenizer"] == known
    config = write_config(tmp_path, tiny_shards, 2)
    shutil.copytree(trained, tmp_path / "run")
    reverse(own_shards / "tokenizer")
    (own_shards / "tokenizer" / "vocab.txt").unlink()
    replace("manifest.json", known, load_tokenizer(own_shards / "tokenizer").sha256())(own_shards)
    for program in ("__main__", "preflight"):
        more = ("--set", f"phases.0.train={own_shards}")
        [(code, said)] = ranks.finish(ranks.fork(1, f"trainer/{program}.py", "--config", str(config), *more))
        assert code == 2 and "belongs to another run (its shards were made with another tokenizer; " in said, said
    assert load_tokenizer(tmp_path / "run" / "tokenizer").sha256() == known


@pytest.mark.parametrize("kind", ["reversed", "random bytes", "settings", "vocab.txt"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_runs_own_copy_that_was_altered_is_refused(
    name: str, kind: str, run: Path, tiny_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(name, run, tiny_shards) == 0
    assert "cannot verify" not in capsys.readouterr().err
    for path in run.parent.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    alter, said = ALTERED[kind]
    alter(run / "tokenizer")
    assert command(name, run, tiny_shards) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer.{name}: error: {run / 'tokenizer'}{said}")
    assert ": restore it from the tokenizer folder of the training shards" in line
    assert not list(run.parent.glob("out*"))


def test_export_takes_the_right_tokenizer_from_elsewhere(
    run: Path, tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reverse(run / "tokenizer")
    assert command("export", run, tiny_shards, "--tokenizer", str(run / "tokenizer")) == 2
    assert capsys.readouterr().err.endswith(", or name it by --tokenizer\n")
    assert command("export", run, tiny_shards, "--tokenizer", str(tiny_shards / "tokenizer")) == 0
    assert load_tokenizer(tmp_path / "out").sha256() == load_manifest(tiny_shards).tokenizer.sha256


@pytest.mark.parametrize("name", COMMANDS)
def test_an_older_checkpoint_is_used_with_a_warning(
    name: str, run: Path, tiny_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(run)
    assert command(name, run, tiny_shards) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert f"cannot verify that {run / 'tokenizer'} is the right one" in line


def test_an_older_checkpoint_is_proven_by_its_shards_where_they_are_at_hand(
    run: Path, trained: Path, tiny_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(run)
    place = trained.parent / "shards"
    place.symlink_to(tiny_shards)
    try:
        reverse(run / "tokenizer")
        assert command("export", run, tiny_shards) == 2
    finally:
        place.unlink()
    [line] = capsys.readouterr().err.splitlines()
    assert f"{run / 'tokenizer'} is not the tokenizer that {run / 'step-00000002'} was trained with" in line


def test_an_export_proves_its_own_tokenizer_later(
    run: Path, tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever loads the folder compares it with the hash that lies with the weights; fine-tuning, too."""
    assert command("export", run, tiny_shards) == 0
    out = tmp_path / "out"
    load_bert(out)
    assert read_pretrained(out, None, print).tokenizer.pieces == load_tokenizer(tiny_shards / "tokenizer").pieces
    reverse(out)
    with pytest.raises(TrainerError, match=f"^{out} is not the tokenizer that {out} was trained with"):
        load_bert(out)
    for model in (out, run):
        reverse(run / "tokenizer") if model is run else None
        with pytest.raises(TrainerError, match="is not the tokenizer that .*, or name it by --tokenizer$"):
            read_pretrained(model, None, print)
        read_pretrained(model, tiny_shards / "tokenizer", print)
    assert fill_mask.main(["--model", str(out), "[MASK]"]) == 2
    assert "is not the tokenizer that" in capsys.readouterr().err.splitlines()[-1]


def test_what_fine_tuning_leaves_proves_its_tokenizer(run: Path, tiny_shards: Path, tmp_path: Path) -> None:
    """Checks both forms of its folder: a transformers class, and a head without one."""
    data = write_data(tmp_path / "data", 16, 16)
    for more in ([], ["--head", "mlp"]):
        out = tmp_path / f"tuned{len(more)}"
        recipe = ["--rates", "1e-3", "--batches", "8", "--epochs", "1", "--max-length", "24", "--device", "cpu"]
        said = ["--task", "sst2", "--data", str(data), "--model", str(run), "--out", str(out), *recipe, *more]
        [(code, output)] = ranks.finish(ranks.fork(1, "trainer/finetune/__main__.py", *said))
        assert code == 0, output
        read_pretrained(out / "model", None, print)
        reverse(out / "model")
        with pytest.raises(TrainerError, match=f"^{out / 'model'} is not the tokenizer that"):
            read_pretrained(out / "model", None, print)


def test_a_foreign_folder_is_used_as_it_is(run: Path, tiny_shards: Path, tmp_path: Path) -> None:
    """There is no recorded hash to compare it with."""
    found = checkpoint.find(run)
    model = checkpoint.load_model(found).model
    write_folder(checkpoint.load_weights(found), model, tiny_shards / "tokenizer", tmp_path / "foreign")
    reverse(tmp_path / "foreign")
    load_bert(tmp_path / "foreign", pytest.fail)
