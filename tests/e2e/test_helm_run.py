"""Real `helm-run` and `flexgen-helm run` in processes of their own, on the fake engine."""

import json
import re
import signal
import time

import pytest
import yaml

from flexgen_helm.plugin.registration import CLIENT_CLASS
from flexgen_helm.scenarios import lambada
from tests.helpers.forks import python
from tests.helpers.helm_runs import ENTRIES, MODEL, Place, stats_of
from tests.helpers.real_runs import flexgen_helm

REQUESTS = 6 + 12  # of six instances: one request each, and one for each of two answers


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished `helm-run -n 4`, of a process that begins with nothing."""
    place = Place(tmp_path_factory.mktemp("plain"), is_cold=True)
    place.run("run", "-n", "4")
    place.python = python("all")
    return place


def test_a_plain_run_batches_and_reports(plain):
    events = plain.events()
    assert (events["load"], events["block"]) == (1, 2)
    for name in ("simple_mcqa", "simple_mcqa_scored"):
        folder = plain.run_folder(name)
        record = json.loads((folder / "flexgen_run.json").read_text())
        stats = {s["name"]["name"]: s for s in json.loads((folder / "stats.json").read_text())}
        assert stats["flexgen_padded_throughput"]["mean"] == pytest.approx(
            record["padded_throughput"]
        )
        assert stats["flexgen_efficiency"]["name"]["split"] == "test"
        assert (
            0 < record["efficiency"] < 1
            and record["policy"] == "fake"
            and record["precision"] == "fp16"
        )
        assert record["workload"]["num_requests"] == (6 if name == "simple_mcqa" else 12)
        assert set(record["wall_s"]) == {"data", "adapt", "load", "generate", "metrics"}
        assert stats["exact_match"]["count"] == 1
    generated = stats_of(plain.run_folder("simple_mcqa"))
    assert {"finish_reason_length", "finish_reason_stop"} & set(generated)


def test_every_prompt_is_encoded_once(tmp_path):
    """Though HELM fits it to the window and counts its tokens, and both passes of a suite make
    it.
    """
    place = Place(tmp_path)
    place.run("suite")
    encodings = place.encodings()
    prompts = {
        state["request"]["prompt"]
        for run in (tmp_path / "benchmark_output" / "runs" / "s").glob("*model=*")
        for state in json.loads((run / "scenario_state.json").read_text())["request_states"]
    }
    assert len(prompts) == REQUESTS and {encodings[prompt] for prompt in prompts} == {1}


def write_deployments(place, *entries):
    """Entries of a user in `prod_env`, each with our client."""
    path = place.folder / "prod_env" / "model_deployments.yaml"
    path.parent.mkdir()
    complete = [
        {**entry, "client_spec": {"class_name": CLIENT_CLASS, "args": entry["client_spec"]}}
        for entry in entries
    ]
    path.write_text(yaml.safe_dump({"model_deployments": complete}))
    return path


def test_an_entry_of_the_user_needs_only_a_name_and_a_path(tmp_path, monkeypatch):
    """LAMBADA asks for the window service and the tokenizer that the entry leaves open."""
    name = "lab/mine"
    (tmp_path / lambada.FILE).write_text('{"text": "one two three"}\n{"text": "four five six"}\n')
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    place = Place(tmp_path)
    path = write_deployments(place, {"name": name, "client_spec": {"path": "opt-125m"}})
    before = path.read_text()
    place.run("suite", entries=[f"lambada:mode=accuracy,model={name}"])
    assert place.events()["answer"] == 2
    assert path.read_text() == before


def run_in(place, precision, name, expect):
    """Run a model of the folder's `models.yaml` in a precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_MODELS", str(place.folder / "models.yaml"))
        return place.run(
            "suite", "--precision", precision, entries=[f"simple_mcqa:model={name}"], expect=expect
        )


@pytest.mark.parametrize(
    "name, own, refused, taken",
    [
        ("lab/mine", "fp16", ["fp16,4bit", "paper-4bit"], "fp16"),
        pytest.param(
            "flexgen/small", "4bit", ["fp16,4bit", "fp16"], "4bit", marks=pytest.mark.slow
        ),
    ],
)
def test_a_precision_that_an_entry_decides_is_not_dropped_or_mislabelled(
    name, own, refused, taken, tmp_path
):
    place = Place(tmp_path)
    (tmp_path / "models.yaml").write_text("small: {path: opt-125m, precision: 4bit}\n")
    write_deployments(
        place,
        {"name": "lab/mine", "client_spec": {"path": "opt-125m"}},
        {"name": "flexgen/mine", "client_spec": {"path": "opt-125m"}},
        {"name": "lab/packed", "client_spec": {"path": "opt-125m", "precision": "4bit"}},
    )
    for precision in refused:
        said = run_in(place, precision, name, expect=2)
        assert f"--precision {precision} cannot change {name}" in said.splitlines()[-1]
        assert f"says is {own}; " in said.splitlines()[-1]
    assert place.events() == {}
    run_in(place, taken, name, expect=0)
    (file,) = (tmp_path / "benchmark_output" / "runs" / "s").glob("*/flexgen_run.json")
    assert json.loads(file.read_text())["precision"] == taken


def test_precisions_of_a_name_without_one_are_runs_of_their_own(tmp_path):
    place = Place(tmp_path)
    (tmp_path / "models.yaml").write_text("mine: opt-125m\n")
    run_in(place, "fp16,4bit", "flexgen/mine", expect=0)
    files = (tmp_path / "benchmark_output" / "runs" / "s").glob("*/flexgen_run.json")
    found = {
        file.parent.name.split("_", 2)[-1]: json.loads(file.read_text())["precision"]
        for file in files
    }
    assert found == {"mine": "fp16", "mine-4bit": "4bit"}


def test_a_run_whose_folder_cannot_be_named_is_refused(tmp_path):
    place = Place(tmp_path)
    (tmp_path / "models.yaml").write_text(f"{'m' * 240}: opt-125m\n")
    said = run_in(place, "fp16", f"flexgen/{'m' * 240}", expect=2).splitlines()[-1]
    assert "has 266 bytes; 255 are possible: shorten" in said and place.events() == {}


def test_a_suite_is_one_block_and_equals_plain_runs(plain, tmp_path):
    place = Place(tmp_path)
    output = place.run("suite", "-n", "4")
    events = place.events()
    assert (events["load"], events["block"]) == (1, 1), output
    assert place.results() == plain.results()
    suite = json.loads((tmp_path / "benchmark_output/runs/s/flexgen_suite.json").read_text())
    assert (
        len(suite["runs"]) == 2 and suite["totals"]["workload"]["num_requests"] == events["answer"]
    )
    assert suite["models"]["opt-125m"]["schedule"] == "row"
    wall = suite["wall_s"]
    assert set(wall) == {"total", "collect", "load", "generate", "finish"}
    assert 0 < sum(wall.values()) - wall["total"] < wall["total"]
    assert f"name: {MODEL}" in (tmp_path / "prod_env/model_deployments.yaml").read_text()

    # Completed runs are skipped without a model, and a run that lost a file is not completed.
    place.run("suite", "--skip-completed-runs")
    assert place.events() == {}
    (place.run_folder("simple_mcqa") / "per_instance_stats.json").unlink()
    place.run("suite", "--skip-completed-runs")
    # its results were in the response cache, and the model is not needed for them
    assert place.events() == {}


def test_a_rerun_computes_nothing_unless_the_cache_is_disabled(plain):
    before, _ = plain.results(), plain.events()
    plain.run("run")
    assert plain.events()["answer"] == 0
    assert plain.results() == before
    assert (
        json.loads((plain.run_folder("simple_mcqa") / "flexgen_run.json").read_text())["num_reused"]
        == 6
    )
    plain.run("run", "--disable-cache")
    assert plain.events()["answer"] == REQUESTS
    assert plain.results() == before


def test_a_folder_has_one_run(tmp_path):
    """HELM leaves most arguments of an entry out of the run's name."""
    place = Place(tmp_path)
    output = place.run("suite", "--suite", "x/y", entries=[ENTRIES[0], ENTRIES[0]])
    assert "1 run of the same name and content as another: each is made once" in output
    assert place.events()["answer"] == 6 and "flexgen-helm report --suite x/y" in output
    output = place.run(
        "suite", entries=[ENTRIES[0], f"{ENTRIES[0]},increase_max_tokens=30"], expect=2
    )
    said = output.splitlines()[-1]
    assert (
        f"two run entries make runs of one name, {ENTRIES[0].replace('/', '_')}, which differ "
        "(max_tokens 5" in said
    )
    assert place.events()["answer"] == 0
    output = place.run(
        "suite", "--suite", "x/y", "-t", "2", "--skip-completed-runs", entries=ENTRIES[:1]
    )
    assert "was completed with other settings (-t 1, now 2) and is kept" in " ".join(output.split())
    assert place.events()["answer"] == 0


@pytest.mark.slow
def test_a_dry_run_loads_no_engine(tmp_path):
    place = Place(tmp_path)
    for kind in ("suite", "run"):
        place.run(kind, "--dry-run", entries=ENTRIES[:1])
        assert place.events() == {}
        assert (place.run_folder("simple_mcqa") / "dry_run" / "stats.json").is_file()
    # It neither passes for results nor replaces them.
    place.run("suite", "--skip-completed-runs", entries=ENTRIES[:1])
    assert (
        place.events()["answer"]
        and (place.run_folder("simple_mcqa") / "flexgen_run.json").is_file()
    )
    before = {path: path.read_bytes() for path in place.run_folder("simple_mcqa").glob("*.json")}
    place.run("suite", "--dry-run", entries=ENTRIES[:1])
    assert before == {
        path: path.read_bytes() for path in place.run_folder("simple_mcqa").glob("*.json")
    }


@pytest.mark.parametrize(
    "kind, threads, code",
    [("run", "1", None), ("suite", "4", 130)],
)
def test_ctrl_c_ends_soon_and_the_rerun_computes_the_rest(kind, threads, code, tmp_path, plain):
    place = Place(tmp_path)
    arguments = ("-r", *ENTRIES, "-m", "6", "--suite", "s", "-n", threads)
    process = place.start(kind, *arguments, delay_s=0.4)
    limit = time.monotonic() + 60
    while place.events(clear=False)["answer"] < 3 and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    output = process.communicate(timeout=30)[0]
    assert time.monotonic() - started < 10
    assert process.returncode != 0 and (code is None or process.returncode == code), output
    assert "Retrying" not in output
    first = place.events()["answer"]
    assert 3 <= first < REQUESTS
    if kind == "suite":
        said = re.search(r"interrupted: (\d+) of (\d+) answers are stored", output)
        assert (
            said
            and int(said[1]) <= first
            and int(said[2]) == REQUESTS
            and "Go on with:\n  flexgen-helm" in output
        )
    place.run(kind, "-n", threads)
    assert place.events()["answer"] == REQUESTS - first
    assert place.results() == plain.results()


def test_what_goes_wrong_is_said_and_not_retried(tmp_path):
    place = Place(tmp_path)
    output = place.run("run", entries=["simple_mcqa:model=flexgen/opt-126m"], expect=1)
    assert "\nflexgen_helm: model 'opt-126m' is not known; did you mean opt-125m" in output
    assert "Traceback" not in output
    output = place.run("suite", entries=["simple_mcqa:model=flexgen/opt-126m"], expect=2)
    assert "did you mean opt-125m" in output.splitlines()[-1]
    assert place.events() == {}
    # HELM's own loop for prompts that have no room never ends.
    output = place.run("suite", entries=[f"{ENTRIES[0]},increase_max_tokens=4200"], expect=2)
    assert (
        "has 4,097 tokens, which leaves no prompt beside an answer of 4,205"
        in output.splitlines()[-1]
    )


def test_wrong_engine_flags_are_one_sentence_and_exit_code_2(tiny, tmp_path):
    """Of a model's own arguments: a model that can be run is run beside one that cannot."""
    entries = ["simple_mcqa:model=flexgen/good", "simple_mcqa_scored:model=flexgen/bad"]
    path = str(tiny("llama-untied-biases").path)
    models = {"good": path, "bad": {"path": path, "policy": "nonsense"}}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(models))
    done = flexgen_helm(tmp_path, "run", "-r", *entries, "-m", "2", "--suite", "s")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("flexgen-helm: ")]
    assert done.returncode == 2, done.stderr
    assert line.startswith(
        "flexgen-helm: simple_mcqa_scored:model=flexgen_bad: --policy 'nonsense'"
    )
    assert (Place(tmp_path).run_folder("simple_mcqa") / "stats.json").is_file()


def test_a_failing_run_does_not_keep_the_others(tmp_path):
    """BLEU's data cannot be fetched: results are stored, the message says what is missing, other
    runs are written.
    """
    place = Place(tmp_path)
    entries = [f"simple_short_answer_qa:model={MODEL}", ENTRIES[1]]
    output = place.run("suite", entries=entries, expect=1)
    assert "python -m nltk.downloader punkt" in output and "answers are stored" in output
    assert (place.run_folder("simple_mcqa_scored") / "stats.json").is_file()
    assert not (place.run_folder("simple_short_answer_qa") / "stats.json").exists()
    assert place.events()["block"] == 1
    suite = json.loads((tmp_path / "benchmark_output/runs/s/flexgen_suite.json").read_text())
    assert suite["runs"] == ["simple_mcqa_scored:model=flexgen_opt-125m"]
    assert suite["failed"] == ["simple_short_answer_qa:model=flexgen_opt-125m"]


def test_scores_are_shown_beside_a_run_whose_data_cannot_be_downloaded(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there
    place = Place(tmp_path)
    output = place.run("suite", entries=[f"boolq:model={MODEL}", *ENTRIES], expect=1)
    said = output.splitlines()[-1]
    assert said.startswith(
        f"flexgen-helm: boolq:model={MODEL.replace('/', '_')}: the scenario's data could not be"
    )
    assert "URLError" in said and "Copy it into benchmark_output/scenarios/boolq from" in said
    assert "2 runs in benchmark_output/runs/s" in output and "exact_match" in output
    # The files of a perturbation belong elsewhere.
    output = place.run("suite", entries=[f"{ENTRIES[0]},data_augmentation=canonical"], expect=2)
    assert "Copy it into benchmark_output/perturbations" in output.splitlines()[-1]
    # What a run that fails now left in an earlier call is not shown as this call's.
    place.run_folder("simple_mcqa_scored").rename(place.run_folder("boolq"))
    output = place.run("suite", entries=[f"boolq:model={MODEL}", ENTRIES[0]], expect=1)
    assert "1 run in benchmark_output/runs/s" in output
