"""What is installed: the mapped packages under their installed names, from an editable install and
from a wheel.
"""

import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.helpers.paths import ROOT

PROBE = """
import importlib.metadata as metadata, importlib.resources as resources, sys
import flexgen_helm, flexgen_helm.benchmarks, flexgen_helm.runs
conf = [entry.name for entry in resources.files("flexgen_helm.runs").iterdir() if entry.name.endswith(".conf")]
assert "quickstart.conf" in conf, conf
assert resources.files("flexgen_helm").joinpath("py.typed").is_file()
assert resources.files("flexgen_helm.engine").joinpath("proved.json").is_file()
points = [point for point in metadata.entry_points(group="helm") if point.name == "flexgen_helm"]
assert points and points[0].value == "flexgen_helm.plugin"
points[0].load()
import flexgen_helm.scenarios
from helm.benchmark.run_spec import get_run_spec_function
assert get_run_spec_function("simple_mcqa_scored") is not None
from helm.benchmark.model_deployment_registry import get_model_deployment
print(get_model_deployment("flexgen/opt-125m").name, flexgen_helm.__file__)
"""


def probe(python, folder):
    done = subprocess.run(
        [str(python), "-c", PROBE], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_editable_install_has_everything(tmp_path):
    assert probe(sys.executable, tmp_path).startswith("flexgen/opt-125m ")


@pytest.fixture(scope="module")
def files():
    """Names of the working tree's files that git does not ignore, whether it knows them yet or
    not.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, cwd=ROOT)
    if listed.returncode != 0:
        pytest.skip(
            "a wheel is built from the files that git does not ignore, and this is no git checkout"
        )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, timeout=240)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_what_the_repository_maps(files, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for expected in (
        "scenarios/simple.py",
        "runs/quickstart.conf",
        "benchmarks/clients.py",
        "benchmarks/paper/other_machines.csv",
        "benchmarks/paper/machines/a6000.json",
        "plugin/helm_patches.py",
        "py.typed",
    ):
        assert f"flexgen_helm/{expected}" in names
    for name in files:
        if name.startswith("flexgen_helm/") and name.endswith(".py"):
            assert name in names, "setup.cfg's list of packages lacks it"
    assert not any(
        name.startswith(("scenarios/", "runs/", "tests/", "benchmarks/")) for name in names
    )


def test_the_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    """HELM and torch are lent by this environment, or every test run would install gigabytes."""
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    out = probe(tmp_path / "venv" / "bin" / "python", tmp_path)
    assert str(tmp_path) in out
