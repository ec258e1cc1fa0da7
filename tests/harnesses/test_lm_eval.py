"""lm-evaluation-harness on the engine equals its own `hf` backend in float32, and goes on behind an
interruption.
"""

import importlib
import json
import random
import shutil
from configparser import ConfigParser
from types import SimpleNamespace

import pytest
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.harnesses.lm_eval import FlexgenLM, register_model
from flexgen_helm.harnesses.lm_eval_command import run_command
from flexgen_helm.request import Completion
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.chat_models import CHATML, NO_SYSTEM, PLAIN_TURNS, add_template
from tests.helpers.faults import fails_once
from tests.helpers.generation_settings import GREEDY
from tests.helpers.lm_eval_tasks import (
    CHOICES,
    LAST_WORD,
    NAMES,
    SUMS,
    TURNS,
    close,
    invented_tasks,
    leave_out_others,
)
from tests.helpers.paths import ROOT
from tests.helpers.tokenizers_by_family import FAMILIES

TOLERANCE = 1e-3  # relative


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return invented_tasks(tmp_path_factory.mktemp("tasks") / "tasks", 4)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return add_template(tiny("llama").path, tmp_path_factory.mktemp("lm-eval") / "model", CHATML)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


def evaluate(model, tasks, names=NAMES, **settings):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, **settings
    )


def reference(folder, batch_size=2, **arguments):
    return HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=batch_size, **arguments
    )


def assert_equal(ours, theirs, names=NAMES):
    for name in names:
        scores = ours["results"][name]
        assert scores.keys() == theirs["results"][name].keys()
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                tolerance = 0 if metric.startswith(("acc", "exact_match")) else TOLERANCE
                assert scores[metric] == pytest.approx(value, rel=tolerance, abs=0), (name, metric)
        mine, hf = ours["samples"][name], theirs["samples"][name]
        assert [sample["arguments"] for sample in mine] == [sample["arguments"] for sample in hf]
        for sample, expected in zip(mine, hf, strict=True):
            for a, b in zip(sample["resps"], expected["resps"], strict=True):
                _assert_equal_answers(a, b)


def sums(results):
    return [sample["resps"] for sample in results["samples"][SUMS]]


def _assert_equal_answers(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, tuple | list):  # log-probability and whether it is greedy
            assert a[0] == pytest.approx(b[0], rel=TOLERANCE, abs=1e-4) and a[1] == b[1]
        else:
            assert a == (b if isinstance(b, str) else pytest.approx(b, rel=TOLERANCE))


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
def test_scores_equal_those_of_the_hf_backend(folder, tasks, is_chat):
    settings = dict(
        apply_chat_template=is_chat, system_instruction="Be short." if is_chat else None
    )
    names = [CHOICES, TURNS] if is_chat else NAMES
    with FlexgenLM(str(folder)) as lm:
        ours = evaluate(lm, tasks, names, **settings)
    assert_equal(ours, evaluate(reference(folder), tasks, names, **settings), names)
    assert len({sample["resps"][0][0] for sample in ours["samples"][TURNS]}) > 1
    if is_chat:  # few-shot examples are turns, and the answer is begun
        prompt = ours["samples"][TURNS][0]["arguments"][0][0]
        assert prompt.count("<|im_start|>user") == 3 and prompt.endswith(
            "<|im_start|>assistant\nIt is"
        )


@pytest.fixture
def folder_with(folder, tmp_path):
    """Make a copy of the model with these generation settings."""

    def make(settings):
        copy = shutil.copytree(folder, tmp_path / "model")
        path = copy / "generation_config.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**known, **settings}))
        return copy

    return make


@pytest.mark.fast(1)
@pytest.mark.parametrize("settings", GREEDY[:2], ids=lambda settings: "-".join(settings))
def test_answers_under_the_models_own_settings_equal_those_of_hf(
    folder_with, folder, tasks, settings
):
    changed = folder_with(settings)
    with FlexgenLM(str(changed)) as lm:
        ours = evaluate(lm, tasks)
    # One by one: `hf` hands its padding to the settings as if it were text.
    assert_equal(ours, evaluate(reference(changed, batch_size=1), tasks))
    with FlexgenLM(str(folder)) as lm:
        plain = evaluate(lm, tasks, [SUMS])
    assert sums(ours) != sums(plain)


def test_a_sampled_task_without_top_p_has_the_models(folder_with, tasks):
    # one token is left at each step
    folder = folder_with({"top_p": 1e-4, "repetition_penalty": 1.5})
    drawn = {"do_sample": True, "temperature": 1.0}
    with FlexgenLM(str(folder)) as lm:
        ours = evaluate(lm, tasks, [SUMS], gen_kwargs=drawn)
        wide = evaluate(lm, tasks, [SUMS], gen_kwargs={**drawn, "top_p": 1.0})
    theirs = evaluate(reference(folder, batch_size=1), tasks, [SUMS], gen_kwargs=drawn)
    assert_equal(ours, theirs, [SUMS])
    with pytest.raises(AssertionError):
        assert_equal(wide, theirs, [SUMS])


def test_a_tasks_setting_that_contradicts_the_models_is_refused(folder_with, tasks):
    folder = folder_with({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2})
    with FlexgenLM(str(folder)) as lm:
        with pytest.raises(
            UsageError,
            match=(r"no_repeat_ngram_size=1 .* is not what .*generation_config.json says"),
        ):
            evaluate(lm, tasks, [SUMS], gen_kwargs={"no_repeat_ngram_size": 1})
        same = evaluate(lm, tasks, [SUMS], gen_kwargs={"repetition_penalty": 1.5})
    assert sums(same) == sums(evaluate(reference(folder, batch_size=1), tasks, [SUMS]))


@pytest.mark.slow
@pytest.mark.parametrize("variant, max_length", [("opt", None), ("gemma2", 33), ("pythia", 33)])
def test_every_kind_of_model_scores_as_hf(tiny, tmp_path, variant, max_length):
    tasks, path = invented_tasks(tmp_path / "tasks", 20, seed=3), tiny(variant).path
    with FlexgenLM(str(path), max_length=max_length) as lm:
        ours = evaluate(lm, tasks)
    assert_equal(ours, evaluate(reference(path, max_length=max_length), tasks))


def test_an_interrupted_evaluation_computes_the_rest_and_scores_the_same(
    folder, tasks, tmp_path, monkeypatch
):
    names = [LAST_WORD, SUMS]

    def scored():
        with FlexgenLM(str(folder), unverified=True) as lm:  # a proof is a run too
            results = evaluate(lm, tasks, names)
        return results["results"], [
            sample["resps"] for name in names for sample in results["samples"][name]
        ]

    undisturbed = scored()
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "other home"))
    computed = fails_once(monkeypatch, after=3)
    with pytest.raises(FlexgenError, match="the power is out"):
        scored()
    resumed = scored()
    assert computed[0][1] == 3 and computed[1][0] == computed[0][0] - 3
    assert all(asked == delivered for asked, delivered in computed[1:])
    num_runs = len(computed)
    stored = scored()
    assert len(computed) == num_runs  # all is stored
    assert close(resumed, undisturbed) and close(stored, undisturbed)
    assert stored[0] == resumed[0]  # to the last digit


@pytest.mark.slow
def test_random_draws_are_the_same_in_every_run_and_differ_between_repeats_and_seeds(
    folder, tasks, tmp_path
):
    repeated = shutil.copytree(tasks, tmp_path / "repeated")
    file = repeated / f"{SUMS}.yaml"
    file.write_text(
        file.read_text().replace('"num_fewshot": 2', '"num_fewshot": 2, "repeats": 3', 1)
    )
    settings = dict(gen_kwargs={"do_sample": True, "temperature": 1.0, "until": []})

    def draws(seed):
        with FlexgenLM(str(folder)) as lm:
            results = evaluate(lm, repeated, [SUMS], torch_random_seed=seed, **settings)
        return [answer for sample in results["samples"][SUMS] for answer in sample["resps"][0]]

    first = draws(1)
    assert draws(1) == first != draws(2)
    assert len(first) == 12 and all(len(set(first[i : i + 3])) > 1 for i in range(0, 12, 3))


@pytest.mark.fast(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_become_the_ids_of_the_hf_backend_and_back(family, tmp_path):
    folder = FAMILIES[family].write(tmp_path / "tokenizer")
    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    theirs, tokenizer = loader.from_pretrained(folder), Tokenizer.from_path(folder)
    prefix = next((i for i in (theirs.bos_token_id, theirs.eos_token_id) if i is not None), 0)
    texts = ["Hello world", " 1998.\n", "", "Grüße 你好 🙂", f"{theirs.decode(prefix)}Hello"]
    for add_bos in (None, False):
        hf = SimpleNamespace(tokenizer=theirs, prefix_token_id=prefix, add_bos_token=add_bos)
        ours = SimpleNamespace(tokenizer=tokenizer, _add_bos=add_bos)
        for add in (None, False):
            for text in texts:
                expected = HFLM.tok_encode(hf, text, add_special_tokens=add)
                assert FlexgenLM.tok_encode(ours, text, add_special_tokens=add) == expected
    draw = random.Random(7)
    for _ in range(20):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(6)]
        assert tokenizer.decode_plain(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "template", [CHATML, PLAIN_TURNS, NO_SYSTEM], ids=["plain", "turns", "trims"]
)
def test_chats_become_the_texts_of_the_hf_backend(tiny, tmp_path, template):
    folder = add_template(tiny("opt").path, tmp_path / "model", template)
    hf = SimpleNamespace(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), chat_template_args={}
    )
    history = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " 1 + 1 ="}]
    with FlexgenLM(str(folder)) as lm:
        assert lm.chat_template(True) == template and lm.chat_template(False) is None
        assert lm.apply_chat_template(history) == HFLM.apply_chat_template(hf, history)
        for begun in ("It is", "It is ", " ", "=", "1 + 1 ="):
            open_chat = [*history, {"role": "assistant", "content": begun}]
            expected = HFLM.apply_chat_template(hf, open_chat, add_generation_prompt=False)
            assert lm.apply_chat_template(open_chat, add_generation_prompt=False) == expected


def test_thinking_is_no_part_of_an_answer(tiny):
    path = str(tiny("llama").path)
    with (
        FlexgenLM(path, think_end_token="</think>") as lm,
        FlexgenLM(path, think_end_token=9) as by_id,
    ):
        encode = lm.tokenizer.encode

        def answer(model, ids):
            return model._answer_text(
                Completion(lm.tokenizer.decode(ids), (), tuple(ids), (), "length"), ["\n"]
            )

        for model, end in ((lm, encode("</think>")), (by_id, [9])):
            assert answer(model, [*encode("one\ntwo"), *end, *encode("\n\n3\n4")]) == "3"
            assert answer(model, encode("one\ntwo")) == "one"
        # Stop strings that may stand in thinking are no stop strings of the engine, or wait behind
        # `</think>`.
        settings = {"until": ["\n"], "max_gen_toks": 4}
        assert by_id._generation("the", settings, "").request.stop == ()
        request = lm._generation("the", settings, "").request
        assert request.thinking is None or request.stop


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({"colour": 1}, "colour=1"),
        ({"precison": "4bit"}, r"not supported; did you mean precision or revision\?$"),
        ({"cpu_memory": "much"}, "much"),
        ({"max_length": 1000}, "max_length is 1000"),
        ({"chat_template": True}, "--apply_chat_template"),
        ({"thinking_budget": 9}, "think_end_token"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(folder, arguments, why):
    with pytest.raises(UsageError, match=why):
        FlexgenLM(str(folder), **arguments)


def test_a_model_is_named():
    with pytest.raises(UsageError, match="pretrained=MODEL$"):
        FlexgenLM(precision="4bit")


def test_engine_options_arrive(folder):
    with FlexgenLM(
        str(folder), precision="4bit", cpu_memory="1GiB", batch_size=8, trust_remote_code=True
    ) as lm:
        options = lm._model.config
        assert str(options.precision) == "4bit" and options.limits.cpu == 2**30
        info = lm.get_model_info()
        assert info["precision"] == "4bit" and info["fingerprint"] is None


def test_the_harness_finds_the_model_by_its_name():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, target = setup["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    module, _, attribute = target.partition(":")
    assert name == "flexgen" and getattr(importlib.import_module(module), attribute) is FlexgenLM
    register_model()
    register_model()
    assert get_model("flexgen") is FlexgenLM


def test_an_empty_choice_of_the_first_document_is_named(folder, tmp_path, monkeypatch):
    """The harness looks at its first character, before it asks the model."""
    leave_out_others(monkeypatch)
    (tmp_path / "documents.jsonl").write_text('{"q": "the", "choices": ["", "fox"], "answer": 1}\n')
    (tmp_path / "empty.yaml").write_text(
        f"""task: empty
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/documents.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
"""
    )
    command = [
        "--model_args",
        f"pretrained={folder}",
        "--include_path",
        str(tmp_path),
        "--tasks",
        "empty",
    ]
    with pytest.raises(UsageError, match="first document of a task has an empty choice"):
        run_command(command)


def test_requests_that_cannot_be_answered_end_the_evaluation_by_name(folder, tasks):
    def pair(context, continuation, document=0):
        return SimpleNamespace(args=(context, continuation), doc_id=document, task_name="words")

    fits, beyond = pair("the", " fox"), pair("the", " fox" * 200, 7)
    with FlexgenLM(str(folder)) as lm:
        for settings, message in (
            ({"max_gen_toks": 96}, "max_gen_toks is 96"),
            ({"num_beams": 2}, "num_beams=2"),
        ):
            with pytest.raises(UsageError, match=f"document 0 of sums: {message}"):
                evaluate(lm, tasks, [SUMS], gen_kwargs=settings)
        for asked, message in (
            ([pair("the", "", 3)], "3 of words"),
            ([fits, beyond], "7 of words: .* tokens, beyond"),
        ):
            with pytest.raises(RequestError, match=f"document {message}"):
                lm.loglikelihood(asked)
        with pytest.raises(UsageError, match="not supported"):
            lm.chat_template("other")
    with pytest.raises(FlexgenError, match="interrupted"):
        lm.loglikelihood([fits])  # closed
