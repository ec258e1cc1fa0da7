"""WikiText-2 as lm-evaluation-harness's task `wikitext` reads it: 62 pages, detokenized, scored as
running text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from helm.benchmark.adaptation.adapter_spec import ADAPT_LANGUAGE_MODELING
from helm.benchmark.metrics.metric import MetricSpec
from helm.benchmark.presentation.taxonomy_info import TaxonomyInfo
from helm.benchmark.run_spec import RunSpec, run_spec_function
from helm.benchmark.scenarios.scenario import (
    TEST_SPLIT,
    Input,
    Instance,
    Scenario,
    ScenarioMetadata,
    ScenarioSpec,
)
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.errors import UsageError
from flexgen_helm.runs.data import WIKITEXT as FILE
from flexgen_helm.scenarios.adapters import WindowAdapterSpec
from flexgen_helm.scenarios.data import read_hub, read_local

PAGES = 62
MAX_LENGTH = 2048


class WikitextScenario(Scenario):
    """The test split of WikiText-2 (raw), one page per instance.

    `extra_data` has the counts of words and bytes before detokenizing, which define the
    perplexities per word and per byte.
    """

    name = "wikitext"
    description = (
        "WikiText-2 (raw), test split: 62 pages of Wikipedia as running text, as in the task "
        "'wikitext' of lm-evaluation-harness [(Merity et al., "
        "2016)](https://arxiv.org/pdf/1609.07843.pdf)."
    )
    tags = ["language_modeling"]

    def __post_init__(self) -> None:
        self.definition_path = "flexgen_helm/scenarios/wikitext.py"

    def get_instances(self, output_path: str) -> list[Instance]:
        """Return all instances; `output_path` stays empty."""
        pages = read_pages()
        if len(pages) != PAGES:
            hwarn(
                f"WikiText-2 has {PAGES} pages, this data {len(pages)}: figures are not those of "
                "the whole test set"
            )
        return [
            Instance(
                Input(detokenize(page)), references=[], split=TEST_SPLIT, extra_data=page_size(page)
            )
            for page in pages
        ]

    def get_metadata(self) -> ScenarioMetadata:
        return ScenarioMetadata(
            name="wikitext",
            display_name="WikiText-2",
            description=self.description,
            taxonomy=TaxonomyInfo(
                task="language modeling",
                what="Wikipedia",
                when="2010s",
                who="web users",
                language="English",
            ),
            main_metric="word_perplexity",
            main_split="test",
        )


@run_spec_function("wikitext")
def get_wikitext_run_spec(max_length: int = MAX_LENGTH) -> RunSpec:
    """Return the run spec. max_length: maximum number of tokens a window predicts; the model's
    positions bound it.
    """
    if not isinstance(max_length, int) or max_length < 1:
        raise UsageError(
            f"wikitext: max_length is {max_length!r}; it must be a whole number of tokens, 1 or "
            "more"
        )
    return RunSpec(
        name="wikitext" if max_length == MAX_LENGTH else f"wikitext:max_length={max_length}",
        scenario_spec=ScenarioSpec(class_name=f"{__name__}.WikitextScenario"),
        adapter_spec=WindowAdapterSpec(
            method=ADAPT_LANGUAGE_MODELING,
            input_prefix="",
            input_suffix="",
            output_prefix="",
            output_suffix="",
            max_train_instances=0,
            num_outputs=1,
            max_tokens=0,
            temperature=0.0,
            max_length=max_length,
        ),
        metric_specs=[MetricSpec(class_name="flexgen_helm.scenarios.metrics.WikitextMetric")],
        groups=["wikitext"],
    )


def read_pages() -> list[str]:
    """Return the pages from the data folder or the hub. Raises `UsageError` where neither has
    them.
    """
    pages = read_local(FILE, split_pages)
    if pages is not None:
        return pages
    return read_hub(
        "WikiText-2", FILE, "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "page"
    )


def split_pages(text: str) -> list[str]:
    """Split at lines that look like a title (` = Robert Boulter = `).

    Section titles have more signs (` = = Career = = `). A formula on a line of its own
    (` = 1 henry and capacitance C = `) looks like a title too, so the test split has 62 pages for
    60 articles. Results in the literature are computed from this reading.
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _is_title(line):
            pages.append([])
        pages[-1].append(line)
    return [page for page in map("\n".join, pages) if page.strip()]


def _is_title(line: str) -> bool:
    """Whether the line has one sign at either end, and no second one next to it."""
    line = line.strip()
    return line[:2] == "= " and line[-2:] == " =" and "= =" not in (line[:3], line[-3:])


def page_size(page: str) -> dict[str, int]:
    """Return the words (pieces between white space, also an empty one at either end) and bytes of a
    page.
    """
    return {"words": len(re.split(r"\s+", page)), "bytes": len(page.encode("utf-8"))}


def _between(opening: str, closing: str) -> tuple[re.Pattern[str], str]:
    """Return a rule, pattern and replacement, that drops white space just inside a pair of signs.

    A pair ends at the next closing sign: pairs are not nested.
    """
    inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
    return re.compile(re.escape(opening) + inside + re.escape(closing)), rf"{opening}\1{closing}"


def _exactly(pairs: Iterable[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    """Return rules that replace texts as they are; pairs: old and new text."""
    return [(re.compile(re.escape(old)), new) for old, new in pairs]


# The order matters: each rule sees what those before it left. The harness has one rule more (for an
# apostrophe, a digit and two slashes), which nothing in the test split matches.
_RULES: list[tuple[re.Pattern[str], str]] = [
    *_exactly([("s '", "s'")]),
    *_exactly((f" @{sign}@ ", sign) for sign in "-,."),
    *_exactly((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
    *(_between(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *_exactly((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    *_exactly([(" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]),
]


def detokenize(page: str) -> str:
    """Undo WikiText's tokenization (` @-@ `, spaces before punctuation and inside brackets) as the
    harness does.
    """
    for pattern, replacement in _RULES:
        page = pattern.sub(replacement, page)
    return page
