"""examples/run_glue.py: metrics, file formats, errors, and whole runs on small generated files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

import forge_hf  # noqa: F401  (registers the optimizers)
from forge_hf.hf.generated import sentences, small_roberta, word_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import glue_data  # noqa: E402
import glue_tasks  # noqa: E402
import run_glue  # noqa: E402
from glue_tasks import TASKS, DataError  # noqa: E402

GLUE = ROOT.parent / "shared" / "data" / "glue"

LABELS = np.array([1, 1, 1, 0, 0])
LOGITS = np.array(
    [[0, 1], [0, 2], [3, 0], [1, 0], [0, 1]]
)  # predicts 1 1 0 0 1: two hits, a miss, a hit, a miss
SCORES = np.array([1.0, 3.0, 2.0, 5.0])
SCORE_LOGITS = np.array([[1.0], [2.0], [3.0], [5.0]])

EXPECTED_METRICS = {
    "cola": {"matthews_correlation": 1 / 6},
    "mnli": {"accuracy": 0.6},
    "mrpc": {"accuracy": 0.6, "f1": 2 / 3, "combined_score": 19 / 30},
    "qnli": {"accuracy": 0.6},
    "qqp": {"accuracy": 0.6, "f1": 2 / 3, "combined_score": 19 / 30},
    "rte": {"accuracy": 0.6},
    "sst2": {"accuracy": 0.6},
    "stsb": {"pearson": 7.75 / 8.75, "spearmanr": 0.8, "combined_score": (7.75 / 8.75 + 0.8) / 2},
    "wnli": {"accuracy": 0.6},
}


@pytest.mark.parametrize("name", TASKS)
def test_metrics_of_each_task(name):
    output = (SCORE_LOGITS, SCORES) if name == "stsb" else (LOGITS, LABELS)
    assert glue_tasks.compute_metrics_for(TASKS[name])(output) == pytest.approx(EXPECTED_METRICS[name])


def test_metrics_do_not_depend_on_the_models_numbering_of_the_classes():
    compute = glue_tasks.compute_metrics_for(TASKS["mrpc"], ["equivalent", "not_equivalent"])
    assert compute((LOGITS[:, ::-1], 1 - LABELS)) == pytest.approx(EXPECTED_METRICS["mrpc"])


def test_a_constant_prediction_scores_zero_and_not_nan():
    result = glue_tasks.compute_metrics_for(TASKS["stsb"])((np.ones((4, 1)), SCORES))
    assert result == {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}
    assert glue_tasks.compute_metrics_for(TASKS["cola"])((LOGITS * 0, LABELS)) == {
        "matthews_correlation": 0.0
    }


@pytest.mark.parametrize("spelling", ["sst2", "SST-2", "sst_2"])
def test_task_names_are_read_leniently(spelling):
    assert glue_tasks.task_by_name(spelling) is TASKS["sst2"]


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(DataError, match="Unknown task 'mrcp'; the nearest is 'mrpc'; the tasks are cola, "):
        glue_tasks.task_by_name("mrcp")


# Each text tries a reader: quotes, words that look like missing values, numbers, a comma.
TEXTS = ['he said "go', "null", "007", "one, two", 'a "quoted" word', "plain"]
OTHERS = ["NA", 'say "no"', "1.0", "nan", "None", "x"]

#: By task: header as GLUE ships it (None: none), cells of a row, two labels as written and as read.
GLUE_FILES = {
    "cola": (None, lambda a, b, y: ["gj04", y, "", a], ["0", "1"], [0, 1]),
    "mnli": (
        ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"],
        lambda a, b, y: ["7", "fiction", a, b, "neutral", y],
        ["contradiction", "entailment"],
        [2, 0],
    ),
    "mrpc": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        lambda a, b, y: [y, "1", "2", a, b],
        ["0", "1"],
        [0, 1],
    ),
    "qnli": (
        ["index", "question", "sentence", "label"],
        lambda a, b, y: ["1", a, b, y],
        ["not_entailment", "entailment"],
        [1, 0],
    ),
    "qqp": (
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        lambda a, b, y: ["1", "2", "3", a, b, y],
        ["0", "1"],
        [0, 1],
    ),
    "rte": (
        ["index", "sentence1", "sentence2", "label"],
        lambda a, b, y: ["1", a, b, y],
        ["entailment", "not_entailment"],
        [0, 1],
    ),
    "sst2": (["sentence", "label"], lambda a, b, y: [a, y], ["1", "0"], [1, 0]),
    "stsb": (
        ["index", "genre", "old_index", "sentence1", "sentence2", "score"],
        lambda a, b, y: ["1", "g", "0001", a, b, y],
        ["3.800", "5"],
        [3.8, 5.0],
    ),
    "wnli": (
        ["index", "sentence1", "sentence2", "label"],
        lambda a, b, y: ["1", a, b, y],
        ["1", "0"],
        [1, 0],
    ),
}


def write_rows(path: Path, header: list[str] | None, rows: list[list[str]]) -> str:
    """Write rows in the format that the name asks for."""
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    names = header or ["source", "label", "star", "sentence"]
    if kind == "tsv":
        text = "".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows)
    elif kind == "csv":
        stream = io.StringIO()
        csv.writer(stream).writerows([names, *rows])
        text = stream.getvalue()
    else:
        records = [dict(zip(names, row, strict=True)) for row in rows]
        lines = [json.dumps(record) + "\n" for record in records]
        text = json.dumps(records) if kind == "json" else "".join(lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.fixture
def cache(tmp_path):
    return {"cache_dir": str(tmp_path / "cache")}


@pytest.mark.parametrize("name", TASKS)
def test_every_format_gives_the_same_rows(name, tmp_path, cache):
    header, cells, written, read = GLUE_FILES[name]
    rows = [cells(a, b, written[i % 2]) for i, (a, b) in enumerate(zip(TEXTS, OTHERS, strict=True))]
    for ending in ("tsv", "tsv.gz", "csv", "csv.gz", "json", "jsonl.gz"):
        path = write_rows(tmp_path / f"rows.{ending}", header, rows)
        splits, _ = glue_data.load_files({"train": path}, TASKS[name], **cache)
        found = splits["train"]
        assert found["sentence1"][:] == TEXTS, ending
        if len(TASKS[name].texts) == 2:
            assert found["sentence2"][:] == OTHERS, ending
        assert found["label"][:] == pytest.approx([read[i % 2] for i in range(len(TEXTS))]), ending


def test_windows_line_ends_and_a_byte_order_mark(tmp_path, cache):
    path = tmp_path / "dev.tsv"
    path.write_bytes("\ufeffsentence\tlabel\r\ngood\t1\r\nbad\rindeed\t0\r\n".encode())
    rows = glue_data.load_files({"validation": str(path)}, TASKS["sst2"], **cache)[0]["validation"]
    assert rows["sentence1"][:] == ["good", "bad\rindeed"]
    assert rows["label"][:] == [1, 0]


BAD_FILES = [
    ("a.tsv", "sst2", "", "the file is empty"),
    ("a.tsv", "sst2", "sentence\tlabel\n", "the file has a header and no rows"),
    ("a.txt", "sst2", "sentence\tlabel\n", r"unknown kind of file; \.tsv, \.csv, \.json, \.jsonl are read"),
    ("a.tsv.gz", "sst2", "not gzipped\n", "cannot be read as gzipped UTF-8"),
    ("a.json", "sst2", "{broken", "cannot be read as JSON"),
    ("a.csv", "sst2", "sentence,label\na,1\nb,1,2,3\n", "cannot be read as CSV: .*line 3"),
    (
        "a.tsv",
        "sst2",
        "text\tlabel\nx\t1\n",
        "no column 'sentence' for the text; the file has 'text', 'label'",
    ),
    ("a.tsv", "mrpc", "Quality\t#1 String\n1\tx\n", "no column 'sentence2' or '#2 String' for the text 2"),
    ("a.tsv", "stsb", "sentence1\tsentence2\nx\ty\n", "no column 'label' or 'score' for the label"),
    (
        "a.tsv",
        "sst2",
        "sentence\tlabel\nx\t1\ny\t2\n",
        "row 2 has the label '2'; it must be one of negative, posit",
    ),
    (
        "a.tsv",
        "sst2",
        "sentence\tlabel\nx\tpositve\n",
        r"label 'positve'; .* from 0 to 1; did you mean 'positive'\?",
    ),
    ("a.tsv", "sst2", "sentence\tlabel\nx\t1\ny\t\n", "row 2 has the label ''"),
    (
        "a.tsv",
        "stsb",
        "sentence1\tsentence2\tscore\nx\ty\tnan\n",
        "row 1 has the label 'nan'; it must be a number",
    ),
    (
        "a.tsv",
        None,
        "Quality\t#1 String\n1\tx\n",
        "no column 'sentence' or 'text' for the text .give --task_name",
    ),
]


@pytest.mark.parametrize(("name", "task", "text", "message"), BAD_FILES)
def test_bad_files(name, task, text, message, tmp_path, cache):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        glue_data.load_files({"train": str(tmp_path / name)}, TASKS[task] if task else None, **cache)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="none.tsv: no such file"):
        glue_data.load_files({"train": str(tmp_path / "none.tsv")}, TASKS["sst2"])


def test_labels_of_a_later_file_must_be_among_those_of_the_first(tmp_path, cache):
    one, two = tmp_path / "train.csv", tmp_path / "dev.csv"
    one.write_text("text,label\na,spam\nb,ham\n")
    two.write_text("text,label\na,span\n")
    with pytest.raises(DataError, match=r"dev.csv: row 1 .* one of ham, spam .*did you mean 'spam'\?"):
        glue_data.load_files({"train": str(one), "validation": str(two)}, None, **cache)


@pytest.mark.parametrize(
    ("labels", "expected", "read"),
    [
        (["10", "2", "10"], ("2", "10"), [1, 0, 1]),
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["0.5", "2", "1"], (), [0.5, 2.0, 1.0]),
    ],
)
def test_files_define_a_task_of_their_own(labels, expected, read, tmp_path, cache):
    path = write_rows(tmp_path / "a.csv", ["text", "label"], [["x", label] for label in labels])
    splits, task = glue_data.load_files({"train": path}, None, **cache)
    assert task.labels == expected
    assert splits["train"]["label"][:] == read


def test_the_hub_is_the_default(monkeypatch):
    features = Features(
        {"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=list("enc"))}
    )
    rows = {"premise": ["p"], "hypothesis": ["h"]}
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append(args)
        return DatasetDict(
            train=Dataset.from_dict(rows | {"label": [2]}, features=features),
            test_matched=Dataset.from_dict(rows | {"label": [-1]}, features=features),
        )

    monkeypatch.setattr(glue_data, "load_dataset", load_dataset)
    model_args, data_args, _ = run_glue.parse(["--model_name_or_path", "m", "--task_name", "MNLI"])
    splits, task = run_glue.load_data(data_args, model_args)
    assert asked == [("nyu-mll/glue", "mnli")]
    assert task is TASKS["mnli"]
    assert splits["train"][0] == {"sentence1": "p", "sentence2": "h", "label": 2}
    assert splits["test_matched"][0] == {"sentence1": "p", "sentence2": "h"}


def test_a_hub_out_of_reach_points_to_local_files(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub")

    monkeypatch.setattr(glue_data, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="Couldn't reach .*Give --train_file and --validation_file"):
        glue_data.load_hub(TASKS["sst2"])


@pytest.mark.parametrize(
    ("name", "split", "rows", "first"),
    [
        ("sst2", "train", 67_349, {"sentence1": "hide new secretions from the parental units ", "label": 0}),
        ("sst2", "dev", 872, {"sentence1": "it 's a charming and often affecting journey . ", "label": 1}),
        ("cola", "train", 8_551, {"label": 1}),
        ("cola", "dev", 1_043, {"sentence1": "The sailors rode the breeze clear of the rocks.", "label": 1}),
        ("mrpc", "train", 3_668, {"label": 1}),
        (
            "mrpc",
            "dev",
            408,
            {"sentence2": '"The foodservice pie business does not fit our long-term growth strategy.'},
        ),
        ("stsb", "train", 5_749, {"sentence1": "A plane is taking off.", "label": 5.0}),
        ("stsb", "dev", 1_500, {"sentence2": "A man wearing a hard hat is dancing.", "label": 5.0}),
    ],
)
def test_real_glue_files(name, split, rows, first, cache):
    path = GLUE / name / f"{split}.tsv.gz"
    if not path.is_file():
        pytest.skip("the GLUE files are not beside this checkout")
    found = glue_data.load_files({"train": str(path)}, TASKS[name], **cache)[0]["train"]
    assert len(found) == rows
    assert {key: found[0][key] for key in first} == first


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    directory = tmp_path_factory.mktemp("model")
    # Only the body, as a pretrained checkpoint comes.
    small_roberta(len(tokenizer), hidden=32, layers=1).roberta.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def sst2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sst2")
    for name, rows, seed in (("train", 128, 1), ("dev", 40, 2)):
        pairs = zip(*sentences(rows, seed), strict=True)
        write_rows(
            folder / f"{name}.tsv", ["sentence", "label"], [[text, str(label)] for text, label in pairs]
        )
    return folder


def arguments(model_dir: str, output_dir: Path, *more: str, **values: object) -> list[str]:
    settings = {
        "model_name_or_path": model_dir,
        "output_dir": output_dir,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "max_seq_length": 32,
        "logging_steps": 1,
        "max_steps": 6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "cache_dir": output_dir.parent / "cache",
        "use_cpu": "true",
    } | values
    return [item for key, value in settings.items() for item in (f"--{key}", str(value))] + list(more)


def sst2_arguments(model_dir, sst2, output_dir, *more, **values):
    files = {"task_name": "sst2", "train_file": sst2 / "train.tsv", "validation_file": sst2 / "dev.tsv"}
    return arguments(model_dir, output_dir, *more, **files | values)


def read_json(path: Path):
    return json.loads(path.read_text())


def test_a_run_with_each_optimizer_is_the_same_run(model_dir, sst2, tmp_path):
    logs, metrics = {}, {}
    for optim in ("adamw_torch", "forge_adamw"):
        out = tmp_path / optim
        metrics[optim] = run_glue.main(
            sst2_arguments(model_dir, sst2, out, "--do_train", "--do_eval", optim=optim, warmup_steps=2)
        )
        assert read_json(out / "eval_results.json")["eval_accuracy"] == metrics[optim]["eval_accuracy"]
        assert read_json(out / "train_results.json")["train_samples"] == 128
        history = read_json(out / "trainer_state.json")["log_history"]
        logs[optim] = [entry for entry in history if "grad_norm" in entry]
        assert (out / "model.safetensors").is_file()
    assert metrics["forge_adamw"]["eval_accuracy"] == metrics["adamw_torch"]["eval_accuracy"]
    assert metrics["forge_adamw"]["eval_samples"] == 40
    assert len(logs["forge_adamw"]) == 6
    for ours, theirs in zip(logs["forge_adamw"], logs["adamw_torch"], strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_arguments_from_a_file_and_resume_from_the_last_checkpoint(ending, model_dir, sst2, tmp_path):
    def run(out: Path, **values):
        flags = sst2_arguments(
            model_dir, sst2, out, optim="forge_adamw", save_strategy="steps", save_steps=3, **values
        )
        settings = {name[2:]: value for name, value in zip(flags[::2], flags[1::2], strict=True)}
        for name in (
            "per_device_train_batch_size",
            "max_seq_length",
            "logging_steps",
            "max_steps",
            "save_steps",
        ):
            settings[name] = int(settings[name])
        settings |= {"learning_rate": 1e-3, "do_train": True, "disable_tqdm": True, "use_cpu": True}
        path = tmp_path / f"arguments.{ending}"
        # JSON is YAML.
        path.write_text(json.dumps(settings))
        run_glue.main([str(path)])
        from safetensors.torch import load_file

        return load_file(out / "model.safetensors")

    whole = run(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    (tmp_path / "halves").mkdir()
    checkpoint = checkpoint.rename(tmp_path / "halves" / "checkpoint-3")
    written = (checkpoint / "optimizer.pt").stat().st_mtime_ns
    resumed = run(tmp_path / "halves", resume_from_checkpoint="True")
    # A run from the beginning would have written it again.
    assert (checkpoint / "optimizer.pt").stat().st_mtime_ns == written
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_mnli_reports_both_development_sets_and_predicts(model_dir, tmp_path):
    header = ["sentence1", "sentence2", "gold_label"]
    texts, _ = sentences(24, 3)
    rows = [[text, texts[-1 - i], TASKS["mnli"].labels[i % 3]] for i, text in enumerate(texts)]
    files = {
        "train_file": write_rows(tmp_path / "train.tsv", header, rows),
        "validation_file": write_rows(tmp_path / "m.tsv", header, rows[:9]),
        "validation_mismatched_file": write_rows(tmp_path / "mm.tsv", header, rows[9:15]),
        "test_file": write_rows(tmp_path / "test.tsv", header[:2], [row[:2] for row in rows[:5]]),
    }
    out = tmp_path / "out"
    flags = ("--do_train", "--do_eval", "--do_predict", "--pad_to_max_length")
    run_glue.main(
        arguments(model_dir, out, *flags, task_name="mnli", max_eval_samples=8, max_steps=2, **files)
    )
    metrics = read_json(out / "eval_results.json")
    assert (metrics["eval_samples"], metrics["eval_samples_mm"]) == (8, 6)
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_loss_mm"} <= set(metrics)
    lines = (out / "predict_results_test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == list("01234")
    assert {line.split("\t")[1] for line in lines[1:]} <= set(TASKS["mnli"].labels)


def test_stsb_is_a_regression(model_dir, tmp_path):
    header = ["sentence1", "sentence2", "score"]
    texts, labels = sentences(16, 3)
    rows = [[text, text, f"{5 * label}.000"] for text, label in zip(texts, labels, strict=True)]
    path = write_rows(tmp_path / "train.tsv", header, rows)
    files = {"train_file": path, "validation_file": path, "test_file": path}
    out = tmp_path / "out"
    metrics = run_glue.main(
        arguments(
            model_dir, out, "--do_train", "--do_eval", "--do_predict", task_name="stsb", max_steps=2, **files
        )
    )
    assert {"eval_pearson", "eval_spearmanr", "eval_combined_score"} <= set(metrics)
    config = read_json(out / "config.json")
    assert config["problem_type"] == "regression"
    float((out / "predict_results_test.tsv").read_text().splitlines()[1].split("\t")[1])


def test_a_checkpoint_keeps_its_own_numbering_of_the_classes(sst2, tmp_path):
    tokenizer = word_tokenizer()
    torch.manual_seed(1)
    model = small_roberta(len(tokenizer), hidden=32, layers=1)
    accuracies = []
    for number, names in enumerate((["negative", "positive"], ["POSITIVE", "NEGATIVE"])):
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: index for index, name in enumerate(names)}
        if number:
            for value in (model.classifier.out_proj.weight, model.classifier.out_proj.bias):
                value.data = value.data.flip(0)
        model.save_pretrained(tmp_path / str(number))
        tokenizer.save_pretrained(tmp_path / str(number))
        flags = sst2_arguments(str(tmp_path / str(number)), sst2, tmp_path / f"out{number}", "--do_eval")
        accuracies.append(run_glue.main(flags)["eval_accuracy"])
    assert accuracies[0] == accuracies[1]


def test_an_own_task_is_predicted_without_a_training_file(model_dir, tmp_path):
    train = write_rows(
        tmp_path / "train.csv", ["text", "label"], [["the plot was good", "ham"], ["bad", "spam"]]
    )
    out = tmp_path / "own"
    run_glue.main(arguments(model_dir, out, "--do_train", train_file=train, max_steps=1))
    test = write_rows(tmp_path / "test.csv", ["text"], [["good"], ["bad"]])
    run_glue.main(arguments(str(out), out, "--do_predict", test_file=test))
    lines = (out / "predict_results_test.tsv").read_text().splitlines()
    assert {line.split("\t")[1] for line in lines[1:]} <= {"ham", "spam"}


@pytest.mark.parametrize(
    ("flags", "values", "message"),
    [
        ([], {}, "Nothing to do. Give --do_train, --do_eval or --do_predict"),
        (["--do_predict"], {}, "There is no test data; give --test_file. Splits at hand: train, validation"),
        (["--do_train"], {"task_name": "sst3"}, "Unknown task 'sst3'; the nearest is 'sst2'"),
        (["--do_train"], {"train_file": "none.tsv"}, "none.tsv: no such file"),
        (
            ["--do_train"],
            {"resume_from_checkpoint": "True"},
            "--resume_from_checkpoint True: there is no checkpoint",
        ),
    ],
)
def test_bad_arguments(flags, values, message, model_dir, sst2, tmp_path):
    with pytest.raises(DataError, match=message):
        run_glue.main(sst2_arguments(model_dir, sst2, tmp_path / "out", *flags, **values))


def test_neither_task_nor_file(model_dir, tmp_path):
    with pytest.raises(DataError, match="Give --task_name, or --train_file and --validation_file"):
        run_glue.main(arguments(model_dir, tmp_path / "out", "--do_train"))


def test_the_script_knows_nothing_of_our_classes():
    for name in ("run_glue.py", "glue_data.py", "glue_tasks.py"):
        text = (ROOT / "examples" / name).read_text()
        assert "forge_hf" not in text
        assert "Forge" not in text
