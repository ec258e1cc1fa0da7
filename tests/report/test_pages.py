"""Pages in a real browser: three widths, light and dark; nothing overflows, overlaps, or is hard to
read.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.pages import comparison_page, suite_page
from flexgen_helm.report.suite import read_suite
from tests.helpers.browser import MISSING, SCHEMES, WIDTHS, browser
from tests.helpers.suites import accuracies, write_mmlu, write_run, write_totals

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def window():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Long names, two models, two to five precisions, 57 runs of a scenario, perplexities, a run
    that failed.
    """
    folder = tmp_path_factory.mktemp("output") / "runs" / "a-suite"
    draw = np.random.default_rng(0)
    write_mmlu(folder, models=("org--a-model-with-a-long-name-70b-instruct",))
    for precision in ("fp16", "fp16-s", "4bit", "4bit-s", "paper-4bit"):
        pages = {
            f"id{i}": {"logprob": -draw.normal(9000, 500), "num_words": 3000.0} for i in range(9)
        }
        mean = sum(page["logprob"] for page in pages.values()) / 27_000
        write_run(folder, "wikitext", precision, {"word_perplexity": float(np.exp(-mean))}, pages)
        right = draw.random(9) < 0.5
        scores = {
            "exact_match": right.mean(),
            "classification_macro_f1": 0.123,
            "final_number_exact_match": np.nan,
        }
        write_run(folder, "boolq:only_contrast=True", precision, scores, accuracies(right))
    write_totals(folder, failed=["imdb:model=flexgen_tiny-4bit"])
    compared = comparison_page(compare_suite(folder), folder.name)
    (folder / "flexgen_compare.html").write_text(compared.to_html(folder), encoding="utf-8")
    name = "org--a-model-with-a-long-name-70b-instruct"
    across = comparison_page(compare_suite(folder, f"{name}-4bit"), folder.name)
    (folder / "models.html").write_text(across.to_html(folder), encoding="utf-8")
    (folder / "flexgen_report.html").write_text(
        suite_page(read_suite(folder)).to_html(folder), encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize("name", ["flexgen_report", "flexgen_compare", "models"])
def test_a_page_is_readable(window, suite, name):
    window.open(suite / f"{name}.html")
    found = {}
    for width in WIDTHS:
        for scheme in SCHEMES:
            window.show(width, scheme)
            found[width, scheme] = window.problems()
    assert found == {(width, scheme): [] for width in WIDTHS for scheme in SCHEMES}
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_a_phone_shows_the_verdicts_first(window, suite):
    window.open(suite / "flexgen_compare.html")
    window.show(390, "light")
    assert window.run("return document.querySelector('h1').getBoundingClientRect().top") < 100


def test_an_interval_has_an_axis_with_its_ends_and_middle(window, suite):
    window.open(suite / "flexgen_compare.html")
    for width in WIDTHS:
        window.show(width, "light")
        ends = (
            "return [...document.querySelectorAll('.interval')].map(e => [e, "
            "...e.querySelectorAll('small')]"
        )
        boxes = window.run(
            f"{ends}.map(e => e.getBoundingClientRect()).map(b => [b.left, b.right]))"
        )
        shown = [box for box in boxes if box[0][1]]  # not of a collapsed table
        assert shown
        for (left, right), low, middle, high in shown:
            assert low[0] == pytest.approx(left) and high[1] == pytest.approx(right)
            assert low[1] < middle[0] and middle[1] < high[0]
            assert sum(middle) / 2 == pytest.approx((left + right) / 2, abs=1)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (lambda html: html.replace("<h1>", '<h1 style="width:1500px">'), "wide"),
        (lambda html: html.replace("</h1>", '</h1><p style="position:absolute;left:-9px">left</p>'), "outside: <P"),
        (lambda html: html.replace("--text: #1f2328", "--text: #999"), "contrast 2.8"),
        (lambda html: html.replace("--muted: #57606a", "--muted: #aab"), "contrast"),
    ],
)  # fmt: skip
def test_a_damaged_page_is_noticed(window, suite, tmp_path, damage, problem):
    html = (suite / "flexgen_report.html").read_text(encoding="utf-8")
    damaged = damage(html)
    assert damaged != html
    (tmp_path / "page.html").write_text(damaged, encoding="utf-8")
    window.open(tmp_path / "page.html")
    window.show(820, "light")
    assert any(problem in found for found in window.problems())
