"""Chat templates of a stranger: programs that loop, reach for attributes, or ask for files."""

from __future__ import annotations

import threading
import time

import pytest

from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer import template as module
from flexgen_helm.tokenizer.template import render
from tests.helpers.hostile import MIB, contained

CHAT = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
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


def test_a_loop_without_end_is_stopped_and_other_threads_go_on(monkeypatch):
    monkeypatch.setattr(module, "MAX_CPU_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    rendered: list[str] = []
    over = threading.Event()

    def render_on() -> None:
        while not over.is_set():
            rendered.append(render("{{ messages[0].content }}", CHAT, True, {}))

    thread = threading.Thread(target=render_on)
    thread.start()
    try:
        for _ in range(2):
            with contained(memory=1024 * MIB) as caught:
                render(ENDLESS, CHAT, True, {})
            assert "computes for more than 0.2 s" in str(caught[0])
    finally:
        over.set()
        thread.join()
    assert set(rendered) == {"hi"}
    # The watcher has gone with the last of them, and nothing is raised later.
    deadline = time.monotonic() + 10
    while module._watchdog._watcher is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert module._watchdog._watcher is None and not module._watchdog._ends


def test_without_the_guard_it_would_go_on(monkeypatch):
    """The inverse: with ten times the time the same template computes ten times as long."""
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    used = []
    for limit in (0.1, 1.0):
        monkeypatch.setattr(module, "MAX_CPU_S", limit)
        start = time.thread_time()
        with pytest.raises(RequestError):
            render(ENDLESS, CHAT, True, {})
        used.append(time.thread_time() - start)
    assert used[0] >= 0.1 and used[1] >= 1.0
