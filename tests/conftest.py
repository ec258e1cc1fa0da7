"""Fixtures for all tests: tiny models, the wheel's model, the data sets, and what a run of the
tests needs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.helpers")  # their assertions show values too

from tests.helpers.forks import share  # noqa: E402
from tests.helpers.paths import SHARED, USERS_HOME  # noqa: E402
from tests.helpers.tiny_models import TinyModel, build_tiny  # noqa: E402

# What tests remember is not the user's: each process of the run has a home of its own.
_home = tempfile.TemporaryDirectory(prefix="flexgen_helm_tests")
os.environ["FLEXGEN_HELM_HOME"] = _home.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Plans are made for a known machine: measuring this one would take half a minute for every home
# folder.
# `-m gpu`
os.environ.setdefault("FLEXGEN_HELM_HARDWARE", "h100" if "gpu" in sys.argv else "laptop")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Here and in the processes that tests start: threads of tiny products wait for each other where
    # others compute.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of tests that take more

with suppress(ImportError):  # a GPU machine may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile("tests", deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("tests")

# Whole programs and the other longest files begin first: at the end one worker would wait for them.
_LONGEST = ("tests/e2e/", "tests/cuda/", "tests/engine/test_wheel_reference.py")


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of a run share what forks; where times are measured, each worker reads those
    of its own.
    """
    if getattr(config.option, "numprocesses", None) and "TEST_TIMES" not in os.environ:
        share()


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))
    _leave_cases_to_the_slow_suite(items)


def _leave_cases_to_the_slow_suite(items: list[pytest.Item]) -> None:
    """Mark the cases of a test with `fast(n)` slow, but for n of them, spread over its matrix."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("fast")
        assert mark is not None
        kept = {round(i * (len(group) - 1) / max(1, mark.args[0] - 1)) for i in range(mark.args[0])}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test on one thread, the fixtures of its module too: an engine keeps to the threads that
    it began with.

    Tiny products gain nothing from threads, and lose a hundredfold where another process keeps a
    core busy.
    """
    torch = sys.modules.get("torch")
    if torch is None or "wheel_model" in getattr(item, "fixturenames", ()):
        return (yield)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (yield)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """tiny('opt') -> TinyModel, built once a session."""
    built: dict[str, TinyModel] = {}

    def get(variant: str) -> TinyModel:
        if variant not in built:
            built[variant] = build_tiny(tmp_path_factory.mktemp(variant), variant)
        return built[variant]

    return get


@pytest.fixture(scope="session")
def wheel_model() -> Path:
    """The GGUF of the wheel, where `flexgen-helm fetch smollm2-135m-instruct-q4_1` (or make test)
    has put it.
    """
    named = os.environ.get("FLEXGEN_TEST_GGUF")
    found = (
        Path(named)
        if named
        else USERS_HOME / "models/smollm2-135m-instruct-q4_1/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    if not found.is_file():
        pytest.skip(
            "the wheel's model is absent: run flexgen-helm fetch smollm2-135m-instruct-q4_1"
        )
    return found


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets beside the project (or `FLEXGEN_HELM_DATA`)."""
    named = os.environ.get("FLEXGEN_HELM_DATA")
    found = Path(named) if named else SHARED / "data"
    if not found.is_dir():
        pytest.skip("no data sets here: set FLEXGEN_HELM_DATA")
    return found


@pytest.fixture(scope="module")
def fake_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The named data folder holds a few made-up passages and pages, which `FAKE_ENTRIES` ask
    about.
    """
    from tests.helpers.data_sets import FAKE_PASSAGES, PAGES, write_data

    folder = write_data(tmp_path_factory.mktemp("data") / "data", FAKE_PASSAGES, PAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_DATA", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def proved_by_the_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a GPU take its fast paths, and compare values themselves: what is wrong shall fail
    them.
    """
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("flexgen_helm.engine.engine.require_proof", lambda *_: True)
        monkeypatch.setattr("flexgen_helm.engine.engine.compare_kernels", lambda *_: None)


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring's least size is more than all weights of a tiny model."""
    monkeypatch.setattr("flexgen_helm.planner.staging.MIN_STAGING_BYTES", 1 << 17)
