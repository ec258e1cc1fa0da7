"""The engine room of `flexgen-helm run`: `helm-run` with every flag it has, and one block for all its runs.

HELM's runner works run by run, so its batches end where a run ends. Here it goes over the runs twice:

1. each `run_one` goes as far as `Executor.execute`, where its requests are announced and the run is left. The
   service then works through all of them, one model after another, each in one block;
2. HELM's own `run_all`, unchanged. Every request finds its answer ready.

So results, metrics, errors, exit and skipping are those of a plain `helm-run` by construction. The price is that
data and prompts are made twice, which costs no model time.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark import run as helm_run_module
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor, ExecutorError
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner

from flexgen_helm.checkpoint.names import split_precision
from flexgen_helm.errors import FlexgenError, Interrupted, UsageError
from flexgen_helm.plugin import deployment_files, helm_patches, interrupt, models, registration
from flexgen_helm.plugin.failures import data_folder, explain_failure
from flexgen_helm.plugin.run_record import RunRecord, observe_runs, write_json
from flexgen_helm.plugin.service import SubmittedBlock, get_service
from flexgen_helm.plugin.suite_usage import suite_usage
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.scores import read_scores, reused_note
from flexgen_helm.report.suite import SUITE_FILE
from flexgen_helm.report.throughput import versions

_SLASH_NAME = re.compile(r"\bflexgen/([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_NAME = re.compile(r"\bflexgen/[A-Za-z0-9][\w.-]*")


def main(
    argv: Sequence[str],
    progress: Callable[[Any], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Run `argv`, the arguments of `helm-run`. `progress` is handed to the engine; `options` are engine flags
    (client arguments such as `policy` or `device`) for every model of the suite. `precision` may name several, with
    commas between: every run of ours is then run in each of them.

    Returns 0 done, 1 failed, 2 wrong usage or refused, 130 interrupted.
    """
    try:
        args = helm_run_module.build_parser().parse_args(list(argv))
    except SystemExit as stop:  # argparse has printed why, or --help
        return int(stop.code or 0)
    helm_run_module.setup_default_logging(args.log_config)
    if not args.log_config and not (os.environ.get("HELM_LOG_LEVEL") or os.environ.get("LOG_LEVEL")):
        # HELM logs every step to stdout, where our scores go; its warnings and errors stay.
        logging.getLogger("helm").setLevel(logging.WARNING)
    options = {key: value for key, value in (options or {}).items() if value is not None}
    precisions = [name.strip() for name in str(options.pop("precision", "")).split(",") if name.strip()]
    suite = _Suite(precisions)
    interrupt.install()
    service = get_service()
    try:
        for name in precisions:
            if name not in PRECISIONS:
                raise UsageError(f"precision {name!r} is not known; take one or more of {', '.join(PRECISIONS)}")
        models.override(options)  # precisions are in the models' names: results of two must not share a folder
        service.progress = progress
        service.resume()
        suite.run(args)
        suite.print_scores()
        return 0
    except (KeyboardInterrupt, Interrupted):
        _say("Interrupted. Finished answers are kept: the same command continues where this one stopped.")
        return 130
    except FlexgenError as error:
        suite.print_scores()
        _say(str(error))
        return error.exit_code
    except Exception as error:
        suite.print_scores()
        if not suite.failures:
            _say(f"{type(error).__name__}: {error}")
        suite.explain_failures()
        return suite.exit_code()
    finally:
        models.override({})
        service.progress = None
        service.flush()


def _say(text: str) -> None:
    print(f"flexgen-helm: {text}", file=sys.stderr)


class _Parked(Exception):
    """Leaves a `run_one` whose requests have been announced. HELM catches nothing on the way."""


class _Suite:
    """One call of `main`: what was announced, what was run, what failed."""

    def __init__(self, precisions: Sequence[str]) -> None:
        self.precisions = list(dict.fromkeys(precisions))
        self.records: list[RunRecord] = []
        self.failures: dict[str, Exception] = {}
        self.begun = False
        self.folders: list[Path] = []
        self._stages: dict[str, float] = {}
        self._answered = 0.0  # when all answers were there
        self._blocks: dict[str, SubmittedBlock] = {}
        self._finished: list[Path] = []
        self._data: dict[str, Path] = {}  # where the scenario of a run that failed looks for its data
        self._refused: dict[str, FlexgenError] = {}  # why a run's questions could not be computed in the first pass

    def run(self, args: Any) -> None:
        """HELM's `helm_run` with our second pass in its runner."""
        started = time.monotonic()
        load_plugins = helm_run_module.load_entry_point_plugins
        make_specs = helm_run_module.run_entries_to_run_specs
        run_all = Runner.run_all

        def load_plugins_late(**options: Any) -> list[Any]:
            """Plugins are loaded after HELM has read `prod_env`, but ours was there before and registered nothing."""
            plugins = load_plugins(**options)
            registration.complete_file_deployments()
            wanted = args.models_to_run or []
            args.models_to_run = [renamed for name in wanted for renamed in self.rename(name)] or None
            return plugins

        def renamed_specs(run_entries: list[RunEntry], **filters: Any) -> list[RunSpec]:
            entries = [
                replace(entry, description=description)
                for entry in run_entries
                for description in self.rename(entry.description)
            ]
            run_specs = make_specs(run_entries=entries, **filters)
            for run_spec in run_specs:
                self.check_precision(run_spec.adapter_spec.model_deployment)
            return run_specs

        def run_together(runner: Runner, run_specs: list[RunSpec]) -> None:
            self.begun = True
            self.folders = [Path(runner.runs_path) / run_spec.name for run_spec in run_specs]
            _write_deployments(Path(args.local_path), run_specs)
            if not (runner.dry_run or runner.cache_instances_only or runner.executor.execution_spec.url):
                self.collect(runner, run_specs)
            with replaced(runner, "run_one", self._finishing(runner)):
                run_all(runner, run_specs)

        with ExitStack() as undo:
            undo.callback(self._close_blocks)
            undo.enter_context(replaced(helm_run_module, "load_entry_point_plugins", load_plugins_late))
            undo.enter_context(replaced(helm_run_module, "run_entries_to_run_specs", renamed_specs))
            undo.enter_context(replaced(Runner, "run_all", run_together))
            undo.enter_context(observe_runs(self.records.append))
            try:
                helm_run_module.helm_run(args)
            finally:
                if self.records:
                    write_json(self.folders[0].parent / SUITE_FILE, self.as_json(started))

    def rename(self, text: str) -> list[str]:
        """Names as HELM needs them: `flexgen/org/repo` without its second slash, in each precision of the flags.

        A suffix would make another name of one that has an entry in `prod_env`: those are kept as they are."""
        text = _SLASH_NAME.sub(r"flexgen/\1--\2", text)

        def named(precision: str) -> str:
            return _NAME.sub(
                lambda match: match[0] if _has_entry(match[0]) else models.with_precision(match[0], precision), text
            )

        return list(dict.fromkeys(named(precision) for precision in self.precisions)) or [text]

    def check_precision(self, name: str) -> None:
        """Refuse the deployment `name` where `--precision` asks for what its entry decides otherwise: its runs would
        be computed in one precision and filed under another, or written over those of another."""
        model = registration.model_of(name) if self.precisions else None
        if model is None:
            return
        own, asked = model.precision or "fp16", ",".join(self.precisions)
        if _has_entry(name):
            if self.precisions != [own]:
                raise UsageError(
                    f"--precision {asked} cannot change {name}, which its entry in model_deployments.yaml says is "
                    f"{own}; give each precision an entry of its own, with `precision` in its args, and leave out "
                    "--precision"
                )
        elif own != split_precision(name)[1]:
            raise UsageError(
                f"--precision {asked} cannot change {name}, which the file that FLEXGEN_HELM_MODELS names says is "
                f"{own}; take `precision` out of its entry there, or leave out --precision"
            )

    def collect(self, runner: Runner, run_specs: list[RunSpec]) -> None:
        """The first pass: announce the requests of all runs and wait until they are answered."""
        started = time.monotonic()

        def park(executor: Executor, scenario_state: ScenarioState) -> ScenarioState:
            block = helm_patches.announce(executor, scenario_state, hold=True)
            if block is not None:
                self._blocks[name] = block
            raise _Parked

        with _no_repeats(), replaced(Executor, "execute", park):
            for run_spec in run_specs:
                name = run_spec.name
                if helm_patches.model_of(run_spec) is None:
                    continue
                try:
                    runner.run_one(run_spec)
                except _Parked:
                    continue
                except Exception:
                    # The second pass fails in the same place and reports it as HELM does.
                    if runner.exit_on_error:
                        break
        collected = time.monotonic()
        service = get_service()
        service.flush()
        helm_patches.import_classes(
            name for spec in run_specs if spec.name in self._blocks for name in helm_patches.metric_classes(spec)
        )
        for block in self._blocks.values():
            block.wait()
        errors = {name: block.error() for name, block in self._blocks.items()}
        self._refused = {name: error for name, error in errors.items() if isinstance(error, FlexgenError)}
        # Further models are loaded between their blocks.
        load_s = min((service.loading_s(block.model, collected) for block in self._blocks.values()), default=0.0)
        self._answered = time.monotonic()
        generate_s = self._answered - collected - load_s
        self._stages = {"collect": collected - started, "load": load_s, "generate": generate_s}

    def _finishing(self, runner: Runner) -> Callable[[RunSpec], None]:
        """`run_one` that remembers how it ended and lets go of the run's answers."""
        original = runner.run_one

        def run_one(run_spec: RunSpec) -> None:
            refused = self._refused.get(run_spec.name)
            try:
                if isinstance(refused, UsageError):
                    raise refused  # as it would be again, after the model was loaded again
                original(run_spec)
                self._finished.append(Path(runner.runs_path) / run_spec.name)
            except Exception as error:
                self._data[run_spec.name] = data_folder(runner, run_spec)
                # HELM's own error is the text of ours and the whole request.
                self.failures[run_spec.name] = refused if refused and isinstance(error, ExecutorError) else error
                raise
            finally:
                if run_spec.name in self._blocks:
                    self._blocks.pop(run_spec.name).close()

        return run_one

    def _close_blocks(self) -> None:
        while self._blocks:
            self._blocks.popitem()[1].close()

    def as_json(self, started: float) -> dict[str, Any]:
        """The suite's account after this call, which `started`; its runs that were skipped as completed are in it if
        an earlier call's were. `wall_s` is this call's alone."""
        now = time.monotonic()
        tried = [folder.name for folder in self.folders]
        return {
            **suite_usage(self.folders[0].parent, self.records, tried, self.failures),
            "wall_s": {"total": now - started, **self._stages, "finish": now - self._answered},
            "versions": versions(),
        }

    def print_scores(self) -> None:
        """The scores of this call's runs that did not fail, those skipped as completed included, on stdout."""
        from rich.console import Console
        from rich.table import Table

        from flexgen_helm.report.tables import SUMMARY_COLUMNS, runs_table

        finished = []
        for folder in self._finished:
            try:
                finished.append(read_scores(folder))
            except (OSError, ValueError, KeyError):
                continue  # a dry run, or nothing to score
        if not finished:
            return
        table = runs_table(finished)[SUMMARY_COLUMNS]
        note = reused_note(finished)
        drawn = Table(
            title=f"{len(finished)} runs in {self.folders[0].parent}",
            caption=None if note is None else f"{note}.",
            title_justify="left",
            caption_justify="left",
        )
        for position, title in enumerate(table):
            drawn.add_column(title, justify="left" if position < 2 else "right", overflow="fold")
        for row in table.itertuples(index=False):
            drawn.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 160).print(drawn)

    def exit_code(self) -> int:
        """Of a call that failed: 2 where no run was begun or all were refused for what the user asked, else 1."""
        if not self.begun:
            return 2
        codes = {error.exit_code if isinstance(error, FlexgenError) else 1 for error in self.failures.values()}
        return codes.pop() if len(codes) == 1 else 1

    def explain_failures(self) -> None:
        """A sentence for each failed run, those that failed alike together."""
        executed = {record.name for record in self.records}
        alike: dict[str, list[str]] = {}
        for name, error in self.failures.items():
            alike.setdefault(explain_failure(error, None if name in executed else self._data[name]), []).append(name)
        for sentence, names in alike.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            _say(f"{names[0]}{more}: {sentence}")


def _has_entry(name: str) -> bool:
    """Whether a user's file defines the deployment `name`; ours are generated and never in HELM's registry."""
    return name in deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT


def _write_deployments(local_path: Path, run_specs: list[RunSpec]) -> None:
    names = dict.fromkeys(spec.adapter_spec.model_deployment for spec in run_specs)
    ours = [name for name in names if name.startswith(models.PREFIX) and registration.model_of(name) is not None]
    if ours:
        deployment_files.merge(local_path, ours)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; an attribute that an instance only inherits is inherited again after."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


@contextmanager
def _no_repeats() -> Iterator[None]:
    """HELM's log of the first pass would repeat in the second."""
    logger = logging.getLogger("helm")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
