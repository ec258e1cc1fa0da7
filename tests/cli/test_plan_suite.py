"""`flexgen-helm plan -c`: real prompts, and refusals."""

import json
import math
import re
import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from flexgen_helm import cli
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.cli.suite_workload import WorkloadReader, find_prompts, prompt_files
from flexgen_helm.errors import UsageError
from flexgen_helm.planner.suite_plan import suite_workload
from flexgen_helm.report.ratio_of_sums import instances_needed
from flexgen_helm.service.models import ModelArguments

MACHINE = [
    "--model",
    "llama-2-70b",
    "--hardware",
    "rtx3090",
    "--cpu-memory",
    "60GB",
    "--disk",
    "2TB",
]
ROOT = Path(__file__).parents[2]


def state(prompt, reference, most=20, **more):
    request = {"model": "flexgen/some", "prompt": prompt, "temperature": 0.0, "num_completions": 1, "max_tokens": most,
               "stop_sequences": ["\n"], "echo_prompt": False}  # fmt: skip
    references = [
        {"output": {"text": "wrong"}, "tags": []},
        {"output": {"text": reference}, "tags": ["correct"]},
    ]
    return {"instance": {"id": prompt, "references": references}, "request": request, **more}


def write_run(output, name, states, inside="dry_run", asked=9):
    file = output / "runs" / "s" / name / inside / "scenario_state.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"request_states": states}))
    (file.parent / "run_spec.json").write_text(
        json.dumps({"adapter_spec": {"max_eval_instances": asked}})
    )
    return file


EXAMPLES = "".join(
    f"Question: what is {number} times {number}?\nAnswer: {number * number}\n"
    for number in range(40)
)


ENTRIES = ("gsm", "mmlu:subject=a", "mmlu:model=flexgen/any,subject=b")


@pytest.fixture
def model(tiny, monkeypatch):
    """A model whose tokenizer counts."""
    found = tiny("llama")
    arguments = "flexgen_helm.service.models.model_arguments"
    monkeypatch.setattr(arguments, lambda name, options: ModelArguments(name, str(found.path)))
    return found


@pytest.fixture
def suite(model, tmp_path):
    """Flags of a suite whose prompts were made: 40 instances of gsm, 20 of mmlu in two subjects."""
    prompts = [f"{EXAMPLES}Question: what is {number}?\nAnswer:" for number in range(40)]
    states = [state(prompt, "it is two and two and five", 400) for prompt in prompts]
    write_run(tmp_path, "gsm:model=flexgen_some", states, asked=40)
    choices = [
        state(f"{EXAMPLES}{word}", "x", 1, output_mapping={"A": "x"}) for word in "abcdefghij"
    ]
    for subject in "ab":
        write_run(tmp_path, f"mmlu:subject={subject},model=flexgen_some", choices, asked=40)
    conf = tmp_path / "mine.conf"
    lines = [f'{{description: "{entry}", priority: 1}}' for entry in ENTRIES]
    conf.write_text("\n".join(["entries: [", *lines, "]"]))
    return ["-c", str(conf), "-o", str(tmp_path), "--suite", "s"]


def test_a_suite_is_one_command(suite, capsys):
    assert cli.main(["plan", *suite, *MACHINE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = [entry for scenario in found["scenarios"] for entry in scenario["entries"]]
    assert entries == ["gsm", "mmlu:subject=a", "mmlu:subject=b"]
    low, high = found["total"]["range"]
    assert low < found["total"]["seconds"] < min(high, found["total"]["seconds_at_limit"])
    ways = found["as_one_run"], found["one_by_one"]
    assert found["total"]["seconds"] == min(way["seconds"] for way in ways)
    alone = sum(scenario["seconds"] for scenario in found["scenarios"])
    assert ways[1]["seconds"] == pytest.approx(alone)
    words = [shlex.split(command) for command in found["commands"]]
    run = {word for one in words for word in one}
    named = "mmlu:model=flexgen/llama-2-70b,subject="
    assert {"gsm:model=flexgen/llama-2-70b", f"{named}a", f"{named}b"} <= run
    assert all(one[:2] == ["flexgen-helm", "run"] for one in words)
    assert all({"60GB", "40"} <= {*one} for one in words)
    precisions = found["precisions"]
    assert list(precisions) == ["fp16", "8bit", "4bit"]
    total = {name: found["total"][name] for name in ("seconds", "range")}
    assert precisions["fp16"] == total
    assert precisions["4bit"]["seconds"] < precisions["8bit"]["seconds"]
    assert [scenario["sequences"] for scenario in found["scenarios"]] == [40, 20]


@pytest.mark.parametrize("width", [60, 120])
def test_tables_name_ranges_and_compare_precisions(width, suite, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    cli.main(["plan", *suite, "--model", "opt-30b", "--hardware", "t4"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    folder = suite[suite.index("-o") + 1]  # a path is not cut
    assert all(len(line) <= width for line in lines if ":model=" not in line and folder not in line)
    told = (
        "opt-30b on t4: 60 sequences",
        "Bound by the link: twice as fast saves ",
        "As one run: ",
        " A random sample, with --until or --hours, in 8 h 0 min: about 100.0% of the instances, ",
        "The range: rates fitted to the paper's T4",
        " Allowed: 13.4 GiB ",
        " Answers are assumed as long as the references (range: 0.5 to 2 times).",
        " flexgen-helm run -r gsm:model=flexgen/opt-30b ",
    )
    joined = " ".join(shown.split())
    for words in told:
        assert words in joined
    time = r"[\d.]+ [a-z]+"
    words = (
        rf"About {time} \({time} to {time}\) for 3 run entries in fp16; 8bit: {time}, 4bit: "
        rf"{time}\."
    )
    assert re.match(words, joined)
    assert "processor" not in shown, "the GPU is called GPU"


def test_a_sample_is_told_before_it_is_drawn(suite, capsys):
    """A share of every entry: that of the time, where a long suite has no beginnings."""
    words = ["plan", *suite, *["--model", "opt-125m", "--hardware", "t4", "--precision", "fp16"]]
    cli.main([*words, "--json"])
    whole = json.loads(capsys.readouterr().out)
    assert whole["sample"]["seconds"] == 8 * 3600 and whole["sample"]["share"] == 1.0
    hours = whole["as_one_run"]["seconds"] / 3600 / 2
    cli.main([*words, "--hours", str(hours), "--json"])
    half = json.loads(capsys.readouterr().out)
    sample = half["sample"]
    assert 0.1 < sample["share"] < 0.9 and sample["least_share"] < sample["share"]
    assert f" --hours {hours:g}" in half["commands"][0] and len(half["commands"]) == 1
    for row, of in zip(sample["entries"], (40, 10, 10), strict=True):
        assert row["of"] == of and row["instances"] == math.ceil(sample["share"] * of)
        assert instances_needed(0.05, row["difference"]) == row["instances"]
    cli.main([*words, "--until", "07:00"])
    table = capsys.readouterr().out
    assert re.search(r"\ngsm +40 +40 +", table) and "--until 07:00" in table


def test_real_prompts_are_counted(model, tmp_path, capsys):
    prompts = [
        f"{EXAMPLES}Question: is {word} a word?\nAnswer:" for word in ("apple", "ribbon", "zeal")
    ]
    states = [state(prompt, "yes, it is") for prompt in prompts]
    file = write_run(tmp_path, "gsm:model=flexgen_some", states)
    config = replace(read_model_config("llama-2-70b")[0], max_positions=10**6)
    reader = WorkloadReader(config, "cuda", None)
    found = reader.workload("gsm", file, 1000, "")  # 9 were asked for, and the data has 3
    expected = suite_workload([found])
    assert suite_workload([reader.workload("gsm", file, 2, "")]).num_sequences == 2
    cut = write_run(tmp_path, "gsm:k=1,model=flexgen_some", states, asked=3)
    with pytest.raises(UsageError, match="were made with -m 3; plan with -m 3, or mend it"):
        reader.workload("gsm", cut, 4, "mend it")
    entry = "gsm:max_eval_instances=3"
    mine = replace(reader.workload("gsm", cut, 3, ""), entry=entry)
    assert mine == reader.workload(entry, cut, 4, "")
    short = WorkloadReader(replace(config, max_positions=len(EXAMPLES) // 20), "cuda", None)
    states[0]["request"]["prompt"] = "Question: is it?"
    left = short.workload("gsm", write_run(tmp_path, "gsm:k=3,model=flexgen_some", states), 9, "")
    assert len(left.lengths) == 1, "others are too long for the model"
    assert "gsm: 2 requests of 3 are too long for the model" in capsys.readouterr().err

    from tokenizers import Tokenizer as Backend

    encode = Backend.from_file(str(model.path / "tokenizer.json")).encode
    tokens = [encode(prompt).ids for prompt in prompts]
    nodes = set(
        chain.from_iterable((tuple(ids[: end + 1]) for end in range(len(ids))) for ids in tokens)
    )
    answer = len(encode(" yes, it is", add_special_tokens=False).ids) + 1
    assert found.instances == expected.num_sequences == 3
    assert sorted(prompt for prompt, _, _ in found.lengths) == sorted(map(len, tokens))
    assert found.saved_tokens == pytest.approx(sum(map(len, tokens)) - len(nodes), abs=3)
    assert found.saved_tokens > 0.5 * sum(map(len, tokens))
    assert {length[1:] for length in found.lengths} == {(min(20, answer), 20)}
    # Prompts that share nothing save nothing; a choice is a letter and its end; scored tokens pass
    # the head.
    different = [
        state(f"{word} {EXAMPLES}", "x", output_mapping={"A": "x"}) for word in ("apple", "ribbon")
    ]
    different[1]["request"] |= {"max_tokens": 0, "echo_prompt": True}
    alone = reader.workload(
        "gsm", write_run(tmp_path, "gsm:k=2,model=flexgen_some", different), 9, ""
    )
    assert alone.saved_tokens <= 2 and {answer for _, answer, _ in alone.lengths} == {1, 2}
    assert alone.scored_tokens > 0.9 * len(encode(EXAMPLES).ids)


def test_an_entry_finds_its_prompts_by_its_arguments(tmp_path):
    dry = write_run(
        tmp_path, "mmlu:subject=a,method=multiple_choice_joint,model=flexgen_x", [state("a", "b")]
    )
    done = write_run(tmp_path, "gsm:model=flexgen_x", [state("a", "b")], inside=".")
    made = prompt_files(tmp_path / "runs" / "s", "")
    assert find_prompts("mmlu:subject=a", made) == dry
    assert (
        find_prompts("gsm:follow_format_instructions=instruct", made)
        == done.parent / "scenario_state.json"
    )
    assert (
        find_prompts("mmlu:subject=b", made) is None and find_prompts("gsm:stop=none", made) is None
    )


def test_prompts_of_other_clients_and_empty_files_are_refused(tmp_path):
    reader = WorkloadReader(read_model_config("llama-2-70b")[0], "cuda", None)
    foreign = state("a", "b")
    foreign["request"]["model"] = "openai/gpt2"
    with pytest.raises(
        UsageError, match=("were made for openai/gpt2; plan reads those of models of flexgen/")
    ):
        reader.workload("gsm", write_run(tmp_path, "gsm:model=openai_gpt2", [foreign]), 9, "")
    with pytest.raises(UsageError, match="has no requests; mend it"):
        reader.workload("gsm", write_run(tmp_path, "gsm:model=flexgen_x", []), 9, "mend it")


@pytest.mark.parametrize(
    "words, refusal",
    [
        ("-r mmlv:subject=a", "the scenario 'mmlv' is not known; did you mean mmlu?"),
        (
            "-c runs/accuracy.conf -r gsm -m 20",
            "a suite's plan counts the requests that HELM has made; make its prompts with "
            "`flexgen-helm run --dry-run -c runs/accuracy.conf -r gsm:model=flexgen/opt-30b -m 20 "
            "--suite planned`, then plan with --suite planned",
        ),
        (
            "-c nope.conf",
            "-c nope.conf: there is no such file; shipped are runs/accuracy.conf",
        ),
        (
            "-r gsm --suite nope",
            "there is no suite in benchmark_output/runs/nope; make its prompts with",
        ),
        ("-r gsm --gen-len 3", "run entries have their own lengths"),
        (
            "-m 5",
            "-m, --suite, --until and --hours are for run entries; add -c FILE or -r ENTRY",
        ),
    ],
)
def test_refusals_are_one_sentence(words, refusal, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(f"plan --model opt-30b --hardware t4 {words}".split()) != 0
    assert refusal in capsys.readouterr().err


def test_an_entry_without_prompts_is_refused(suite, capsys):
    assert cli.main(["plan", *suite, *MACHINE, "-r", "mmlu:subject=c"]) != 0
    refused = capsys.readouterr().err
    assert (
        "/runs/s has no prompts of 'mmlu:subject=c'; make its prompts with `flexgen-helm run"
        in refused
    )
    assert "mmlu:model=flexgen/llama-2-70b,subject=c -m 1000 --suite s -o " in refused
