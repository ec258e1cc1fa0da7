"""`flexgen-helm` as a user sees it: whole programs on a pseudo-terminal, whose screen must change
all the time.
"""

import re

import pytest

from tests.helpers.console_script import SCRIPT
from tests.helpers.helm_runs import Place
from tests.helpers.terminal import run_in_terminal

LONGEST_GAP_S = 2.0
NOISE = ("Looking in path", "nltk_data", "it/s]", "Traceback", "UserWarning")
ENTRIES = ("simple_mcqa_scored:model=flexgen/mine", "simple_mcqa:model=flexgen/mine")


def run(folder, *arguments, expect=0):
    variables = {
        "FLEXGEN_HELM_HOME": str(folder / "home"),
        "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"),
        "HF_HUB_OFFLINE": "1",
    }
    session = run_in_terminal([str(SCRIPT), *arguments], folder, variables)
    assert session.exit_code == expect, session.last
    assert session.longest_gap_s < LONGEST_GAP_S, [at for at, _ in session.frames]
    for noise in NOISE:
        assert not session.shown(noise), noise
    return session


@pytest.mark.slow
def test_a_first_4_bit_run_that_is_offloaded_and_one_with_everything_cached(tiny, tmp_path):
    (tmp_path / "models.yaml").write_text(f"mine: {tiny('llama').path}\n")
    command = ["run", "-r", *ENTRIES, "-m", "100", "--suite", "s", "--precision", "4bit"]
    # So many that the panel is drawn several times meanwhile.
    first = run(
        tmp_path,
        *command,
        "--policy",
        "4x2,0,0,0,0,0,100",
        "--cpu-memory",
        "64MiB",
        "--disk",
        "1GiB",
    )
    for stage in ("starting HELM", "reading data and making prompts", "computing metrics"):
        assert first.shown(stage), stage
    assert first.shown("mine  4bit") and first.shown("memory: ") and first.shown("log:")
    assert first.shown("from disk") and first.shown("block of 8 in batches of 4")
    for text in (
        "2 runs in benchmark_output/runs/s",
        "exact_match",
        " ± ",
        "scored",
        "HELM's own output",
    ):
        assert text in first.last, first.last
    (log,) = (tmp_path / "home" / "logs").iterdir()
    assert "Running simple_mcqa_scored" in log.read_text()

    again = run(tmp_path, *command)
    assert re.search(r"(\d+) of \1 answers come from earlier runs", " ".join(again.last.split())), (
        again.last
    )
    assert len(list((tmp_path / "home" / "logs").iterdir())) == 2

    fewer = ["2" if word == "100" else word for word in command]
    shorter = run(tmp_path, *fewer, "--skip-completed-runs")
    assert "was completed with other settings (-m 100, now" in " ".join(shorter.last.split())

    dry = run(tmp_path, *command, "--dry-run")
    assert "nothing was computed" in " ".join(dry.last.split())
    suite = tmp_path / "benchmark_output" / "runs" / "s"
    assert (
        len(list(suite.glob("*/dry_run/scenario_state.json")))
        == len(list(suite.glob("*/flexgen_run.json")))
        == 2
    )


def test_quickstart_on_the_fake_engine(tmp_path):
    """Both precisions are scored and compared, and pages that lead to each other are written."""
    place = Place(tmp_path)
    process = place.start("quickstart", "-m", "2", "--precision", "fp16,paper-4bit")
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 0, output
    check_quickstart(output, tmp_path)
    assert "Compare the precisions:\n  flexgen-helm compare --suite quickstart\n" in output
    assert place.events()["load"] == 2


def check_quickstart(output, folder):
    suite = folder / "benchmark_output" / "runs" / "quickstart"
    for text in (
        "paper-4bit against fp16",
        "flexgen_compare.html",
        "flexgen_report.html",
        "What next:",
    ):
        assert text in output, output
    for page, other in (("report", "compare"), ("compare", "report")):
        assert f'href="flexgen_{other}.html"' in (suite / f"flexgen_{page}.html").read_text()


@pytest.mark.slow
def test_quickstart(wheel_model, tmp_path):
    home = tmp_path / "home" / "models" / wheel_model.parent.name
    home.parent.mkdir(parents=True)
    home.symlink_to(wheel_model.parent)
    (tmp_path / "models.yaml").write_text("")
    session = run(tmp_path, "quickstart", "-m", "2", "--precision", "fp16,paper-4bit")
    check_quickstart("\n".join(shown for _, shown in session.frames), tmp_path)
