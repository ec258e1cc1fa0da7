"""`report`: a suite's folder as markdown, JSON and a page, which a real browser opens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pandas as pd
import pytest

from flexgen_helm.errors import UsageError
from flexgen_helm.report.pages import Page, Section, suite_page
from flexgen_helm.report.scores import read_scores, reused_note
from flexgen_helm.report.suite import read_suite, suite_to_json
from flexgen_helm.report.tables import SUMMARY_COLUMNS, runs_table
from flexgen_helm.report.throughput import padding, throughput
from flexgen_helm.request import Cost
from tests.helpers.suites import accuracies, write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def suite(tmp_path):
    """Two runs of one model in two precisions, as `flexgen-helm run` leaves them."""
    folder = tmp_path / "runs" / "mine"
    models = {}
    for precision, right, seconds in (("fp16", [1, 1, 0], 4.0), ("4bit", [1, 0, 0], 1.0)):
        for name, tokens in (("mc:mode=a", 2000), ("boolq:x=1", 1000)):
            path = write_run(folder, name, precision, {"exact_match": sum(right) / 3}, accuracies(right))
            own = tokens // 4
            cost = Cost(own, own / 2, 2, padded_prompt_tokens=own, padded_output_tokens=2)
            costs = [cost] * 4
            record = json.loads((path / "flexgen_run.json").read_text())
            (path / "flexgen_run.json").write_text(
                json.dumps({**record, **throughput(costs, seconds), "num_requests": 4})
            )
        suffix = "" if precision == "fp16" else "-4bit"
        nothing = {"weights": 0, "cache": 0, "activations": 0}
        moved = dict.fromkeys(("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"), nothing)
        models[f"tiny{suffix}"] = {
            "schedule": "zigzag",
            "bytes": {**moved, "disk_to_cpu": {**nothing, "weights": 3e9}},
            "time_s": {"compute": 3 * seconds, "wait": seconds, "other": 0.5},
            "peak_bytes": {"gpu": 0, "cpu": 2e9, "disk": 5e9},
            "predicted_latency_s": 3.5 * seconds,
            "roofline_s": 2 * seconds,
        }
    (folder / "flexgen_suite.json").write_text(json.dumps({"models": models}))
    return folder


def test_figures_of_a_suite(suite):
    report = read_suite(suite)
    assert len(report.runs) == 4 and set(report.models) == {"tiny", "tiny-4bit"} and not report.notes
    text = suite_page(report).to_markdown()
    line = next(line for line in text.splitlines() if "mc:mode=a,model=flexgen_tiny " in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # 4 requests of 500 + 2 tokens in 4 s, half of the prompts computed.
    assert cells[3:] == ["2,008", "1,000", "502", "502", "100.0%", "100.0%", "100.0%"]
    model = next(line for line in text.splitlines() if line.startswith("| tiny "))
    cells = [cell.strip() for cell in model.strip("|").split("|")]
    assert cells[1:] == ["zigzag", "16.0", "14.0", "12.0", "4.0", "50.0%", "3.00 GB", "0", "0", "2.00 GB", "5.00 GB"]
    assert "## Precisions of tiny" in text and "1 lost, 0 won" in text
    json.dumps(suite_to_json(report), allow_nan=False)


def test_throughput_of_an_earlier_run_is_noted(suite):
    """In the report and below the table of `run`; not if everything was computed."""
    folders = sorted(path for path in suite.iterdir() if path.is_dir())
    table = runs_table([read_scores(folder) for folder in folders])
    assert len(table) == 4 and not any("*" in cell for row in table.to_numpy() for cell in row)
    record = json.loads((folders[1] / "flexgen_run.json").read_text())
    record = {**record, "num_reused": 3, "workload": {**record["workload"], "num_unique": 3}}
    (folders[1] / "flexgen_run.json").write_text(json.dumps(record))
    runs = [read_scores(folder) for folder in folders]
    table = runs_table(runs)[SUMMARY_COLUMNS]
    assert len(table) == 4
    assert list(table["tokens/s"].str.endswith(" *")) == [False, True, False, False]
    note = f"{reused_note(runs)}."
    assert note.startswith("3 of ") and "answers come from earlier runs; tokens/s" in note
    assert note.endswith("(--disable-cache measures again).")
    report = read_suite(suite)
    assert report.notes == [note[:-1]] == suite_to_json(report)["notes"]
    text = suite_page(report).to_markdown()
    assert text.count(" * |") == 2
    # The compared model's note is the suite's, and appears once.
    assert text.count(note) == suite_page(report).to_html().count(note) == 1


def test_without_the_suites_own_file_runs_still_count(suite):
    (suite / "flexgen_suite.json").unlink()
    report = read_suite(suite)
    assert len(report.runs) == 4 and not report.models and not report.notes
    assert "## Models" not in suite_page(report).to_markdown() and "boolq" in suite_page(report).to_html()


def test_a_model_of_an_earlier_call_is_taken_from_its_runs(suite):
    content = json.loads((suite / "flexgen_suite.json").read_text())
    account = content["models"].pop("tiny")
    (suite / "flexgen_suite.json").write_text(json.dumps(content))
    for path in suite.glob("*flexgen_tiny/flexgen_run.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **account}))
    report = read_suite(suite)
    assert set(report.models) == {"tiny", "tiny-4bit"} and "tiny are those of the last block" in report.notes[0]


def test_nothing_to_report_is_one_message(tmp_path):
    with pytest.raises(UsageError, match="no suite"):
        read_suite(tmp_path / "absent")
    with pytest.raises(UsageError, match="no finished runs"):
        read_suite(tmp_path)


GOES_ON = "the command that made the suite goes on with it"


def test_runs_that_are_missing_are_named(suite):
    """Failed runs, those without all files, and those that were never begun; not the runs of other models."""
    first, second, third, _ = sorted(path.name for path in suite.iterdir() if path.is_dir())
    (suite / first / "stats.json").unlink()
    (suite / second / "flexgen_run.json").unlink()
    (suite / "mmlu:model=openai_gpt2").mkdir()
    (suite / "eval_cache").mkdir()
    (suite / "mmlu:model=flexgen_tiny").mkdir()
    failing(suite, "mmlu:model=flexgen_tiny", "imdb:model=flexgen_tiny")
    report = read_suite(suite)
    assert report.notes[:4] == [
        f"run mmlu:model=flexgen_tiny failed: {GOES_ON}",
        f"run imdb:model=flexgen_tiny failed: {GOES_ON}",
        f"run {first} is unfinished: {GOES_ON}",
        f"run {second} is unfinished: {GOES_ON}",
    ]
    assert not any("openai" in note or "eval_cache" in note for note in report.notes)
    assert (
        f"- run {first} is unfinished: {GOES_ON}." in suite_page(report).to_markdown()
        and first in suite_page(report).to_html()
    )


def test_a_run_that_failed_over_its_older_scores_is_named_unless_it_was_repeated(suite):
    old, new = sorted(path.name for path in suite.iterdir() if path.is_dir())[:2]
    failing(suite, old, new)
    (suite / new / "stats.json").write_text((suite / new / "stats.json").read_text())
    os.utime(suite / old / "stats.json", (1e9, 1e9))
    os.utime(suite / "flexgen_suite.json", (1.5e9, 1.5e9))
    assert read_suite(suite).notes == [
        f"run {old} failed in the last call, and its scores are of an earlier one: {GOES_ON}"
    ]


def failing(suite, *names):
    """Write the suite's file of a call in which these runs failed."""
    content = json.loads((suite / "flexgen_suite.json").read_text())
    (suite / "flexgen_suite.json").write_text(json.dumps({**content, "failed": list(names)}))


def test_names_of_runs_break_after_commas_and_are_escaped():
    table = pd.DataFrame({"run": ["mmlu:a=<b>,model=m"], "tokens": ["1,234"]})
    made = Page("t", "s", [Section("x", [table])]).to_html()
    assert '<td>mmlu:<wbr>a=&lt;b&gt;,<wbr>model=m</td><td class="number">1,234</td>' in made


def test_efficiency_of_padding():
    def cost(prompt, output):
        return Cost(prompt_tokens=prompt, output_tokens=output)

    assert padding([]) == {"to_longest": 1.0, "in_buckets": 1.0}
    efficiency = padding([cost(10, 2), cost(30, 2), cost(20, 6)])
    assert efficiency["to_longest"] == pytest.approx(70 / (3 * 36)) == efficiency["in_buckets"]
    efficiency = padding([cost(10, 1) for _ in range(32)] + [cost(40, 1) for _ in range(32)])
    assert efficiency["in_buckets"] == 1.0 and efficiency["to_longest"] == pytest.approx((11 + 41) / 82)


@pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the page with")
def test_a_browser_shows_the_page(suite, tmp_path):
    """Offline: every figure is drawn, the numbers are in the page, and a screenshot is not blank."""
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(suite_page(read_suite(suite)).to_html(), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--window-size=1300,2400"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]

    def browser(*more):
        return subprocess.run([BROWSER, *options, *more, page.as_uri()], capture_output=True, text=True, timeout=120)

    dom = browser("--dump-dom").stdout
    assert dom.count('class="main-svg"') >= 5 and "tokens/s" in dom
    assert "50.0%" in dom and "1 lost, 0 won" in dom
    browser(f"--screenshot={shot}")
    assert shot.stat().st_size > 30_000
