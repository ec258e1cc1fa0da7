"""The run specs of HELM and of this package, read from their source files: importing HELM takes
seconds.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Of a decorated function's source, and of a run expander's class.
_RUN_SPEC_NAME = re.compile(r"^@run_spec_function\(\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_RUN_EXPANDER_NAME = re.compile(r"^    name = [\"']([^\"']+)[\"']", re.MULTILINE)


def run_spec_names() -> frozenset[str]:
    """Return the names of all run specs of HELM and of this package; empty if HELM is not
    installed.
    """
    return frozenset(_run_spec_files())


def our_run_spec_names() -> frozenset[str]:
    """Return the names of the run specs of this package."""
    ours = set(package_folders("flexgen_helm.scenarios"))
    return frozenset(name for name, file in _run_spec_files().items() if ours & set(file.parents))


@cache
def _run_spec_files() -> dict[str, Path]:
    """Return the file that defines each run spec, by its name; none without HELM."""
    files: dict[str, Path] = {}
    helm, ours = package_folders("helm"), package_folders("flexgen_helm.scenarios")
    for folder in (
        [folder / "benchmark" / "run_specs" for folder in helm] + ours if helm and ours else []
    ):
        for file in folder.rglob("*.py"):
            files |= dict.fromkeys(_RUN_SPEC_NAME.findall(file.read_text(encoding="utf-8")), file)
    return files


def package_folders(package: str) -> list[Path]:
    """Return the folders of a package, without importing it; none where it is not installed."""
    spec = find_spec(package)
    return (
        [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    )


@cache
def run_expander_names() -> frozenset[str]:
    """Return the arguments that every run entry of HELM may have, whatever its run spec; empty if
    they are not found.
    """
    files = [folder / "benchmark" / "run_expander.py" for folder in package_folders("helm")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return frozenset(name for text in texts for name in _RUN_EXPANDER_NAME.findall(text))


@cache
def run_spec_function(name: str) -> ast.FunctionDef | None:
    """Return the function that makes a run spec, as parsed source; None where no function has a
    decorator with that name.
    """
    with suppress(KeyError, OSError, SyntaxError):
        for node in ast.parse(_run_spec_files()[name].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and name in [
                        getattr(value, "value", "") for value in call.args
                    ]:
                        return node
    return None
