"""`helm-summarize` and `helm-server` on runs of ours: processes of HELM, which load no plugin, and
a real browser.
"""

import json
import os
import shutil
import subprocess

import pytest

from tests.helpers.forks import python
from tests.helpers.helm_runs import MODEL, Place

# HELM's tables show scenarios that describe themselves; `simple_mcqa` does not.
GROUP = "synthetic_reasoning_natural"


def helm(name, *arguments):
    """A command of HELM, by its module: `helm-summarize` is
    helm.benchmark.presentation.summarize.
    """
    return [
        *python("all"),
        "-c",
        f"import sys; from {name} import main; sys.exit(main())",
        *arguments,
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A suite of a catalog model by `flexgen-helm run` and a model of the user's file by
    `helm-run`.
    """
    place = Place(tmp_path_factory.mktemp("views"))
    place.run("suite", entries=[f"{GROUP}:difficulty=easy,model={MODEL}"])
    (place.folder / "models.yaml").write_text("mine: opt-125m\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_MODELS", str(place.folder / "models.yaml"))
        place.run("run", entries=[f"{GROUP}:difficulty=easy,model=flexgen/mine"])
    (place.folder / "models.yaml").unlink()
    return place.folder


def summarize(folder, *flags):
    """`helm-summarize` in another shell: none of our variables is set.

    One thread: it compiles templates in its threads, and in Python before 3.11.8 and 3.12.2
    parallel parses can end in `SystemError: AST constructor recursion depth mismatch`
    (https://github.com/python/cpython/issues/106905).
    """
    command = helm(
        "helm.benchmark.presentation.summarize", "--suite", "s", "--num-threads", "1", *flags
    )
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("FLEXGEN_HELM")
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env={**variables, "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr


def models_of(folder):
    schema = json.loads((folder / "benchmark_output/runs/s/schema.json").read_text())
    return {model["name"]: model for model in schema["models"]}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--auto-generate-schema",), ()])
def test_a_summary_knows_models_of_both_commands_in_another_shell(ran, flags, tmp_path):
    # other tests read what `summarized` has there
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    summarize(tmp_path, *flags)
    models = models_of(tmp_path)
    assert set(models) == {MODEL, "flexgen/mine"}
    assert models[MODEL]["num_parameters"] == models["flexgen/mine"]["num_parameters"]


@pytest.mark.slow
def test_a_summary_shows_names_that_nobody_explains(ran, tmp_path):
    """Without `prod_env`, as in a folder that was copied from another machine; nothing is
    downloaded for it.
    """
    shutil.copytree(ran / "benchmark_output", tmp_path / "benchmark_output")
    (run,) = (tmp_path / "benchmark_output/runs/s").glob("*model=flexgen_mine")
    spec = (run / "run_spec.json").read_text().replace("flexgen/mine", "flexgen/org--repo")
    (run / "run_spec.json").write_text(spec)
    summarize(tmp_path, "--auto-generate-schema")
    models = models_of(tmp_path)
    assert (
        set(models) == {MODEL, "flexgen/org--repo"}
        and "num_parameters" not in models["flexgen/org--repo"]
    )


@pytest.fixture(scope="module")
def summarized(ran):
    summarize(ran, "--auto-generate-schema")
    return ran


def test_the_summary_has_our_throughput_beside_the_scores(summarized):
    suite = summarized / "benchmark_output" / "runs" / "s"
    schema = json.loads((suite / "schema.json").read_text())
    assert {"flexgen_padded_throughput", "flexgen_actual_throughput", "flexgen_efficiency"} <= {
        metric["name"] for metric in schema["metrics"]
    }
    tables = json.loads(next((suite / "groups").glob(f"{GROUP}*.json")).read_text())
    headers = [cell["value"] for table in tables for cell in table["header"]]
    assert any("Padded tok/s" in str(header) for header in headers), headers
    (run,) = suite.glob(f"{GROUP}:*opt-125m")
    record = json.loads((run / "flexgen_run.json").read_text())
    shown = [cell.get("value") for table in tables for row in table["rows"] for cell in row]
    assert pytest.approx(record["padded_throughput"], rel=1e-3) in [
        x for x in shown if isinstance(x, float)
    ]
