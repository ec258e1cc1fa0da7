"""`flexgen-helm run` in processes of its own: without a new request it imports neither PyTorch nor
the engine.
"""

import json

from tests.helpers.forks import python
from tests.helpers.real_runs import flexgen_helm

RUN = """
import json, sys
from flexgen_helm.cli import main
code = main(["run", "-r", "simple_mcqa:model=flexgen/tiny", "--suite", "s", "-m", *sys.argv[1:]])
print(json.dumps([code, list(sys.modules)]))
"""
ENGINE = {"torch", "flexgen_helm.engine.engine", "flexgen_helm.engine.opening"}


def modules_of(folder, instances, start=None):
    """Run a suite; return the modules that were imported, in order."""
    done = flexgen_helm(folder, instances, program=RUN, start=start)
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return list(modules)


def record(folder):
    (path,) = (folder / "benchmark_output" / "runs" / "s").glob("*/flexgen_run.json")
    return dict(json.loads(path.read_text()))


def test_stored_answers_import_no_engine(tiny, tmp_path):
    (tmp_path / "models.yaml").write_text(
        json.dumps({"tiny": {"path": str(tiny("llama").path), "device": "cpu"}})
    )
    modules_of(tmp_path, "3")
    first = record(tmp_path)

    stored = modules_of(tmp_path, "3", python("plan"))
    assert not ENGINE & {*stored} and "sklearn" in stored
    assert (
        first["num_reused"] == 0 < record(tmp_path)["num_reused"] == first["workload"]["num_unique"]
    )
