"""The page of failures and the threat model name tests that exist, in the suite that they say."""

from __future__ import annotations

import ast
import re

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs/explanation/reliability.md").read_text(encoding="utf-8")
NAME = re.compile(r"(\*?)`([\w/]+\.py)::(\w+)`")
NAMED = NAME.findall(PAGE) + NAME.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))


def is_slow(file: str, name: str) -> bool:
    """Raises `StopIteration` if there is no such test."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    test = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in test.decorator_list)


def test_the_eighteen_failures_have_a_row_each_with_an_inverse():
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)
    ]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 19)]
    for number, _, _, inverses in rows:
        assert NAME.search(inverses), number


def test_the_module_of_failures_says_their_numbers():
    """A test that is named after a failure is in that failure's row."""
    for _, _, name in NAME.findall(PAGE):
        if numbered := re.match(r"test_(\d+)_", name):
            assert re.search(rf"^\| {numbered[1]} \|.*{name}`", PAGE, re.MULTILINE), name


def test_every_named_test_is_in_its_suite():
    """Those in italics are slow."""
    wrong = []
    for italics, file, name in NAMED:
        try:
            if is_slow(file, name) != bool(italics):
                wrong.append(f"{file}::{name} is in the other suite")
        except StopIteration:
            wrong.append(f"{file}::{name} does not exist")
    assert len(NAMED) > 48 and not wrong, wrong
