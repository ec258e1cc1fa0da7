"""Commands that are stopped while all their answers are under way: what was drawn is not drawn
again.

The runs are real; passes are slowed down, so that most of a run's time is theirs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cache

import pytest

from tests.helpers.killed_suites import Outcome, Suites
from tests.helpers.lm_eval_tasks import invented_tasks
from tests.helpers.paths import ROOT
from tests.helpers.shares import share
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

PASS_S, KEEP_S, TOKENS = 0.05, 0.25, 60
# Seconds beside: a transaction, and a machine that does something else.
SLACK_S = 0.5
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
BATCH = ["batch", "in.jsonl", "-o", "out.jsonl", "--model", "tiny", "--batch-invariant"]
COMMANDS = {
    "batch": BATCH,
    # Answers of at most 50 tokens.
    "run": [
        "run", "-r", "synthetic_reasoning:mode=pattern_match,model=flexgen/tiny", "-m", "4",
        "--suite", "s", "--batch-invariant",
    ],
    "lm-eval": [
        "lm-eval", "--model_args", "pretrained=tiny,batch_invariant=True", "--include_path",
        "tasks", "--tasks", "sums", "--gen_kwargs", f"max_gen_toks={TOKENS}", "--log_samples",
        "--output_path", "results",
    ],
}  # fmt: skip
DIVERGENCE = [
    "divergence", "tiny", "--text", "text", "--window", "40", "--by-layer", "--json",
    "--batch-invariant", "--policy", "2x1,0,100,0,100,0,100", "--offload-dir", "offload",
]  # fmt: skip


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    save_random(folder / "model", llama_config(max_position_embeddings=2000), seed=1)
    save_tokenizer(folder / "model")
    with Suites(folder, folder / "model") as suites:
        yield suites


def requests(seed: int) -> str:
    draw = random.Random(seed)
    bodies = [
        {"prompt": f"Tell me about {draw.randrange(10**6)}", "max_tokens": TOKENS, "seed": number,
         "temperature": number % 2, "n": 1 + 2 * (number % 4 == 1), "logprobs": number % 3, "echo": number == 5}
        for number in range(8)
    ]  # fmt: skip
    lines = (
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b}
        for i, b in enumerate(bodies)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


class Stops:
    """A command that is stopped and started again in one folder, beside a run of it without a
    stop.
    """

    def __init__(self, suites: Suites, name: str, command: str = "batch") -> None:
        self.suites, self.name, self.folder = suites, name, suites.folder / name
        self.command = COMMANDS[command]
        self.folder.mkdir()
        (self.folder / "in.jsonl").write_text(requests(1))
        if command == "lm-eval":
            invented_tasks(self.folder / "tasks", 8)
        self.outcomes: list[Outcome] = []

    def start(self, **order) -> Outcome:
        options = {
            "command": self.command,
            "converts": False,
            "pass_s": PASS_S,
            "keep_every_s": KEEP_S,
            **order,
        }
        self.outcomes.append(self.suites.run(self.name, **options))
        return self.outcomes[-1]

    def answers(self) -> object:
        if self.command[0] == "run":
            return self.suites.results(self.name)
        if self.command[0] == "lm-eval":
            *_, newest = sorted(self.folder.rglob("samples_*.jsonl"))
            return [json.loads(line)["resps"] for line in newest.read_text().splitlines()]
        lines = map(json.loads, (self.folder / "out.jsonl").read_text().splitlines())
        return [json.dumps({**line["response"]["body"], "id": "", "created": 0}) for line in lines]

    def drawn_again(self) -> list[tuple[float, str]]:
        """The tokens that were drawn more than once, with the seconds from then to their run's
        stop.
        """
        later = Counter(token for outcome in self.outcomes for token in tokens(outcome))
        found = []
        for outcome in self.outcomes:
            later.subtract(tokens(outcome).keys())
            found += [
                (outcome.signalled - at, token)
                for token, at in tokens(outcome).items()
                if later[token]
            ]
        return found


def tokens(outcome: Outcome) -> dict[str, float]:
    """The tokens of a run (key, completion and step), and when each was drawn."""
    words = [line.rpartition(" ") for line in outcome.drawn if line.count(" ") == 3]
    return {token: float(at) for token, _, at in words if at.count(".") == 1}


@pytest.fixture(scope="module")
def whole(suites):
    """Command -> a run of it without a stop."""

    @cache
    def run(command: str = "batch") -> Stops:
        stops = Stops(suites, f"whole-{command}", command)
        assert stops.start().code == 0, stops.outcomes[-1].output
        assert stops.answers()
        return stops

    return run


def stop_and_go_on(
    suites: Suites, whole: Stops, name: str, numbers: list[int], draw: random.Random
) -> None:
    """Stop the command by signals at random moments, each a part of the run further; then let it
    end.
    """
    command = whole.command[0]
    stops, expected = Stops(suites, f"{command}-{name}", command), tokens(whole.outcomes[0])
    for number in numbers:
        outcome = stops.start(
            name="draw", at=draw.randrange(len(expected) // (1 + len(numbers))), number=number
        )
        assert outcome.code == (130 if number != signal.SIGKILL else -signal.SIGKILL), (
            outcome.output
        )
        if number != signal.SIGKILL:
            assert f"Go on with:\n  flexgen-helm {command} " in outcome.output
    assert stops.start().code == 0, stops.outcomes[-1].output
    assert stops.answers() == whole.answers()
    assert {token for outcome in stops.outcomes for token in tokens(outcome)} == set(expected)
    again = stops.drawn_again()
    assert all(seconds < PASS_S + KEEP_S + SLACK_S for seconds, _ in again), max(again)
    assert any("goes on behind" in outcome.output for outcome in stops.outcomes[1:])
    if signal.SIGKILL not in numbers:
        assert not again  # what is pending is written


def test_a_killed_batch_goes_on_behind_its_tokens(suites, whole):
    stop_and_go_on(suites, whole("batch"), "killed", [signal.SIGKILL], random.Random(1))


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_token(suites, whole, number):
    stop_and_go_on(suites, whole("batch"), signal.Signals(number).name, [number], random.Random(2))


@pytest.mark.slow
def test_without_keeping_all_is_drawn_again(suites, whole):
    """The guard's inverse."""
    stops = Stops(suites, "unkept")
    stops.start(name="draw", at=200, number=signal.SIGKILL, keep_every_s=1e6)
    assert stops.start().code == 0
    assert len(stops.drawn_again()) == len(tokens(stops.outcomes[0])) == 201


@pytest.mark.slow
@pytest.mark.parametrize("number", share(range(4), 4))
@pytest.mark.parametrize("command", COMMANDS)
def test_stopped_at_random_moments(suites, whole, command, number):
    draw = random.Random(number)
    stop_and_go_on(suites, whole(command), f"random-{number}", draw.choices(SIGNALS, k=3), draw)


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_divergence_computes_no_finished_pass_again(suites, number):
    def start(folder: str, **order) -> Outcome:
        (suites.folder / folder).mkdir(exist_ok=True)
        (suites.folder / folder / "text").write_text(
            (ROOT / "SECURITY.md").read_text(encoding="utf-8")[:700]
        )
        return suites.run(folder, command=DIVERGENCE, converts=False, keep_every_s=0.0, **order)

    def printed(outcome: Outcome) -> dict:
        assert outcome.code == 0, outcome.output
        return json.loads(
            outcome.output[outcome.output.index("{\n") : outcome.output.rindex("}") + 1]
        )

    folder, whole = f"divergence-{number}", start("divergence")
    # The first half is the baseline's: its small model that is compared with transformers, then the
    # windows.
    steps = whole.steps.count("compute")
    stopped = start(folder, name="compute", at=steps // 2 - 7, number=number)
    assert stopped.code == (130 if number != signal.SIGKILL else -signal.SIGKILL), stopped.output
    if number != signal.SIGKILL:
        assert "Go on with:\n  flexgen-helm divergence tiny" in stopped.output
    again = start(folder)
    assert printed(again) == printed(whole)
    assert again.steps.count("compute") <= steps - 25  # five passes or more, of five stages each
    assert not list((suites.folder / folder / "offload").glob("logits-*"))


DEAF = """
import sys, torch
from flexgen_helm.cli import main
from flexgen_helm.engine import executor

def compute(*_):
    print("computes", flush=True)
    while True:
        torch.ones(9, 9) @ torch.ones(9, 9)

executor.Executor.run = compute
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_second_signal_changes_nothing(suites):
    """Not even while the engine is in the middle of something: ended by Python, its thread would
    abort the process.
    """
    folder = Stops(suites, "twice").folder
    (folder / "models.yaml").write_text(json.dumps({"tiny": str(suites.model)}))
    variables = {
        "FLEXGEN_HELM_HOME": str(folder / "home"),
        "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, *BATCH, "--unverified"], cwd=folder, env={**os.environ, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line == "computes\n" for line in process.stdout)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "terminate called" not in rest, rest


@pytest.mark.slow
def test_another_precision_goes_on_behind_nothing(suites):
    """Its answers are others."""
    stops, apart = Stops(suites, "precisions"), Stops(suites, "apart")
    stops.start(name="draw", at=200, number=signal.SIGTERM)
    for one in (stops, apart):
        assert one.start(command=[*BATCH, "--precision", "8bit"]).code == 0, one.outcomes[-1].output
        assert "goes on behind" not in one.outcomes[-1].output
    assert stops.answers() == apart.answers()
    assert stops.start().code == 0 and "goes on behind" in stops.outcomes[-1].output
