"""LAMBADA's and WikiText-2's data: pages, detokenizing, targets, where they come from, and
refusals.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.benchmark.scenarios.scenario import create_scenario
from helm.common.object_spec import parse_object_spec

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.errors import UsageError
from flexgen_helm.scenarios import data, lambada, wikitext

TWO_PAGES = (
    " \n = First = \n \n Some words . \n \n = = Part = = \n \n More . \n \n = Second = \n \n The "
    "end . \n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder that is named."""
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that cannot be reached; the requests to it."""
    requested: list[str] = []

    def load_dataset(repository, config, split):
        requested.append(f"{repository} {config} {split}")
        raise ConnectionError("no network here. Check your connection.\nSecond line")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data._load_hub.cache_clear()
    return requested


# ---- pages ----


def test_a_page_begins_at_a_title_and_not_at_a_section():
    pages = wikitext.split_pages(TWO_PAGES)
    assert [page.split("\n")[0] for page in pages] == [" = First = ", " = Second = "]
    assert " = = Part = = " in pages[0]
    # the blank line before the first title belongs to no page
    assert " \n" + "\n".join(pages) == TWO_PAGES


# ---- detokenizing ----


def test_the_62_pages_of_the_test_split(shared_data, monkeypatch):
    """The digest is of what lm-evaluation-harness 0.4.13 makes of these pages."""
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(shared_data))
    pages = wikitext.read_pages()
    assert len(pages) == wikitext.PAGES
    sizes = [wikitext.page_size(page) for page in pages]
    assert (sum(size["words"] for size in sizes), sum(size["bytes"] for size in sizes)) == (
        241335,
        1290527,
    )
    texts = "\0".join(map(wikitext.detokenize, pages))
    digest = "b0ae50e166add20959a5406d9b3c99fe1f23819ec0a10149047149434fb85d81"
    assert hashlib.sha256(texts.encode()).hexdigest() == digest
    # Inverse: 60 articles, if formulas were no titles.
    articles = [page for page in pages if " = 1 " not in page.split("\n")[0]]
    assert len(articles) == 60


# ---- LAMBADA ----


@pytest.mark.parametrize(
    "passage, context, target",
    [
        ("he gave her the ring", "he gave her the", " ring"),
        ('and said, "go', "and said,", ' "go'),
        # white space at the end of a context belongs to the target
        ("two  spaces", "two", "  spaces"),
        ("a line\n next", "a line", "\n next"),
    ],
)
def test_targets(passage, context, target):
    assert lambada.split_passage(passage) == (context, target)


def test_the_passages_of_the_test_split(shared_data, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(shared_data))
    instances = lambada.LambadaScenario("accuracy").get_instances("")
    assert len(instances) == lambada.PASSAGES
    for instance in instances:
        (reference,) = instance.references
        assert (
            reference.is_correct
            and reference.output.text[0] == " "
            and " " not in reference.output.text[1:]
        )
        assert instance.split == "test" and instance.input.text == instance.input.text.rstrip()


# ---- where the data comes from ----


def test_the_folder_goes_before_the_hub(folder, no_hub):
    (folder / lambada.FILE).write_text(json.dumps({"text": "a b c"}) + "\n")
    (folder / wikitext.FILE).write_text(TWO_PAGES)
    assert lambada.read_passages() == ["a b c"]
    assert len(wikitext.read_pages()) == 2
    assert no_hub == []


def test_the_hub_is_read_where_the_folder_has_no_such_file(folder, monkeypatch):
    content = {"EleutherAI/lambada_openai": "text", "EleutherAI/wikitext_document_level": "page"}
    monkeypatch.setattr(
        "datasets.load_dataset", lambda name, config, split: [{content[name]: f"{config} {split}"}]
    )
    data._load_hub.cache_clear()
    assert lambada.read_passages() == ["default test"]
    assert wikitext.read_pages() == ["wikitext-2-raw-v1 test"]


@pytest.mark.parametrize(
    "read, file", [(lambada.read_passages, lambada.FILE), (wikitext.read_pages, wikitext.FILE)]
)
def test_a_refusal_names_both_ways(read, file, folder, no_hub, monkeypatch):
    with pytest.raises(
        UsageError, match=("FLEXGEN_HELM_DATA.*EleutherAI/.* from the hub.*no network here")
    ) as refused:
        read()
    assert file in str(refused.value) and f"{folder / file} does not exist" in str(refused.value)
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2
    with pytest.raises(UsageError, match="no network here"):
        read()
    assert len(no_hub) == 1  # half a minute is waited once
    monkeypatch.delenv("FLEXGEN_HELM_DATA")
    with pytest.raises(UsageError, match="it is not set"):
        read()


@pytest.mark.parametrize(
    "content", [b"not JSON\n", b'{"passage": "a b"}\n', b'{"text": 1}\n', b"\xff\xfe\n"]
)
def test_a_damaged_file_is_named_and_not_taken_for_an_absent_one(content, folder, no_hub):
    (folder / lambada.FILE).write_bytes(content)
    with pytest.raises(UsageError, match=lambada.FILE):
        lambada.read_passages()
    assert no_hub == []


# ---- run specs ----


def test_run_specs_have_names_groups_and_metadata():
    entries = {
        "lambada:mode=accuracy": ("lambada:mode=accuracy", "generation", "exact_match"),
        "lambada:mode=perplexity": (
            "lambada:mode=perplexity",
            "language_modeling",
            "target_perplexity",
        ),
        "wikitext": ("wikitext", "language_modeling", "word_perplexity"),
        "wikitext:max_length=512": (
            "wikitext:max_length=512",
            "language_modeling",
            "word_perplexity",
        ),
    }
    for entry, (name, method, main) in entries.items():
        separator = "," if ":" in entry else ":"
        (spec,) = construct_run_specs(
            parse_object_spec(f"{entry}{separator}model=flexgen/opt-125m")
        )
        assert spec.name == f"{name}{separator}model=flexgen_opt-125m"
        assert (spec.adapter_spec.method, spec.adapter_spec.model) == (method, "flexgen/opt-125m")
        scenario = create_scenario(spec.scenario_spec)
        metadata = scenario.get_metadata()
        assert (metadata.name, metadata.main_metric) == (spec.groups[0], main)
        assert (
            metadata.display_name and scenario.description and "language_modeling" in scenario.tags
        )
        # no path of this machine in HELM's files
        assert scenario.definition_path.startswith("flexgen_helm/")
    assert getattr(spec.adapter_spec, "max_length", None) == 512


@pytest.mark.parametrize(
    "entry, words",
    [
        ("lambada:mode=guess", "accuracy, perplexity"),
        ("wikitext:max_length=0", "max_length is 0"),
        ("wikitext:max_length=many", "max_length is 'many'"),
    ],
)
def test_wrong_arguments_are_refused(entry, words):
    with pytest.raises(UsageError, match=words):
        construct_run_specs(parse_object_spec(f"{entry},model=flexgen/opt-125m"))
