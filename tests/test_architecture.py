"""The rules of the house: imports point down and never in a circle, HELM stays in its rooms, torch
stays out of the deciders, and tests borrow from helpers only.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "flexgen_helm"
# From the bottom up; a package imports only those before it. `config` is a module.
# fmt: off
ORDER = ["hardware", "kernels", "quant", "models", "checkpoint", "tokenizer", "planner", "config", "report",
         "scheduling", "offload", "kv_cache", "engine", "distributed", "service", "harnesses", "plugin", "cli"]
# fmt: on
# Modules that must be usable without torch, so that planning and registration are quick.
TORCH_FREE = [
    "flexgen_helm",
    "flexgen_helm.checkpoint.planned_weights",
    "flexgen_helm.config",
    "flexgen_helm.distributed.ray_cluster",
    "flexgen_helm.cli",
    "flexgen_helm.response_cache",
    "flexgen_helm.scheduling.scheduler",
    "flexgen_helm.engine.fingerprint",
    "flexgen_helm.engine.machine_profile",
    "flexgen_helm.hardware.host_memory",
    "flexgen_helm.hardware.profile",
    "flexgen_helm.models.architectures",
    "flexgen_helm.planner.weight_placement",
    "flexgen_helm.planner.search",
    "flexgen_helm.benchmarks.paper.tables",
    "flexgen_helm.planner.planner",
    "flexgen_helm.report.throughput",
    "flexgen_helm.harnesses.openai_formats",
    "flexgen_helm.service.process",
    "flexgen_helm.service.service",
    "flexgen_helm.run_entries",
    "flexgen_helm.runs.data",
    "flexgen_helm.planner.plan",
    "flexgen_helm.cli.suite_workload",
]


def imports(source):
    """Dotted names of everything imported at any depth of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield node.module or ""


def violations(package, source):
    found = []
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == "helm" and package not in ("plugin", "scenarios"):
            found.append(f"{package} imports {name}")
        if parts[0] in ("lm_eval", "starlette", "uvicorn") and package != "harnesses":
            found.append(f"{package} imports {name}")
        ours = (
            parts[0] == "flexgen_helm" and len(parts) > 1 and package in ORDER and parts[1] in ORDER
        )
        if ours and ORDER.index(parts[1]) > ORDER.index(package):
            found.append(f"{package} imports {name}, which lies above it")
        if name in ("pickle", "dill") or parts[0] in ("scenarios", "runs", "benchmarks"):
            found.append(f"{package} imports {name}")
    return found


def test_imports_point_down():
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert packages | {"config"} == set(ORDER), "a package is missing from the order, or has gone"
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 or parts[0] in ORDER:
            assert violations(parts[0], path.read_text()) == [], path
    for path in (ROOT / "scenarios").rglob("*.py"):
        assert violations("scenarios", path.read_text()) == [], path


@pytest.mark.parametrize(
    "package, line",
    [
        ("engine", "from helm.common.request import Request"),
        ("hardware", "def f():\n    from flexgen_helm.models.config import ModelConfig"),
        ("offload", "import flexgen_helm.engine.engine"),
        ("checkpoint", "import pickle"),
        ("plugin", "from scenarios import x"),
        ("service", "from lm_eval.api.model import TemplateLM"),
        ("cli", "import uvicorn"),
    ],
)
def test_a_forbidden_import_is_found(package, line):
    assert violations(package, line)


def is_type_checking(node):
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported_modules(source, known):
    """Modules among `known` that a module imports at any depth, but for what only a type checker
    sees.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes += node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # a module, or something in one
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            found -= (
                {node.module}
                if all(f"{node.module}.{alias.name}" in known for alias in node.names)
                else set()
            )
    return found & set(known)


def circle(sources):
    """Modules that import each other in a circle; None where there is none."""
    graph = {name: imported_modules(source, sources) for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))


def sources_by_module():
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def test_no_modules_import_each_other():
    assert circle(sources_by_module()) is None


def test_a_circle_is_found():
    guard = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    inside = "def f():\n    "
    sources = {
        "p": "",
        "p.a": "from p.b import x",
        "p.b": "from p import c",
        "p.c": "import sys",
        "p.d": "import p.a, p.c",
    }
    assert circle(sources) is None
    assert circle({**sources, "p.c": "from p.a import f"}) == ["p.a", "p.b", "p.c"]
    assert circle({**sources, "p.c": inside + "import p.b"}) == ["p.b", "p.c"]
    assert circle({**sources, "p.c": guard + "from p.a import f"}) is None
    assert (
        circle({**sources, "p.c": guard + "from p.a import f\nelse:\n    import p.d"}) is not None
    )
    ours = sources_by_module()
    low, high = "flexgen_helm.tokenizer.chat", "flexgen_helm.plugin.suite"
    assert circle({**ours, low: ours[low] + f"\ndef f():\n    import {high}\n"}) is not None


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_deciders_import_no_torch():
    """All of them in one process, whose first heavy import is told."""
    run_python(
        f"import importlib, sys\nfor module in {TORCH_FREE}:\n    importlib.import_module(module)\n"
        "    heavy = {'torch', 'transformers', 'helm'} & set(sys.modules)\n    assert not heavy, "
        "(module, heavy)"
    )


# What a GPU machine may lack, and what then is not to be had.
@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("absent", "prompt", "model"),
    [
        (("helm", "gguf", "typer"), "prompt='the quick'", "path"),
        (
            ("helm", "gguf", "typer", "jinja2", "transformers"),
            "prompt_token_ids=[5, 6]",
            "path, weights='dummy'",
        ),
    ],
)
def test_the_engine_runs_where_what_it_does_not_need_cannot_be_imported(
    tiny, tmp_path, absent, prompt, model
):
    path = tiny("llama").path
    if "transformers" in absent:  # it reads tokenizers
        shutil.copy(path / "config.json", tmp_path)
        path = tmp_path
    out = run_python(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {absent!r}: raise ImportError(name + ' is not here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from flexgen_helm import Engine, GenerationRequest\n"
        f"path = {str(path)!r}\n"
        f"with Engine.from_pretrained({model}) as engine:\n"
        f"    result = engine.run([GenerationRequest({prompt}, max_tokens=3, "
        "ignore_eos=True)])[0]\n"
        "print(len(result.completions[0].token_ids), 'helm' in sys.modules)"
    )
    assert out.split() == ["3", "False"]
