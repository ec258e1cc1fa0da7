"""`flexgen-helm plan -c`: a newcomer's question, real prompts, and refusals."""

import csv
import io
import json
import math
import re
import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from flexgen_helm import cli
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.cli import suite_lengths
from flexgen_helm.cli.suite_lengths import PromptReader, made_prompts, prompts_of, stated_workload
from flexgen_helm.errors import UsageError
from flexgen_helm.report.paired import instances_needed
from flexgen_helm.run_entries import read_conf, without_model
from flexgen_helm.service.models import ModelArguments
from tests.helpers.plan_process import plan

MACHINE = ("--model", "llama-2-70b", "--hardware", "rtx3090", "--cpu-memory", "60GB", "--disk", "2TB")
ROOT = Path(__file__).parents[2]


def test_all_of_helm_lite_is_one_command():
    done = plan("-c", "runs/helm_lite.conf", "-m", "5", *MACHINE, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    entries = [entry["entry"] for scenario in found["scenarios"] for entry in scenario["entries"]]
    assert sorted(entries) == sorted(without_model(entry) for entry in read_conf(ROOT / "runs" / "helm_lite.conf"))
    assert all(entry["source"] for scenario in found["scenarios"] for entry in scenario["entries"])
    low, high = found["total"]["range"]
    assert low < found["total"]["seconds"] < min(high, found["total"]["seconds_at_limit"])
    assert found["plan"]["feasible"]
    ways = found["as_one_run"], found["one_by_one"]
    assert found["total"]["seconds"] == min(way["seconds"] for way in ways)
    assert ways[1]["seconds"] == pytest.approx(sum(scenario["seconds"] for scenario in found["scenarios"]))
    words = [shlex.split(command) for command in found["commands"]]
    run = [
        word.replace("model=flexgen/llama-2-70b", "").replace(":,", ":").rstrip(":") for one in words for word in one
    ]
    assert set(entries) <= set(run), "the commands have all entries"
    assert all(one[:2] == ["flexgen-helm", "run"] and "--cpu-memory 60GB" in " ".join(one) for one in words)
    precisions = found["precisions"]
    assert list(precisions) == ["fp16", "8bit", "4bit"]
    total = {name: found["total"][name] for name in ("seconds", "range")}
    assert precisions["fp16"] == total and precisions["4bit"]["seconds"] < precisions["8bit"]["seconds"]
    for scenario in found["scenarios"]:
        assert scenario["range"][0] < scenario["seconds"] < scenario["range"][1]
    by_name = {scenario["scenario"]: scenario for scenario in found["scenarios"]}
    assert by_name["math"]["sequences"] == 7 * 5
    assert {entry["basis"] for entry in by_name["mmlu"]["entries"]} == {"measured", "assumed"}


def test_every_shipped_entry_has_lengths():
    """Also those that need a judge, which the files have as comments."""
    config = read_model_config("llama-2-70b")[0]
    for conf in (ROOT / "runs").glob("*.conf"):
        entries = re.findall(r'description: "(.*?)"', conf.read_text())
        assert entries, conf
        for entry in entries:
            assert stated_workload(without_model(entry), 100, config).expected.num_sequences >= 1, entry


def test_the_table_names_ranges_and_where_lengths_are_from():
    entries = ("-r", "gsm:model=flexgen/any", "-r", "med_qa:model=flexgen/any")
    shown = plan(*entries, "-m", "50", "--model", "opt-30b", "--hardware", "t4").stdout
    told = (
        "opt-30b on t4: 100 sequences",
        "Bound by the link: twice as fast saves ",
        "As one run: ",
        "The range: rates fitted to the paper's T4",
        "Measured once, gsm",
        "Assumed, med_qa: 6 ",
        "\nAllowed: 13.4 GiB ",
    )
    for words in (*told, "  flexgen-helm run -r gsm:model=flexgen/opt-30b "):
        assert words in shown
    time = r"[\d.]+ [a-z]+"
    words = rf"About {time} \({time} to {time}\) for 2 run entries in fp16; 8bit: {time}, 4bit: {time}\."
    assert re.fullmatch(words, shown.splitlines()[0])
    assert "processor" not in shown, "the GPU is called GPU"
    sampled = r"^A random sample, with --until or --hours, in 8 h 0 min: about [1-9][\d.]*% of the instances, at least "
    assert re.search(sampled, shown.splitlines()[-1])
    assert all(f"\n{name} " in shown for name in ("fp16", "8bit", "4bit")), "one table compares precisions"
    asked = plan(*entries, "-m", "50", "--model", "opt-125m", "--hardware", "t4", "--precision", "8bit").stdout
    assert "for 2 run entries in 8bit." in asked and "4bit" not in asked
    table = plan(*entries, "-m", "50", "--model", "opt-125m", "--hardware", "t4", "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["entries"] for row in rows] == ["gsm", "med_qa"] and [row["sequences"] for row in rows] == ["50", "50"]


def test_a_sample_is_told_before_it_is_drawn():
    """A share of every entry: that of the time, where a long suite has no beginnings."""
    entries = ("-r", "gsm:model=flexgen/any", "-r", "mmlu:subject=abstract_algebra", "--model", "opt-125m")
    machine = ("--hardware", "t4", "--precision", "fp16")
    whole = json.loads(plan(*entries, *machine, "--json").stdout)
    assert whole["sample"]["seconds"] == 8 * 3600 and whole["sample"]["share"] == 1.0
    hours = whole["as_one_run"]["seconds"] / 3600 / 2
    half = json.loads(plan(*entries, *machine, "--hours", str(hours), "--json").stdout)
    sample = half["sample"]
    assert 0.3 < sample["share"] < 0.7 and sample["least_share"] < sample["share"]
    assert f" --hours {hours:g}" in half["commands"][0] and len(half["commands"]) == 1
    for row, of in zip(sample["entries"], (1000, 111)):
        assert row["of"] == of and row["instances"] == math.ceil(sample["share"] * of)
        assert instances_needed(0.05, row["difference"]) == row["instances"]
    table = plan(*entries, *machine, "--until", "07:00").stdout
    assert re.search(r"\ngsm +1000 +1000 +", table) and "--until 07:00" in table


def test_stated_lengths_are_summed_by_hand():
    config = read_model_config("llama-2-70b")[0]
    gsm = stated_workload("gsm:follow_format_instructions=instruct", 200, config)
    assert gsm.basis == "measured" and gsm.shortest.prompt == gsm.longest.prompt
    assert gsm.expected.groups == ((1228, 129, 200),) and gsm.expected.saved_tokens == 199 * 1137
    assert (gsm.shortest.output, gsm.longest.output, gsm.limit.output) == (64, 258, 400)
    # An argument that the record does not know makes it an assumption, which is wider.
    assumed = stated_workload("gsm:max_train_instances=0", 200, config)
    assert assumed.basis == "assumed" and "max_train_instances=0" in assumed.source
    assert assumed.longest.groups == ((1842, 258, 200),) and assumed.shortest.prompt == 819
    # HELM leaves examples out where prompts do not fit: what is shared becomes less, and the instance stays.
    whole, cut = stated_workload("gsm", 200, replace(config, max_positions=9000)), replace(config, max_positions=900)
    short = stated_workload("gsm", 200, cut).expected
    assert short.prompt == 500 and short.prompt - short.saved_tokens / 199 == pytest.approx(91)
    assert whole.expected == gsm.expected
    # No more instances than there are; two requests and all tokens scored where choices are.
    assert stated_workload("mmlu:subject=abstract_algebra", 10**6, config).expected.num_sequences == 111
    scored = stated_workload("simple_mcqa_scored", 10, config).expected
    assert scored.num_sequences == 20 and scored.scored_tokens == 20 * 89 - 19 * 83


def state(prompt: str, reference: str, most: int = 20, **more) -> dict:
    request = {"model": "flexgen/some", "prompt": prompt, "temperature": 0.0, "num_completions": 1, "max_tokens": most,
               "stop_sequences": ["\n"], "echo_prompt": False}  # fmt: skip
    references = [{"output": {"text": "wrong"}, "tags": []}, {"output": {"text": reference}, "tags": ["correct"]}]
    return {"instance": {"id": prompt, "references": references}, "request": request, **more}


def write_run(output: Path, name: str, states: list[dict], inside: str = "dry_run", asked: int = 9) -> Path:
    file = output / "runs" / "s" / name / inside / "scenario_state.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"request_states": states}))
    (file.parent / "run_spec.json").write_text(json.dumps({"adapter_spec": {"max_eval_instances": asked}}))
    return file


EXAMPLES = "".join(f"Question: what is {number} times {number}?\nAnswer: {number * number}\n" for number in range(40))


def test_real_prompts_are_counted(tiny, tmp_path, monkeypatch, capsys):
    model = tiny("llama")
    arguments = "flexgen_helm.service.models.model_arguments"
    monkeypatch.setattr(arguments, lambda name, options: ModelArguments(name, str(model.path)))
    prompts = [f"{EXAMPLES}Question: is {word} a word?\nAnswer:" for word in ("apple", "ribbon", "zeal")]
    states = [state(prompt, "yes, it is") for prompt in prompts]
    file = write_run(tmp_path, "gsm:model=flexgen_some", states)
    config = replace(read_model_config("llama-2-70b")[0], max_positions=10**6)
    reader = PromptReader(config, "cuda", None)
    found = reader.workload("gsm", file, 1000)  # 9 were asked for, and the data has 3
    assert reader.workload("gsm", file, 2).expected.num_sequences == 2
    machine = ("--model", "opt-30b", "--hardware", "t4", "--precision", "4bit", "-o", str(tmp_path), "--suite", "s")
    assert cli.main(["plan", "-r", "gsm", *machine, "--json"]) == 0
    assert " -m 9 " in json.loads(capsys.readouterr().out)["commands"][0]
    cut = write_run(tmp_path, "gsm:k=1,model=flexgen_some", states, asked=3)
    with pytest.raises(UsageError, match="were made with -m 3; plan with -m 3, or make them with -m 4 in another"):
        reader.workload("gsm", cut, 4)
    entry = "gsm:max_eval_instances=3"
    assert replace(reader.workload("gsm", cut, 3), entry=entry) == reader.workload(entry, cut, 4)

    from tokenizers import Tokenizer as Backend

    encode = Backend.from_file(str(model.path / "tokenizer.json")).encode
    tokens = [encode(prompt).ids for prompt in prompts]
    nodes = set(chain.from_iterable((tuple(ids[: end + 1]) for end in range(len(ids))) for ids in tokens))
    answer = len(encode(" yes, it is", add_special_tokens=False).ids) + 1
    assert found.basis == "prompts" and found.expected.num_sequences == 3
    assert sorted(prompt for prompt, _, count in found.expected.groups for _ in range(count)) == sorted(
        map(len, tokens)
    )
    assert found.expected.saved_tokens == pytest.approx(sum(map(len, tokens)) - len(nodes), abs=3)
    assert found.expected.saved_tokens > 0.5 * sum(map(len, tokens))
    assert found.expected.output == min(20, answer) and found.limit.output == 20
    # Prompts that share nothing save nothing; a choice is a letter and its end; scored tokens pass the head.
    different = [state(f"{word} {EXAMPLES}", "x", output_mapping={"A": "x"}) for word in ("apple", "ribbon")]
    different[1]["request"] |= {"max_tokens": 0, "echo_prompt": True}
    alone = reader.workload("gsm", write_run(tmp_path, "gsm:k=2,model=flexgen_some", different), 9)
    assert alone.expected.saved_tokens <= 2 and {output for _, output, _ in alone.expected.groups} == {1, 2}
    assert alone.expected.scored_tokens > 0.9 * len(encode(EXAMPLES).ids)


def test_an_entry_finds_its_prompts_by_its_arguments(tmp_path):
    dry = write_run(tmp_path, "mmlu:subject=a,method=multiple_choice_joint,model=flexgen_x", [state("a", "b")])
    done = write_run(tmp_path, "gsm:model=flexgen_x", [state("a", "b")], inside=".")
    made = made_prompts(tmp_path / "runs" / "s")
    assert prompts_of("mmlu:subject=a", made) == dry
    assert prompts_of("gsm:follow_format_instructions=instruct", made) == done.parent / "scenario_state.json"
    assert prompts_of("mmlu:subject=b", made) is None and prompts_of("gsm:stop=none", made) is None
    from flexgen_helm.plugin.helm_patches import DRY_RUN_FOLDER

    assert suite_lengths.DRY_RUN_FOLDER == DRY_RUN_FOLDER


def test_prompts_of_other_clients_and_empty_files_are_refused(tmp_path):
    reader = PromptReader(read_model_config("llama-2-70b")[0], "cuda", None)
    foreign = state("a", "b")
    foreign["request"]["model"] = "openai/gpt2"
    with pytest.raises(UsageError, match="were made for openai/gpt2; plan reads those of models of flexgen/"):
        reader.workload("gsm", write_run(tmp_path, "gsm:model=openai_gpt2", [foreign]), 9)
    with pytest.raises(UsageError, match="has no requests; make the prompts again"):
        reader.workload("gsm", write_run(tmp_path, "gsm:model=flexgen_x", []), 9)
    (tmp_path / "runs" / "empty").mkdir()
    with pytest.raises(UsageError, match="has no prompts; make them with"):
        made_prompts(tmp_path / "runs" / "empty")


@pytest.mark.parametrize(
    "words, refusal",
    [
        (("-r", "mmlv:subject=a"), "the scenario 'mmlv' is not known; did you mean mmlu?"),
        (("-r", "bbq:subject=all"), "the lengths of 'bbq:subject=all' are not known; make its prompts with"),
        (("-c", "nope.conf"), "-c nope.conf: there is no such file; shipped are runs/accuracy.conf"),
        (("-r", "gsm", "--suite", "nope"), "there is no suite in benchmark_output/runs/nope; make its prompts"),
        (("-r", "gsm", "--gen-len", "3"), "run entries have their own lengths"),
        (("-m", "5"), "-m, --suite, --until and --hours are for run entries; add -c FILE or -r ENTRY"),
        (("-r", "gsm", "--from-csv", "x.csv"), "--from-csv says for each row what to evaluate"),
    ],
)
def test_refusals_are_one_sentence(words, refusal, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["plan", "--model", "opt-30b", "--hardware", "t4", *words]) != 0
    assert refusal in capsys.readouterr().err
