"""Every wait, record and synchronization of the transfers is needed: each one removed in turn is
caught by a run.
"""

import ast
import importlib
import time
import types
from pathlib import Path

import pytest
import torch

import flexgen_helm
from flexgen_helm import Policy
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.run_memory import RunMemory
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import requests, run
from tests.helpers.offload import with_expert_slots

_PACKAGE = Path(flexgen_helm.__file__).parent
_ORDERING = {
    "wait_event", "wait_stream", "wait", "record", "record_event", "record_stream", "synchronize",
    "finish_stores",
}  # fmt: skip

_ROUNDS = 20


def statements():
    """Yield module, function and text of each ordering statement of the transfers, with its number
    of that text.

    Without waits of host threads for each other: tests/offload and tests/kv_cache cover those.
    """
    for path in sorted([*_PACKAGE.glob("offload/*.py"), *_PACKAGE.glob("kv_cache/*.py")]):
        module = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                inner = {id(n) for f in ast.walk(function) if f is not function and isinstance(f, ast.FunctionDef)
                         for n in ast.walk(f)}  # fmt: skip
                found = [
                    ast.unparse(n) for n in ast.walk(function) if _orders(n) and id(n) not in inner
                ]
                for number, text in enumerate(found):
                    yield module, function.name, text, found[:number].count(text)


def _orders(node):
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _ORDERING
    )


class _Remover(ast.NodeTransformer):
    def __init__(self, text, number):
        self.text, self.left = text, number

    def visit_Expr(self, node):
        if _orders(node) and ast.unparse(node) == self.text:
            self.left -= 1
            if self.left < 0:
                self.left = 1 << 30
                return ast.copy_location(ast.Pass(), node)
        return node


def remove(patch, module, function, text, number):
    """Replace a method by itself without one statement."""
    real = importlib.import_module(module)
    assert real.__file__ is not None
    tree = ast.parse(Path(real.__file__).read_text())
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name != function and not any(
                isinstance(inner, ast.FunctionDef) and inner.name == function for inner in ast.walk(method)
            ):  # fmt: skip
                continue
            before = ast.dump(method)
            _Remover(text, number).visit(method)
            if ast.dump(method) == before:
                continue
            code = next(
                constant
                for part in compile(
                    ast.fix_missing_locations(tree), real.__file__, "exec"
                ).co_consts
                if isinstance(part, types.CodeType) and part.co_name == owner.name
                for constant in part.co_consts
                if isinstance(constant, types.CodeType) and constant.co_name == method.name
            )
            known = getattr(real, owner.name).__dict__[method.name]
            made = types.FunctionType(
                code, real.__dict__, method.name, known.__defaults__, known.__closure__
            )
            made.__kwdefaults__ = known.__kwdefaults__
            patch.setattr(getattr(real, owner.name), method.name, made)
            return
    raise AssertionError(f"{text} is not in a method {function} of {module}")


# Placements that use every transfer, and answers of several lengths, so that caches move and grow.
RUNS = {
    "three tiers": dict(policy=Policy(3, 2, *(0.3,) * 6), schedule="zigzag"),
    "host": dict(policy=Policy(3, 2, 0, 1, 0, 1, 0, 1), schedule="zigzag"),
    "cache alone": dict(policy=Policy(3, 2, 1, 0, 0, 1, 1, 0), schedule="zigzag"),
    "growing": dict(policy=Policy(3, 2, 0, 1, 0, 1, 0, 1), schedule="zigzag", page=16),
    "selected": dict(
        policy=Policy(3, 2, 0, 1, 0, 1, 0, 1),
        schedule="zigzag",
        precision="4bit-s",
        longest=80,
        answers=(9,),
    ),
    # Only experts are offloaded: what the ring marks would order them, too.
    "experts": dict(
        policy=Policy(3, 2, 0.4, 0.6, 1, 0, 1, 0), schedule="zigzag", variant="mixtral"
    ),
}


def late(copy):
    """Copies that are late: otherwise chance orders them before what needs them."""

    def copied(*arguments, **named):
        time.sleep(0.003)
        return copy(*arguments, **named)

    return copied


def races(tiny, folder, settings):
    """Run until the first race; return how many there were."""
    settings = dict(settings)
    model = tiny(settings.pop("variant", "llama"))
    longest, answers = settings.pop("longest", 30), settings.pop("answers", (1, 2, 5, 9))
    asked = [request for new in answers for request in requests(2 + new % 2, longest, new)]
    with cuda_in_host_memory() as device, pytest.MonkeyPatch.context() as patch:
        with_expert_slots(patch, 2)
        if page := settings.pop("page", 0):  # caches grow, as those of long answers do
            patch.setattr(RunMemory, "_page_tokens", page)
        patch.setattr(TransferManager, "to_host", late(TransferManager.to_host))
        stops = dict(should_stop=lambda: bool(device.races))
        try:
            run(
                model.path,
                asked,
                torch.float16,
                cpu_attention=False,
                offload_dir=folder,
                stops=stops,
                **settings,
            )
        except Exception as error:
            return 1 if device.races else pytest.fail(f"stopped: {error!r}")
        return sum(device.races.values())


@pytest.mark.fast(2)
@pytest.mark.parametrize("settings", RUNS)
def test_the_code_as_it_is_has_no_race(tiny, tmp_path, settings):
    assert not races(tiny, tmp_path, RUNS[settings])


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "statement", statements(), ids=lambda s: " ".join(map(str, s)).removeprefix("flexgen_helm.")
)
def test_each_removed_statement_is_caught(tiny, tmp_path, monkeypatch, statement):
    remove(monkeypatch, *statement)
    # The first run that shows a race is enough; some statements need one of their own.
    known = {
        "settled": "growing",
        "_values": "selected",
        "move": "host",
        "flexgen_helm.offload.experts": "experts",
    }
    first = known.get(statement[0], known.get(statement[1], "three tiers"))
    names = sorted(RUNS, key=lambda name: name != first)
    # Beside other programs, threads may meet in the right order by chance: a run shows the race in
    # one of some rounds.
    assert any(races(tiny, tmp_path, RUNS[name]) for _ in range(_ROUNDS) for name in names)
