"""The page of failures names tests that exist, in the suite that it says."""

from __future__ import annotations

import ast
import re

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs/explanation/reliability.md").read_text(encoding="utf-8")
NAMED = re.findall(r"(\*?)`([\w/]+\.py)::(\w+)`", PAGE)


def is_slow(file: str, name: str) -> bool:
    """Raises `StopIteration` if there is no such test."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    test = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in test.decorator_list)


def test_the_eighteen_failures_have_a_row_each():
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == [str(number) for number in range(1, 19)]


def test_every_named_test_is_in_its_suite():
    """Those in italics are slow."""
    wrong = []
    for italics, file, name in NAMED:
        try:
            if is_slow(file, name) != bool(italics):
                wrong.append(f"{file}::{name} is in the other suite")
        except StopIteration:
            wrong.append(f"{file}::{name} does not exist")
    assert len(NAMED) > 60 and not wrong, wrong
