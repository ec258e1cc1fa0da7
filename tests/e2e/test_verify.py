"""`flexgen-helm verify` on real runs: it says equal of what is, and finds one changed answer if it
is drawn.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import pytest

from flexgen_helm.cli import main
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.opening import fingerprint_elsewhere
from flexgen_helm.report.verification import drawn_numbers, packed_bundle, read_bundle
from tests.helpers.chat_models import CHATML
from tests.helpers.data_sets import FAKE_PASSAGES, PAGES, write_data
from tests.helpers.real_runs import flexgen_helm, pass_answers, run_suite
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

ENTRIES = (
    "simple_classification:",
    "simple_mcqa_scored:",
    "lambada:mode=accuracy,",
    "lambada:mode=perplexity,",
    "wikitext:max_length=50,",
)
RUN = "lambada:mode=accuracy,model=flexgen_tiny"
DRAWS_1 = 21  # of five answers this seed draws the second one, and 0 does not


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    # Every token has a text, as those have that models are trained with.
    save_random(
        folder / "model", llama_config(max_position_embeddings=3000, vocab_size=315), seed=5
    )
    save_tokenizer(folder / "model")
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": CHATML})
    )
    write_data(folder / "data", FAKE_PASSAGES, PAGES)
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(folder / "model")}}))
    return folder


@pytest.fixture(scope="module")
def suite(folder):
    entries = [f"{entry}model=flexgen/tiny" for entry in ENTRIES]
    return run_suite(
        folder,
        *entries,
        instances=5,
        more=("--precision", "fp16,8bit", "--system-prompt", "Be brief.", "--batch-invariant"),
    )


@pytest.fixture
def verify(folder, suite):
    return partial(flexgen_helm, folder, "verify")


def changed(suite, change, file="scenario_state.json", of=RUN):
    """Name of a suite with one FP16 run, whose file is changed."""
    copy = suite.with_name("changed")
    shutil.rmtree(copy, ignore_errors=True)
    (run,) = (path for path in suite.glob(f"{of}*") if not path.name.endswith("8bit"))
    shutil.copytree(run, copy / run.name)
    content = json.loads((run / file).read_text())
    change(content)
    (copy / run.name / file).write_text(json.dumps(content, indent=2))
    return copy.name


def test_what_was_computed_in_company_is_equal_alone(verify):
    done = verify("s", "--sample", "100%")
    assert done.returncode == 0, done.stdout + done.stderr
    total = done.stdout.removeprefix("passed: ").partition(" of ")[0]
    assert done.stdout == (
        f"passed: {total} of {total} answers equal to the bit; these are all of the {total} "
        "answers of 's'\n"
        "scores, questions and references of 10 runs, made again, are equal\n"
    )
    done = verify("s", "--json")
    found = json.loads(done.stdout)
    assert (found["drawn"], found["different"]) == (20, 0) and found["population"] == int(
        total
    ) > 25
    assert found["bound"] == pytest.approx(1 - 0.05 ** (1 / 20))
    assert all(answer["equal"] and answer["tolerance"] == 0 for answer in found["answers"])


def _text(completion):
    completion["text"] += "!"


def _last_bit(completion):
    completion["tokens"][2]["logprob"] = math.nextafter(completion["tokens"][2]["logprob"], 0)


def _sum(completion):
    completion["logprob"] += 1e-12


@pytest.mark.parametrize("change", [_text, _last_bit, _sum])
def test_a_changed_answer_is_found_where_it_is_drawn(verify, suite, change):
    name = changed(
        suite, lambda content: change(content["request_states"][1]["result"]["completions"][0])
    )
    done = verify(name, "--sample", "100%", "--bundle", "b.jsonl.zst")
    assert done.returncode == 1 and "b.jsonl.zst is not written" in done.stderr, (
        done.stdout + done.stderr
    )
    lines = done.stdout.splitlines()
    assert (
        " differs at " in lines[1]
        and lines[2].startswith("  prompt    '")
        and lines[3].startswith("  recorded  ")
    )
    assert (
        lines[0]
        == "failed: 4 of 5 answers equal to the bit; these are all of the 5 answers of 'changed'"
    )
    for seed in (0, DRAWS_1) if change is _text else ():
        done = verify(name, "--sample", "1", "--seed", str(seed))
        assert done.returncode == (seed == DRAWS_1)


CHOICE, CLASS = "simple_mcqa_scored", "simple_classification"
STATES, STATS, INSTANCES = "scenario_state.json", "stats.json", "per_instance_stats.json"
SPEC, RECORD = "run_spec.json", "flexgen_run.json"


def put(path, value):
    """A change of a file: what is at a path, or of the second request; value: or what makes it of
    the old one.
    """

    def change(content):
        if (
            isinstance(content, dict)
            and path.partition(".")[0] not in content
            and "request_states" in content
        ):
            content = content["request_states"][1]
        *where, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in where:
            content = content[key]
        content[last] = value(content[last]) if callable(value) else value

    return change


def swap_answers(content):
    first, second, *_ = content["request_states"]
    first["result"], second["result"] = second["result"], first["result"]


def swap_right(content):
    for one in content["request_states"]:
        for reference in one["instance"]["references"]:
            reference["tags"] = [] if reference["tags"] else ["correct"]


def perfect(rows):
    for row in rows:
        for stat in row.get("stats", [row]):
            if stat["name"]["name"] == "exact_match":
                stat.update(mean=1.0, sum=float(stat["count"]))


def invented(rows):
    rows.append({"name": {"name": "f1"}, "mean": 1.0})


# Of a run and a file of it: what is changed, and what verify says.
FORGERIES = {
    (CLASS, STATS): [
        (perfect, "stats.json: exact_match test.mean is 1.0 in the file, and 0.0 made again"),
        (invented, "stats.json: f1.mean is 1.0 in the file, and nothing made again"),
        (
            lambda rows: rows.pop(0),
            "num_references test.mean is nothing in the file, and 2.0 made again",
        ),
    ],
    (CLASS, INSTANCES): [(perfect, "per_instance_stats.json: exact_match test, instance_id id")],
    (CHOICE, STATES): [
        (swap_right, "instance.references[0].tags"),
        (
            put("instance.references.0.output.text", "Odd!"),
            "text is 'Odd!' in the file, and 'Even' made again",
        ),
        (
            put("instance.input.text", "1+1?"),
            "reference 1, mode original: instance.input.text is '1+1?' in the file",
        ),
        (put("reference_index", 0), "1 answers are there more than once: 'simple_mcqa_scored"),
        (
            put("reference_index", 7),
            "reference 7, mode original is there 1 times, 0 as HELM makes it",
        ),
        (
            put("request.prompt", "Say Even"),
            "request.prompt is 'Say Even' in the file, and 'Question",
        ),
        (put("request_states", lambda states: states[1:]), "reference 0, mode original is missing"),
    ],
    (CLASS, STATES): [
        (
            put("instance.split", "train"),
            "instance.split is 'train' in the file, and 'test' made again",
        ),
        (put("instance.id", "id9"), "instance id9 is there 1 times, 0 as HELM makes it"),
        (
            put("output_mapping", {"A": "x"}),
            "output_mapping.A is 'x' in the file, and nothing made again",
        ),
        (
            put("request.temperature", 0.5),
            "request.temperature is 0.5 in the file, and 0.0 made again",
        ),
        (
            put("request.model", "flexgen/x"),
            "request.model is 'flexgen/x' in the file, and 'flexgen/tiny",
        ),
        (put("request.max_tokens", 9), "request.max_tokens is 9 in the file"),
        (put("request.stop_sequences", ["z"]), "request.stop_sequences[0] is 'z' in the file"),
        (put("request.random", "9"), "request.random is '9' in the file, and nothing made again"),
        (put("num_train_instances", 9), "num_train_instances is 9 in the file"),
        (put("request_states", lambda states: states[:2]), " is missing"),
        (
            put("request_states", lambda states: states[:1] * 300),
            "1 answers are there more than once",
        ),
        (put("result.success", False), "is marked as failed, and has an answer"),
        (put("result.completions", []), "cannot be computed from the answers ("),
        (
            put("result.completions", lambda one: one * 2),
            "(Result must contain exactly one completion)",
        ),
        (put("result.completions.0.finish_reason.reason", "stop"), "stats.json: finish_reason_"),
        (swap_answers, "per_instance_stats.json: "),
    ],
    (CLASS, SPEC): [
        (put("adapter_spec.max_eval_instances", 3), "is there 1 times, 0 as HELM makes it"),
        (
            put("adapter_spec.instructions", "Say Yes"),
            "adapter_spec.instructions is 'Say Yes' in the file",
        ),
        (put("metric_specs", lambda specs: specs[1:]), "run_spec.json: metric_specs[0]"),
        (
            put("scenario_spec.class_name", "subprocess.run"),
            "scenario_spec.class_name is 'subprocess.run' in the file",
        ),
    ],
    (CLASS, RECORD): [
        (
            put("entry", f"{CHOICE}:model=flexgen/tiny"),
            "HELM makes no run of that name of its entry",
        ),
        (
            put("sample", {"seed": 0, "instances": 4, "of": 5}),
            "is there 1 times, 0 as HELM makes it",
        ),
    ],
}


@pytest.fixture
def verify_scores(folder, monkeypatch, capsys):
    """Verify in this process, but for the answers, which would need the engine."""
    pass_answers(monkeypatch)
    for name, path in (("HOME", "home"), ("DATA", "data"), ("MODELS", "models.yaml")):
        monkeypatch.setenv(f"FLEXGEN_HELM_{name}", str(folder / path))
    monkeypatch.chdir(folder)

    def verify(name):
        code = main(["verify", name])
        return code, "".join(capsys.readouterr())

    return verify


@pytest.mark.parametrize("of, file", FORGERIES)
def test_forgeries_are_named(verify_scores, suite, of, file):
    for change, sentence in FORGERIES[of, file]:
        code, said = verify_scores(changed(suite, change, file, of))
        assert code == 1 and sentence in said, said


def test_of_a_run_whose_data_is_not_here_the_digest_is_compared(
    verify_scores, suite, folder, monkeypatch
):
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(folder / "none"))
    code, said = verify_scores(changed(suite, lambda content: None))
    assert code == 0 and said.startswith("passed, as far as it was checked: ")
    assert "made again, are equal\nnot checked: questions and references of lambada" in said
    assert "but by the digest in flexgen_run.json (" in said
    code, said = verify_scores(changed(suite, put("instance.references.0.output.text", "x")))
    assert code == 1 and "its questions or references are not those of flexgen_run.json" in said
    code, said = verify_scores(changed(suite, put("asked", None), RECORD))
    assert code == 0 and "digest" not in said
    name = changed(suite, perfect, STATS)
    code, said = verify_scores(name)
    assert code == 1 and "exact_match test.mean is 1.0 in the file, and 0.0 made again" in said


def test_of_a_run_of_helm_run_the_name_is_the_entry(verify_scores, suite):
    name = changed(suite, put("entry", None), RECORD, CLASS)
    code, said = verify_scores(name)
    assert code == 0 and "not checked" not in said
    (run,) = suite.with_name(name).iterdir()
    for file in (SPEC, STATS):
        content = json.loads((run / file).read_text())
        perfect(content) if file == STATS else put("adapter_spec.output_prefix", "Say: ")(content)
        (run / file).write_text(json.dumps(content))
        code, said = verify_scores(name)
        # With another prefix HELM makes other prompts.
        assert (
            code == 1
            and "request.prompt is '" in said
            and "not checked: whether HELM asks simple_class" in said
        )


def test_a_metric_that_asks_a_service_is_named(verify_scores, suite, monkeypatch):
    metric = "helm.benchmark.metrics.basic_metrics.InstancesPerSplitMetric"
    monkeypatch.setattr(
        f"{metric}.evaluate", lambda self, state, service, *_: service.get_toxicity_scores(None)
    )
    code, said = verify_scores(changed(suite, lambda content: None, of=CLASS))
    assert (
        code == 0
        and "not checked: num_instances of simple_classification:model=flexgen_tiny" in said
    )
    assert "stats.json (InstancesPerSplitMetric: it asks another model or a service)" in said


def test_files_that_are_cut_or_not_there(verify_scores, suite):
    name = changed(suite, lambda content: None)
    (run,) = suite.with_name(name).iterdir()
    for file, sentence in (
        (STATES, "cannot be read ("),
        (INSTANCES, "is damaged; make the run again"),
    ):
        text = (run / file).read_text()
        (run / file).write_text(text[: len(text) // 2])
        code, said = verify_scores(name)
        assert code == 1 and sentence in said, said
        (run / file).write_text(text)
    shutil.copytree(run, run.with_name("unfinished"))
    (run.with_name("unfinished") / INSTANCES).unlink()
    code, said = verify_scores(name)
    assert (
        code == 0 and "not checked: unfinished, which is not finished or of another client" in said
    )


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"hardware": {"name": "another"}}, "5 of 5 answers equal within 0.0001 (name: 'another' in the record, "),
        ({"versions": {"torch": "2.0.0"}}, "5 of 5 answers equal within 0.0001 (torch: '2.0.0' in the record, "),
        (
            {"hardware": {"device": "cuda:0", "compute_dtype": "float16"}, "batch_invariant": None, "fingerprint": ""},
            "passed: 5 of 5 answers equal within 0.0001 (the run had no --batch-invariant, ",
        ),
        (
            {"batch_invariant": ["z80", "0", "1"], "fingerprint": ""},
            "passed: 5 of 5 answers equal within 0.0001 (another kind of processor, ",
        ),
        ({"fingerprint": "0123456789abcdef"}, "has the fingerprint '0123456789ab' in the record and '"),
    ],
)  # fmt: skip
def test_records_of_other_machines(verify, suite, folder, change, sentence):
    def apply(record):
        for key, value in change.items():
            record[key] = {**record[key], **value} if isinstance(value, dict) else value
        if not record["fingerprint"]:
            options = EngineConfig(precision="fp16", system_prompt="Be brief.")
            device, dtype = (record["hardware"][key] for key in ("device", "compute_dtype"))
            bits = record["batch_invariant"] or ()
            record["fingerprint"] = fingerprint_elsewhere(
                str(folder / "model"), options, device, dtype, bits
            )

    done = verify(changed(suite, apply, "flexgen_run.json"), "--sample", "100%")
    assert sentence in done.stdout + done.stderr
    assert done.returncode == (1 if "has the" in sentence else 0)


@pytest.mark.slow
def test_transformers_computes_the_same_and_finds_what_is_changed(verify, suite):
    def change(content):
        completion = content["request_states"][2]["result"]["completions"][0]
        completion["tokens"][-1]["text"] = "q"
        completion["text"] = "".join(token["text"] for token in completion["tokens"])

    done = verify("s", "--with", "transformers", "--sample", "100%")
    assert done.returncode == 2 and "8bit is another model; leave --with out" in done.stderr
    for path in list(suite.glob("*8bit")):
        shutil.move(path, suite.parent.parent / path.name)
    done = verify("s", "--with", "transformers", "--sample", "100%")
    for path in suite.parent.parent.glob("*8bit"):
        shutil.move(path, suite / path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "answers equal within 0.001 (by transformers in float32; the largest difference is "
        in done.stdout
    )
    done = verify(changed(suite, change), "--with", "transformers", "--sample", "100%")
    assert done.returncode == 1 and "failed: 4 of 5 answers equal within 0.001" in done.stdout
    assert "differs at '[0].text'" in done.stdout


@pytest.mark.slow
def test_a_stranger_checks_a_bundle(verify, suite, folder, tmp_path):
    path = tmp_path / "s.jsonl.zst"
    done = verify("s", "--sample", "15", "--bundle", str(path))
    assert done.returncode == 0, done.stderr
    assert f"{path} is written" in done.stderr
    population = done.stdout.split(" of the ")[1].split()[0]
    bundle = str(path)
    done = verify(bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "passed: 15 of 15 answers equal to the bit; who wrote the bundle chose them and says that "
        f"they are of the {population} answers of 's', whose scores it has not; if drawn at "
        "random, with 95 % confidence at most 19 % differ\n"
    )
    named = verify(bundle, "--sample", "3", "--model", str(folder / "model"))
    assert named.returncode == 0 and named.stdout.startswith(
        "passed: 3 of 3 answers equal to the bit; who"
    )
    manifest, drawn = read_bundle(path)
    for change, why in (
        ({"fingerprint": "0" * 64}, "has the fingerprint '000000000000' in the record"),
        ({"model": "nobody--nothing"}, "the bundle's model 'nobody--nothing' from "),
        ({"precision": "x"}, "precision 'x' is not available"),
        ({"model": "model"}, "the bundle's model 'model' from "),  # a folder where the command runs
    ):
        lies = replace(manifest, sources=[replace(source, **change) for source in manifest.sources])
        path.write_bytes(packed_bundle(lies, drawn))
        done = verify(bundle)
        assert done.returncode == 1 and why in done.stderr and len(done.stderr.splitlines()) < 12, (
            done.stderr
        )
    odd = {
        "hardware": {"device": "cpu", "name": "x" * 9999, "loops": 3},
        "chat_template": {"kwargs": 5},
        "versions": {"torch": 1},
    }
    path.write_bytes(
        packed_bundle(
            replace(manifest, sources=[replace(source, **odd) for source in manifest.sources]),
            drawn,
        )
    )
    done = verify(bundle)
    assert (
        done.returncode == 0
        and "equal within 0.0001 (name: 'xxx" in done.stdout
        and len(done.stdout) < 999
    ), done.stdout
    one = replace(drawn[0], number=drawn_numbers(0, manifest.population, 1)[0])
    requests = [replace(request, prompt_token_ids=[1 << 40]) for request in one.requests]
    path.write_bytes(packed_bundle(manifest, [replace(one, requests=requests)]))
    done = verify(bundle)
    assert done.returncode == 1 and "cannot be computed" in done.stderr


def test_a_gpu_compares_within_a_tolerance(verify):
    """It refuses --batch-invariant, so it computes without; here one that is simulated."""
    done = verify("s", "--device", "sim", "--gpu-memory", "1GiB", "--sample", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(
        "passed: 4 of 4 answers equal within 0.0001 (another kind of processor, "
    )


def test_nothing_to_draw_from_is_refused(verify, suite):
    done = verify("nothing-there")
    assert done.returncode == 2 and "there is no suite in " in done.stderr
