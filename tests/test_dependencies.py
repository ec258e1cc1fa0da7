"""Everything that is shipped imports only what setup.cfg declares, and no bound admits a version
with an advisory.
"""

from __future__ import annotations

import ast
import re
import sys
from configparser import ConfigParser
from functools import cache
from importlib import metadata
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flexgen_helm.checkpoint.convert import OLDEST_TORCH
from tests.helpers.paths import ROOT

SHIPPED = ("flexgen_helm", "scenarios", "runs", "benchmarks")
# Folder or extra that declares what these folders import beyond the shipped package.
BY_EXTRA = {
    "bench": ("benchmarks",),
    "lm-eval": ("flexgen_helm", "benchmarks"),
    "ray": ("flexgen_helm",),
    "serve": ("flexgen_helm",),
}
OURS = {*SHIPPED, "tests", "examples"}

# Imported without a declaration, each with its reason.
UNDECLARED = {
    "triton": "CUDA builds of torch bring it; without it plain torch operations unpack 4 bits",
    "xllamacpp": "llama.cpp, a reference of tests that are skipped where it is absent",
}


@cache
def imported(source):
    """Top-level names of everything that a module imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            names |= {
                str(arg.value).split(".")[0] for arg in node.args if isinstance(arg, ast.Constant)
            }
    return names - set(sys.stdlib_module_names) - OURS


def sources(folders):
    return chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)


@cache
def distributions():
    """Importable name -> canonical names of the installed distributions that provide it."""
    return {
        name: sorted({canonicalize_name(dist) for dist in dists})
        for name, dists in metadata.packages_distributions().items()
    }


def requirements(text):
    return [
        Requirement(line)
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


@cache
def declared():
    """Requirements by extra; '' for those of the package itself."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = {name: requirements(text) for name, text in config["options.extras_require"].items()}
    return {"": requirements(config["options"]["install_requires"]), **extras}


def names(extra):
    """Canonical names that an extra declares, with those of the extras it contains."""
    found = set()
    for requirement in declared()[extra]:
        name = canonicalize_name(requirement.name)
        found.add(name)
        if name == "flexgen-helm":
            found |= set().union(*(names(inner) for inner in requirement.extras))
    return found


def missing(source, allowed):
    """Imported names whose distribution is not among the allowed ones."""
    return sorted(
        name
        for name in imported(source)
        if name not in UNDECLARED and not allowed & set(distributions().get(name, [name]))
    )


def allowed_in(path):
    folder = path.relative_to(ROOT).parts[0]
    extras = [extra for extra, folders in BY_EXTRA.items() if folder in folders]
    return names("").union(*(names(extra) for extra in extras))


@pytest.mark.parametrize("folder", SHIPPED)
def test_every_import_is_declared(folder):
    found = {
        str(path): undeclared
        for path in sources([folder])
        if (undeclared := missing(path.read_text(), allowed_in(path)))
    }
    assert not found, "declare these in setup.cfg"


def test_an_undeclared_import_is_found():
    source = (
        "import os\nimport torch.nn\ndef f():\n    from requests.adapters import HTTPAdapter\n    "
        "import triton"
    )
    assert missing(source, {"torch"}) == ["requests"]
    assert missing("import yaml", names("")) == [] and missing("import yaml", {"torch"}) == ["yaml"]
    assert missing("import pytest\npytest.importorskip('nowhere_at_all')", names("dev")) == [
        "nowhere_at_all"
    ]


# A row of SECURITY.md: package, first version without the hole, advisories, why it matters.
_ADVISORY = re.compile(r"^\| ([\w-]+) \| ([\d.]+) \| (CVE-[^|]+) \| [^|]+ \|$", re.MULTILINE)


def admitted(requirement, first_good):
    """Versions before `first_good` that a requirement admits, among those just below it and all
    releases of old.
    """
    good = Version(first_good)
    below = [
        Version(".".join(map(str, (*good.release[:index], good.release[index] - 1, 999))))
        for index in range(len(good.release))
        if good.release[index]
    ]
    return [
        str(version)
        for version in (*below, Version("0.1"))
        if requirement.specifier.contains(version)
    ]


def test_bounds_exclude_versions_with_advisories():
    rows = _ADVISORY.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    bounds = {
        canonicalize_name(bound.name): bound for extra in declared().values() for bound in extra
    }
    assert {name for name, _, _ in rows} >= {"transformers", "torch", "jinja2"}
    assert {
        name: old
        for name, first, _ in rows
        if (old := admitted(bounds[canonicalize_name(name)], first))
    } == {}
    first_torch = dict((name, first) for name, first, _ in rows)["torch"]
    assert ".".join(map(str, OLDEST_TORCH)) == first_torch, "what `convert` asks for"


def test_a_bound_that_admits_an_advisory_is_found():
    assert admitted(Requirement("x>=3.1.6"), "3.1.6") == []
    assert admitted(Requirement("x>=3.1"), "3.1.6") == ["3.1.5.999"]
    assert admitted(Requirement("x"), "5.3") == ["4.999", "5.2.999", "0.1"]
