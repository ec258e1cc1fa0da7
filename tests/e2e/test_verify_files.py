"""`flexgen-helm verify` of what `batch` and `lm-eval` wrote: equal, unless one answer is changed
and drawn.
"""

from __future__ import annotations

import json
import math
import random
from functools import partial

import numpy as np
import pytest

from flexgen_helm.cli import main
from tests.helpers.chat_models import CHATML
from tests.helpers.lm_eval_tasks import (
    CHOICES,
    LAST_WORD,
    PAGES,
    SUMS,
    invented_tasks,
    leave_out_others,
)
from tests.helpers.real_runs import MAIN, flexgen_helm, pass_answers
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# As `leave_out_others`, in the process of the command.
FEW_TASKS = f"""
import lm_eval.tasks
make = lm_eval.tasks.TaskManager.__init__
lm_eval.tasks.TaskManager.__init__ = lambda self, *a, **k: make(self, *a, **{{**k, "include_defaults": False}})
import lm_eval.evaluator
lm_eval.evaluator.add_env_info = lambda results: None
{MAIN}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify_files")
    save_random(folder / "model", llama_config(vocab_size=315), seed=5)
    save_tokenizer(folder / "model")
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": CHATML})
    )
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(folder / "model")}}))
    return folder


@pytest.fixture
def run(folder):
    return partial(flexgen_helm, folder)


def requests(count):
    """Lines of all kinds: texts, token ids, chats, several prompts, drawn and greedy, with
    log-probabilities or not.
    """
    draw = random.Random(0)
    for number in range(count):
        body = {
            "model": "tiny",
            "max_tokens": draw.randint(1, 4),
            "temperature": draw.choice([0, 1]),
        }
        if number % 3 == 0:
            url = CHAT
            body |= {"messages": [{"role": "user", "content": f"say {number}"}]}
            body |= draw.choice([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}])
        else:
            url = TEXT
            body |= {
                "prompt": draw.choice([f"word {number}", [5, 6, 7 + number % 200], ["a b", "c"]])
            }
            body |= draw.choice(
                [
                    {},
                    {"logprobs": 2, "echo": True},
                    {"n": 2, "seed": 3},
                    {"stop": "e", "logprobs": 0},
                ]
            )
        yield {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def answered(folder):
    """200 lines with their answers."""
    write(folder / "in.jsonl", requests(200))
    done = flexgen_helm(folder, "batch", "in.jsonl", "-o", "out.jsonl", "--batch-invariant")
    assert done.returncode == 0, done.stderr
    return folder / "out.jsonl"


@pytest.mark.slow
def test_one_changed_answer_among_200_is_found_where_it_is_drawn(run, answered, folder):
    """As the sample's draw says, and the untouched file is accepted."""
    check = partial(run, "verify", "out.jsonl", "--requests", "in.jsonl", "--sample", "50")
    untouched, lines = answered.read_text(), lines_of(answered)
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (
        "passed: 50 of 50 answers equal to the bit; "
        "with 95 % confidence at most 5.9 % of the 200 answers of 'out.jsonl' "
        "differ\n"
    )
    drawn = {
        seed: set(np.random.default_rng(seed).choice(200, 50, replace=False).tolist())
        for seed in range(2)
    }
    planted = min(drawn[0] - drawn[1])
    choice = lines[planted]["response"]["body"]["choices"][-1]
    if "message" in choice:
        choice["message"]["content"] += "!"
    else:
        choice["text"] += "!"
    try:
        write(answered, lines)
        assert check("--seed", "1").returncode == 0
        done = check("--seed", "0")
    finally:
        answered.write_text(untouched)
    assert done.returncode == 1 and f"out.jsonl, r{planted}' differs at 'choices[" in done.stdout
    assert "failed: 49 of 50 answers equal to the bit" in done.stdout


def _message(body):
    body["choices"][0]["message"]["content"] += "x"


def _logprob(body):
    tokens = body["choices"][0]["logprobs"]["content"]
    tokens[0]["logprob"] = math.nextafter(tokens[0]["logprob"], 0)


def _usage(body):
    body["usage"]["total_tokens"] += 1


@pytest.fixture
def few(folder, answered, tmp_path):
    """Write 12 answers, changed or not, and the record; return arguments that check them."""

    def make(change=None, record=True):
        lines = lines_of(answered)[:12]
        if change is not None:
            number, change = change
            change(lines[number]["response"]["body"])
        write(tmp_path / "few.jsonl", lines)
        if record:
            (tmp_path / "few.jsonl.run.json").write_text(
                (folder / "out.jsonl.run.json").read_text()
            )
        return str(tmp_path / "few.jsonl"), "--requests", "in.jsonl", "--sample", "100%"

    return make


@pytest.mark.parametrize("change", [_message, _logprob, _usage])
def test_whatever_is_changed_of_an_answer_is_found(run, few, folder, change):
    asked = lines_of(folder / "in.jsonl")
    number = next(
        n for n in range(12) if asked[n]["url"] == CHAT and asked[n]["body"].get("logprobs")
    )
    done = run("verify", *few((number, change)))
    assert done.returncode == 1 and done.stdout.count(" differs at ") == 1, (
        done.stdout + done.stderr
    )
    assert (
        "failed: 11 of 12 answers equal to the bit; these are all of the 12 answers of 'few.jsonl'"
        in done.stdout
    )


@pytest.mark.slow
def test_answers_of_a_batch_by_transformers_and_for_a_stranger(run, few, tmp_path):
    bundle = str(tmp_path / "few.jsonl.zst")
    done = run("verify", *few(), "--with", "transformers", "--bundle", bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(
        "passed: 12 of 12 answers equal within 0.001 (by transformers in float32; "
    )
    for more, how in (
        ((), "equal to the bit"),
        (("--with", "transformers"), "equal within 0.001 (by transformers"),
    ):
        done = run("verify", bundle, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"passed: 12 of 12 answers {how}"), done.stdout


def test_what_lacks_its_record_or_its_requests_is_refused(run, few, folder, tmp_path):
    done = run("verify", few(record=False)[0], "--requests", "in.jsonl")
    assert done.returncode == 1 and "make it again with flexgen-helm batch" in done.stderr
    done = run("verify", few()[0])
    assert done.returncode == 1 and "answers of flexgen-helm batch need --requests" in done.stderr
    write(tmp_path / "in.jsonl", requests(5))
    done = run("verify", few()[0], "--requests", str(tmp_path / "in.jsonl"), "--sample", "100%")
    assert done.returncode == 2 and "in.jsonl is not what few.jsonl, r5, answers" in done.stderr
    (tmp_path / "few.jsonl").write_text('{"response": 5}\n')
    done = run("verify", str(tmp_path / "few.jsonl"), "--requests", "in.jsonl")
    assert done.returncode == 1 and "few.jsonl cannot be read (" in done.stderr


@pytest.fixture(scope="module")
def evaluated(folder):
    """The file of results of tasks of each kind; one draws at random, with repeated prompts."""
    tasks = invented_tasks(folder / "tasks", 8)
    task = json.loads((tasks / f"{SUMS}.yaml").read_text())
    task |= {"task": "drawn", "repeats": 2}
    task["generation_kwargs"] |= {"do_sample": True, "temperature": 1.0}
    task["filter_list"] += [{"name": "last", "filter": [{"function": "take_first"}]}]
    (tasks / "drawn.yaml").write_text(json.dumps(task))
    test = tasks / f"{SUMS}.jsonl"
    test.write_text(test.read_text().splitlines()[0] + "\n" + test.read_text())  # one prompt twice
    done = flexgen_helm(
        folder, "lm-eval", "--model_args", "pretrained=tiny,batch_invariant=True,max_length=90",
        "--include_path", str(tasks), "--tasks", CHOICES, LAST_WORD, PAGES, SUMS, "drawn",
        "--output_path", "out", "--log_samples", program=FEW_TASKS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,) = (folder / "out").rglob("results_*.json")
    return results


@pytest.fixture
def verify(folder, monkeypatch, capsys):
    """Verify in this process, where the engine has been imported."""
    for name, path in (("HOME", "home"), ("MODELS", "models.yaml")):
        monkeypatch.setenv(f"FLEXGEN_HELM_{name}", str(folder / path))
    monkeypatch.chdir(folder)
    leave_out_others(monkeypatch)

    def verify(*arguments):
        code = main(["verify", *map(str, arguments)])
        return code, "".join(capsys.readouterr())

    return verify


@pytest.mark.slow
def test_answers_of_lm_eval_are_equal(run, evaluated, tmp_path):
    path, bundle = str(evaluated), str(tmp_path / "b.jsonl.zst")
    done = run("verify", path, "--sample", "100%", "--bundle", bundle, program=FEW_TASKS)
    assert done.returncode == 0, done.stdout + done.stderr
    count = 8 + 8 + 8 + 9 + 9
    assert done.stdout == (
        f"passed: {count} of {count} answers equal to the bit; "
        f"these are all of the {count} answers of {evaluated.name!r}\n"
        "scores, questions and references of 1 run, made again, are equal\n"
    )
    done = run("verify", bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"passed: {count} of {count} answers equal to the bit")
    done = run("verify", path, "--sample", "100%", "--with", "transformers", program=FEW_TASKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"passed: {count} of {count} answers equal within 0.001 of each sum (by transformers in "
        "float32; the" in done.stdout
    )


def test_of_tasks_that_are_not_here_scores_are_not_checked(verify, evaluated, folder):
    (folder / "tasks").rename(folder / "elsewhere")
    code, said = verify(evaluated, "--sample", "1")
    (folder / "elsewhere").rename(folder / "tasks")
    assert code == 0 and "not checked: scores, questions and right answers of choices, " in said


def _put(*path):
    *where, last = path[:-1]

    def change(line):
        for key in where:
            line = line[key]
        line[last] = path[-1](line[last]) if callable(path[-1]) else path[-1]

    return change


def _next(text):
    return repr(math.nextafter(float(text), 0))


# Of a task: what is changed in the line of a document, and what verify says.
FORGERIES = [
    (CHOICES, _put("resps", 0, 0, 0, _next), " differs at '[0][0][0]'"),
    (LAST_WORD, _put("resps", 0, 0, 1, lambda old: str(old == "False")), " differs at '[0][0][1]'"),
    (PAGES, _put("resps", 0, 0, _next), " differs at '[0][0]'"),
    ("drawn", _put("resps", 0, -1, lambda old: old + "7"), " differs at '[0][1]'"),
    (
        SUMS,
        _put("exact_match", 1.0),
        "document 3, filter number: exact_match is 1.0 in the file, and 0.0 made again",
    ),
    (
        SUMS,
        _put("filtered_resps", ["7"]),
        "document 3, filter number: filtered_resps[0] is '7' in the file",
    ),
    (SUMS, _put("target", "7"), "document 3, filter number: target is '7' in the file"),
    (SUMS, _put("doc", "a", 77), "document 3, filter number: doc.a is 77 in the file"),
    (
        CHOICES,
        _put("arguments", "gen_args_0", "arg_0", "A"),
        "filter none: arguments[0][0] is 'A' in",
    ),
    (CHOICES, _put("doc_id", 2), "1 answers are there more than once: 'choices, document 2'"),
    (LAST_WORD, _put("doc_id", 99), "last_word, document 3 has no answer"),
    (
        None,
        _put("results", SUMS, "exact_match,number", 1.0),
        "sums: exact_match,number is 1.0 in the file, and 0.0",
    ),
    (
        None,
        _put("results", LAST_WORD, "perplexity,none", 9.0),
        "last_word: perplexity,none is 9.0 in the file",
    ),
]


@pytest.mark.parametrize("task, change, sentence", FORGERIES)
def test_forgeries_of_lm_eval_are_named(verify, evaluated, monkeypatch, task, change, sentence):
    if "differs" not in sentence:
        pass_answers(monkeypatch)
    path = next(evaluated.parent.glob(f"samples_{task}_*.jsonl")) if task else evaluated
    untouched = path.read_text()
    lines = lines_of(path) if task else [json.loads(untouched)]
    change(lines[3 if task else 0])
    try:
        write(path, lines)
        code, said = verify(evaluated, "--sample", "100%")
    finally:
        path.write_text(untouched)
    assert code == 1 and sentence in said, said


def test_results_of_lm_eval_without_samples_or_record_are_refused(run, evaluated, tmp_path):
    content = json.loads(evaluated.read_text())
    (tmp_path / "results_x.json").write_text(json.dumps(content))
    done = run("verify", str(tmp_path / "results_x.json"))
    assert (
        done.returncode == 1
        and "make it again with flexgen-helm lm-eval --log_samples" in done.stderr
    )
    del content["config"]["flexgen_run"]
    (evaluated.parent / f"results_{evaluated.stem.rpartition('_')[2]}.json").write_text(
        json.dumps(content)
    )
    done = run("verify", str(evaluated))
    assert done.returncode == 1 and "make it again with flexgen-helm lm-eval" in done.stderr
