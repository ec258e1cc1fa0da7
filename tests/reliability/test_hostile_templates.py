"""Chat templates of a stranger: programs that reach for attributes, ask for files, or compute huge
numbers.
"""

from __future__ import annotations

import pytest

from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer.template import render
from tests.helpers.hostile import MIB, contained

CHAT = [{"role": "user", "content": "hi"}]
REFUSED = {
    "attributes of a text": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals of a function": ("{{ lipsum.__globals__.os.system('touch ran') }}", "unsafe"),
    "globals by a filter": ("{{ (lipsum|attr('__globals__')).os.system('touch ran') }}", "unsafe"),
    "a changed message": ("{{ messages.append(1) }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a deep expression": ("{% if " + "(" * 3000 + "1" + ")" * 3000 + " %}{% endif %}", "recursion"),
    "no Jinja": ("{% for %}", "refuses these messages"),
    "a power": ("{{ 9**9**9 }}", "a power"),
    "many products": ("{% macro f(x) %}" + "{% set x = x*x %}" * 22 + "{% endmacro %}{{ f(3) }}", "22 products"),
    "a power among keyword arguments": ("{{ dict(x, **{'a': 9\n**9}) }}", "a power"),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def imported():
    render("{{ messages[0].content }}", CHAT, True, {})


@pytest.mark.parametrize("template, message", REFUSED.values(), ids=REFUSED)
def test_what_leaves_the_sandbox_is_refused(tmp_path, monkeypatch, template, message):
    monkeypatch.chdir(tmp_path)
    with contained(memory=256 * MIB) as caught:
        render(template, CHAT, True, {})
    assert isinstance(caught[0], RequestError) and message in str(caught[0])
    assert not (tmp_path / "ran").exists()


def test_stars_outside_of_expressions_are_text():
    assert render("**{{ messages[0].content }}** {# 2**3 #}", CHAT, True, {}) == "**hi** "


def test_keyword_arguments_are_no_power():
    template = "{% set m = dict(messages[0], **{'a': 'b'}) %}{{ m.content }} {{ dict( ** m).a }}"
    assert render(template, CHAT, True, {}) == "hi b"
