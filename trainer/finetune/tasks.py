"""The tasks known by name: the layout of their files, their metrics, and their published recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.console import Tell
from trainer.errors import TrainerError
from trainer.finetune.classification import Columns, Format, SentenceTask, find_labels
from trainer.finetune.task import Task
from trainer.model.bert import ModelConfig


@dataclass(frozen=True)
class Recipe:
    """The settings of a fine-tuning, unless the user gives others.

    Devlin et al. 2019 (appendix A.3) search batches of 16 and 32, rates of 5e-5, 3e-5 and 2e-5, and 2 to 4 epochs, with
    warm-up over the first tenth, linear decay and a weight decay of 0.01. Gradients are not clipped here by default;
    google-research/bert (optimization.py) clips them to a global norm of 1.0. Devlin et al. always fine-tune with a
    dropout of 0.1; a model that was pre-trained without dropout does so only if the recipe says it.
    """

    length: int = 128  # tokens of an example, at most
    epochs: float = 3.0
    batch: int = 32  # records per step
    rate: float = 2e-5
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.01
    clipping: float = 0.0  # of the gradients' global norm; 0 is off
    dropout: float | None = None  # of hidden states and of attention; None: the pre-trained model's own

    def of(self, model: ModelConfig) -> ModelConfig:
        """The pre-trained model's settings with this recipe's dropout."""
        if self.dropout is None:
            return model
        return replace(model, dropout=self.dropout, attention_dropout=self.dropout)


@dataclass(frozen=True)
class Wish:
    """The user's choices about the task itself."""

    train: Path  # supplies the labels too, if the task does not define them
    columns: Columns | None = None  # instead of the published ones
    regression: bool = False
    measure: str | None = None  # the metric that decides, instead of the task's own
    mlp: bool = False  # a head with a hidden layer
    no_label: tuple[str, ...] = ()  # label values that mean no label


@dataclass(frozen=True)
class Files:
    """File names to look for in a data folder; the first that exists is used."""

    train: tuple[str, ...] = ("train.tsv", "train.jsonl", "train.csv")
    dev: tuple[str, ...] = ("dev.tsv", "dev.jsonl", "dev.csv")
    test: tuple[str, ...] = ("test.tsv", "test.jsonl", "test.csv")
    also: tuple[str, ...] = ()  # also scored at the end: all that exist


@dataclass(frozen=True)
class Known:
    """A task known by name: how to make it, its recipe and its files."""

    make: Callable[[Wish, Tell], Task]
    recipe: Recipe = Recipe()
    files: Files = Files()


def known(name: str) -> Known:
    """Look up a task by name. Raises TrainerError with the names that exist."""
    if name not in TASKS:
        raise TrainerError(f"--task {name} is not known: name one of {', '.join(sorted(TASKS))}")
    return TASKS[name]


# ---- sentences and pairs ---------------------------------------------------------------------------------------

PAIR_COLUMNS = ("sentence1", "sentence2")
_ENTAILMENT = ("contradiction", "entailment", "neutral")  # google-research/bert's order


def _published(
    name: str,
    columns: tuple[Columns, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    form: Format | None = None,
) -> Callable[[Wish, Tell], Task]:
    """A maker of a task with its own columns and, if given, its own ``form``. Without labels it predicts a number."""
    own = replace(form or Format(()), columns=columns)

    def make(wish: Wish, tell: Tell) -> Task:
        _two(wish.columns)
        if wish.regression and labels:
            raise TrainerError(f"--regression is for numbers, but {name} has classes: {', '.join(labels)}")
        used = replace(own, no_label=wish.no_label)
        used = used if wish.columns is None else replace(used, columns=(wish.columns,), headless=())
        return SentenceTask(name, _judge(name, wish, metrics), metrics, used, labels, wish.mlp, tell)

    return make


def _own(wish: Wish, tell: Tell) -> Task:
    """Make a task of the user's own classes or numbers."""
    _two(wish.columns)
    defaults = (Columns(PAIR_COLUMNS, "label"), Columns(("sentence",), "label"), Columns(("text",), "label"))
    form = Format(defaults if wish.columns is None else (wish.columns,), no_label=wish.no_label)
    labels = () if wish.regression else find_labels(wish.train, form)
    metrics = ["pearson", "spearman"] if wish.regression else ["accuracy", "macro_f1", "matthews"]
    metrics += ["f1"] if len(labels) == 2 else []
    return SentenceTask("sentence", _judge("sentence", wish, metrics), tuple(metrics), form, labels, wish.mlp, tell)


def _judge(name: str, wish: Wish, metrics: Sequence[str]) -> str:
    if wish.measure is not None and wish.measure not in metrics:
        raise TrainerError(f"--measure {wish.measure} is not a metric of {name}: use one of {', '.join(metrics)}")
    return wish.measure or metrics[0]


def _two(columns: Columns | None) -> None:
    if columns is not None and len(columns.texts) > 2:
        raise TrainerError(f"--text-columns names {len(columns.texts)} columns: name one for a text, two for a pair")


_PLAIN = Columns(PAIR_COLUMNS, "label")
_ONE = Columns(("sentence",), "label")
_COLA = Format((), headless=("source", "label", "notation", "sentence"))
_STS = Format((), headless=("genre", "file", "year", "old_index", "score", "sentence1", "sentence2"))
_SNLI = Format((), dropped=("-",))
_SICK_FILES = Files(
    (*Files.train, "SICK_train.txt", "SICK.txt#SemEval_set=TRAIN"),
    (*Files.dev, "SICK_trial.txt", "SICK.txt#SemEval_set=TRIAL"),
    (*Files.test, "SICK_test_annotated.txt", "SICK.txt#SemEval_set=TEST"),
)
_SICK_TEXTS = ("sentence_A", "sentence_B")
_SNLI_FILES = Files(
    (*Files.train, "snli_1.0_train.jsonl"), (*Files.dev, "snli_1.0_dev.jsonl"), (*Files.test, "snli_1.0_test.jsonl")
)
_MNLI_FILES = Files(
    (*Files.train, "multinli_1.0_train.jsonl"),
    ("dev_matched.tsv", *Files.dev, "multinli_1.0_dev_matched.jsonl"),
    ("test_matched.tsv", *Files.test),
    ("dev_mismatched.tsv", "multinli_1.0_dev_mismatched.jsonl"),
)
_MRPC_FILES = Files((*Files.train, "msr_paraphrase_train.txt"), Files.dev, (*Files.test, "msr_paraphrase_test.txt"))
_STS_FILES = Files((*Files.train, "sts-train.csv"), (*Files.dev, "sts-dev.csv"), (*Files.test, "sts-test.csv"))


# ---- tags, answers and choices ---------------------------------------------------------------------------------


def _tags(wish: Wish, tell: Tell) -> Task:
    from trainer.finetune.tagging import TagTask

    _only_sentences("a tagging task", wish, columns=False)
    return TagTask.of(wish.train, tell, wish.no_label)


def _answers(unanswerable: bool) -> Callable[[Wish, Tell], Task]:
    def make(wish: Wish, tell: Tell) -> Task:
        from trainer.finetune.question_answering import AnswerTask

        _only_sentences("a question-answering task", wish, columns=False)
        if wish.no_label:
            raise TrainerError(
                "--no-label is for labels: to mark a question as unknown, leave its answers out of the file"
            )
        return AnswerTask(unanswerable)

    return make


def _choices(wish: Wish, tell: Tell) -> Task:
    """``--text-columns`` names the context's column, then those of the choices or one that contains a list of them."""
    from trainer.finetune.multiple_choice import SWAG, Choices, ChoiceTask

    _only_sentences("a multiple-choice task", wish, columns=True)
    own = wish.columns
    if own is not None and len(own.texts) < 2:
        raise TrainerError("--text-columns must name the context's column and those of the choices")
    columns = SWAG if own is None else Choices(own.texts[0], own.texts[1:], label=own.label)
    return ChoiceTask.of(wish.train, replace(columns, no_label=wish.no_label))


def _only_sentences(name: str, wish: Wish, columns: bool) -> None:
    """Refuse options that only sentence tasks understand; ``columns``: this task takes column names too."""
    said: dict[str, object] = {"--regression": wish.regression, "--measure": wish.measure, "--head mlp": wish.mlp}
    said |= {} if columns else {"--text-columns": wish.columns}
    for option, value in said.items():
        if value:
            raise TrainerError(f"{option} is for sentence tasks, but this is {name}: leave it out")


_CONLL_FILES = Files(
    (*Files.train, "train.txt", "eng.train"),
    (*Files.dev, "dev.txt", "valid.txt", "eng.testa"),
    (*Files.test, "test.txt", "eng.testb"),
)
_SQUAD_FILES = Files(("train-v1.1.json", *Files.train), ("dev-v1.1.json", *Files.dev), Files.test)
_SQUAD2_FILES = Files(("train-v2.0.json", *Files.train), ("dev-v2.0.json", *Files.dev), Files.test)
_SWAG_FILES = Files(Files.train, ("val.csv", *Files.dev), Files.test)

TASKS: dict[str, Known] = {
    "sentence": Known(_own),
    "cola": Known(_published("cola", (_ONE,), ("0", "1"), ("matthews", "accuracy"), _COLA)),
    "sst2": Known(_published("sst2", (_ONE,), ("0", "1"), ("accuracy",))),
    "mrpc": Known(
        _published("mrpc", (_PLAIN, Columns(("#1 String", "#2 String"), "Quality")), ("0", "1"), ("f1", "accuracy")),
        files=_MRPC_FILES,
    ),
    "qqp": Known(
        _published(
            "qqp",
            (Columns(("question1", "question2"), "is_duplicate"), _PLAIN),
            ("0", "1"),
            ("f1", "accuracy"),
            Format((), skips=True),  # some published lines are cut off
        )
    ),
    "stsb": Known(
        _published("stsb", (Columns(PAIR_COLUMNS, "score"), _PLAIN), (), ("spearman", "pearson"), _STS),
        files=_STS_FILES,
    ),
    "mnli": Known(
        _published("mnli", (Columns(PAIR_COLUMNS, "gold_label"), _PLAIN), _ENTAILMENT, ("accuracy",), _SNLI),
        files=_MNLI_FILES,
    ),
    "qnli": Known(
        _published(
            "qnli",
            (Columns(("question", "sentence"), "label"), _PLAIN),
            ("entailment", "not_entailment"),
            ("accuracy",),
        )
    ),
    "rte": Known(_published("rte", (_PLAIN,), ("entailment", "not_entailment"), ("accuracy",))),
    "snli": Known(
        _published("snli", (Columns(PAIR_COLUMNS, "gold_label"), _PLAIN), _ENTAILMENT, ("accuracy",), _SNLI),
        files=_SNLI_FILES,
    ),
    "sick-entailment": Known(
        _published(
            "sick-entailment",
            (Columns(_SICK_TEXTS, "entailment_label"), Columns(_SICK_TEXTS, "entailment_judgment"), _PLAIN),
            _ENTAILMENT,
            ("accuracy",),
            Format((), lower=True),
        ),
        files=_SICK_FILES,
    ),
    "sick-relatedness": Known(
        _published(
            "sick-relatedness",
            (Columns(_SICK_TEXTS, "relatedness_score"), Columns(PAIR_COLUMNS, "relatedness")),
            (),
            ("pearson", "spearman"),
        ),
        files=_SICK_FILES,
    ),
    "ner": Known(_tags, Recipe(rate=5e-5), _CONLL_FILES),
    "conll2003": Known(_tags, Recipe(rate=5e-5), _CONLL_FILES),
    # Devlin et al. 2019, sections 4.2 to 4.4
    "squad": Known(_answers(False), Recipe(384, rate=5e-5), _SQUAD_FILES),
    "squad2": Known(_answers(True), Recipe(384, epochs=2.0, batch=48, rate=5e-5), _SQUAD2_FILES),
    "swag": Known(_choices, Recipe(batch=16), _SWAG_FILES),
}
