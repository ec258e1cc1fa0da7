"""A long run that is stopped at drawn moments, and what it computes again.

    python -m tests.helpers.long_stops COMMAND MINUTES SEED WAY...      prints a line a stop

COMMAND: batch, run or lm-eval. WAY: KILL, TERM or INT, the signals; copy, which goes on in a copy of
the folder, as after a power cut; full, a disk that has no room before KILL comes; freed, one that
has again.
A model's weights are read at a rate by which a pass takes seconds.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

from tests.helpers.killed_suites import Suites
from tests.helpers.small_disks import small_disk
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer
from tests.reliability import test_stops
from tests.reliability.test_stops import Stops, tokens

PASSES = {"batch": 300, "run": 52, "lm-eval": 100}
STREAMED = {"policy": "8x2,0,0,100,0,100,0", "schedule": "zigzag", "offload_dir": "offload"}
DISK_BYTES = 16 << 20
READ_BYTES = 230 << 10  # of a pass
FULL_S = 40.0


def command(name: str) -> list[str]:
    if name == "lm-eval":
        words = [word.replace(f"max_gen_toks={test_stops.TOKENS}", f"max_gen_toks={PASSES[name]}")
                 for word in test_stops.COMMANDS[name]]  # fmt: skip
        given = {"pretrained": "tiny", "batch_invariant": True, **STREAMED}
        words[words.index("--model_args") + 1] = (
            str(given).replace("'", '"').replace("True", "true")
        )
        return words
    flags = [
        word for key, value in STREAMED.items() for word in ("--" + key.replace("_", "-"), value)
    ]
    return [*test_stops.COMMANDS[name], *flags]


class LongRun:
    """name: of the command. moments: seconds of computing after which it is stopped."""

    def __init__(self, suites: Suites, name: str, minutes: float) -> None:
        test_stops.TOKENS = PASSES["batch"]
        self.pass_s = 60 * minutes / PASSES[name]
        self.whole, self.stops = (
            Stops(suites, f"{name}-{kind}", name) for kind in ("whole", "stopped")
        )
        for one in (self.whole, self.stops):
            one.command = command(name)
        outcome = self.whole.start(pass_s=0.0, keep_every_s=10.0)
        assert outcome.code == 0, outcome.output
        self.expected = tokens(outcome)

    def start(self, way: str = "", after_s: float | None = None) -> None:
        """Run until it is stopped in a way, or to the end."""
        number = signal.Signals[f"SIG{way}"] if way in ("KILL", "TERM", "INT") else signal.SIGKILL
        disturbs = after_s is not None and way in ("full", "freed")
        if disturbs:
            thread = threading.Thread(target=self._fill, args=(after_s, way == "freed"))
            thread.start()
        self.stops.start(
            pass_s=0.0, read_gb_s=READ_BYTES / self.pass_s / 1e9, keep_every_s=10.0,
            after_s=after_s, number=number, copies=way == "copy", deadline_s=3600,
        )  # fmt: skip
        if disturbs:
            thread.join()
            self.filler.unlink(missing_ok=True)

    @property
    def filler(self) -> Path:
        return self.stops.folder / "home" / "filler"

    def _fill(self, after_s: float, is_freed: bool) -> None:
        """Fill the disk of the home some time before a moment, counted from the first pass."""
        time.sleep(1)
        while not (self.stops.folder / "promised").exists():
            time.sleep(0.05)
        time.sleep(after_s - FULL_S)
        with self.filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        if is_freed:
            time.sleep(2 / 3 * FULL_S)
            self.filler.unlink()

    def print(self, ways: list[str]) -> None:
        """Print what each stop cost; a stop after the end is none."""
        outcomes = self.stops.outcomes
        for index, (way, stopped, next_) in enumerate(zip(ways, outcomes, outcomes[1:])):
            if not stopped.signalled or stopped.code == 0:
                print(f"{way:5} after the end", stopped.code)
                continue
            later = {token for outcome in outcomes[index + 1 :] for token in tokens(outcome)}
            drawn = tokens(stopped)
            kept = [at for token, at in drawn.items() if token not in later]
            kept_at = max(
                kept, default=stopped.passes[0][0] if stopped.passes else stopped.signalled
            )
            first = min(tokens(next_).values(), default=next_.signalled)
            before = [(end - began, num) for began, end, num in next_.passes if began < first]
            again_s = sum(seconds for seconds, _ in before)
            print(
                f"{way:5} drawn {len(drawn):5} again {len(drawn) - len(kept):4}, lost"
                f" {stopped.signalled - kept_at:6.1f} s, then prompts {again_s:5.1f} s of"
                f" {sum(num for _, num in before):.0f} tokens, promised {stopped.promised:6.1f} s, ends after"
                f" {stopped.seconds_after_signal:.1f} s, code {stopped.code}",
                flush=True,
            )
            assert "Traceback" not in stopped.output, stopped.output

    def check(self) -> None:
        """The answers are those of a run without a stop, and none was computed twice."""
        last = self.stops.outcomes[-1]
        assert last.code == 0, last.output
        assert self.stops.answers() == self.whole.answers()
        drawn = {token for outcome in self.stops.outcomes for token in tokens(outcome)}
        assert drawn == set(self.expected)
        computed = [key for outcome in self.stops.outcomes for key in outcome.computed]
        again = len(computed) - len(set(computed))
        passes = [end - began for one in self.stops.outcomes for began, end, _ in one.passes]
        print(f"{len(passes)} passes, {median(passes):.2f} s each")
        print(f"equal to the bit; {len(set(computed))} answers, {again} of them computed twice")


def main(name: str, minutes: float, seed: int, ways: list[str]) -> None:
    draw = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_random(folder / "model", llama_config(max_position_embeddings=2000), seed=1)
        save_tokenizer(folder / "model")
        packages = ["lm_eval.evaluator"] if name == "lm-eval" else []
        suites = stack.enter_context(Suites(folder, folder / "model", None, *packages))
        run = LongRun(suites, name, minutes)
        if {"full", "freed"} & {*ways}:
            stack.enter_context(small_disk(run.stops.folder / "home", DISK_BYTES))
        moments = sorted(draw.uniform(0, 60 * minutes) for _ in ways)
        for way, began, at in zip(ways, [0.0, *moments], moments):
            run.start(way, max(at - began, 5.0 + FULL_S * (way in ("full", "freed"))))
        run.start()
        run.print(ways)
        run.check()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
