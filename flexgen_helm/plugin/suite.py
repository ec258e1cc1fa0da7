"""`flexgen-helm run`: all of `helm-run`'s flags, but the requests of all runs are computed
together, model by model.

HELM's runner works run by run, so its batches end where a run ends. Here it goes over the runs
twice:

1. Each `run_one` goes as far as `Executor.execute`, where the run is left with its requests. The
   service then computes those of all runs, model after model, in one block per model.
2. HELM's own `run_all`, unchanged. Every request finds its result ready.

So results, metrics, errors, exit and skipping are those of a plain `helm-run`. The price is that
data and prompts are made twice, which takes no time of the model.
"""

from __future__ import annotations

import logging
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from helm.benchmark import run as helm_benchmark_run
from helm.benchmark.executor import ExecutorError
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner, RunnerError

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.errors import FlexgenError, Interrupted, UsageError
from flexgen_helm.files import replace_json
from flexgen_helm.plugin import deployment_files, helm_patches, registration
from flexgen_helm.plugin.context import get_context, interrupt_on_signals
from flexgen_helm.plugin.failures import data_folder, exit_code_of, explain_entry, explain_failure
from flexgen_helm.plugin.helm_log import HelmLog
from flexgen_helm.plugin.model_names import prompt_digest
from flexgen_helm.plugin.model_settings import ModelSettings, without_slash
from flexgen_helm.plugin.run_specs import report_other_settings, without_repeated
from flexgen_helm.plugin.submission import Submission, model_of_adapter
from flexgen_helm.plugin.suite_sample import ComputedPart, SuiteSample, all_decided, baseline_of
from flexgen_helm.plugin.usage import HelmRun, computed_blocks, suite_usage
from flexgen_helm.progress import ProgressPhase, observed_by, report
from flexgen_helm.quant.precisions import split_precisions
from flexgen_helm.report.block_records import add_blocks
from flexgen_helm.report.scores import entry_of, grouped
from flexgen_helm.report.suite import SUITE_FILE
from flexgen_helm.report.verdicts import first_names
from flexgen_helm.report.versions import versions
from flexgen_helm.run_entries import conf_file
from flexgen_helm.service.loaders import ClusterLoader
from flexgen_helm.service.service import Service, SubmittedBlock
from flexgen_helm.system_errors import explain

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession


@dataclass(frozen=True)
class SuiteOutcome:
    """How a call of `run_suite` ended.

    exit_code: 0 done, 1 failed, 2 wrong usage or refused, 130 interrupted.
    sentences: what went wrong, and what to do.
    finished: folders of the runs that did not fail, skipped ones too.
    num_warnings: warnings and errors of HELM's logger.
    is_dry: nothing was computed.
    """

    exit_code: int
    sentences: Sequence[str] = ()
    finished: Sequence[Path] = ()
    num_warnings: int = 0
    is_dry: bool = False


def run_suite(
    argv: Sequence[str],
    options: Mapping[str, Any] | None = None,
    ray: RaySession | None = None,
    until: float | None = None,
    margin: float | None = None,
) -> SuiteOutcome:
    """Run `argv`, the arguments of `helm-run`.

    options: engine flags (client arguments such as `policy` or `device`) for every model of the
        suite. `precision` may name several, separated by commas: every run of ours is then run in
        each of them.
    ray: compute with the workers of a Ray cluster; None computes in this process.
    until: score a random sample of the instances, as large as is done by then (`time.time()`); None
        for all.
    margin: with `until`: end as soon as all pairs of precisions, or of models, are decided with
        this margin.
    """
    options = {key: value for key, value in (options or {}).items() if value is not None}
    precisions = list(dict.fromkeys(split_precisions(options.pop("precision", ""))))
    template = options.pop("apply_chat_template", None)
    parser = helm_benchmark_run.build_parser()
    parser.error = _refuse  # argparse would print its usage and exit
    context = get_context()
    settings = ModelSettings(
        precisions, template if isinstance(template, bool) else None, prompt_digest(options)
    )
    suite = context.suite = Suite(settings, until, margin)
    exit_code, sentences, is_dry, uses_cache = 0, [], False, True
    interrupt_on_signals()
    service = context.service
    with _helm_warnings() as warnings, observed_by(HelmLog()):
        try:
            if ray is not None:
                context.service = Service(ClusterLoader(ray))
            args = parser.parse_args(list(argv))
            is_dry, uses_cache = args.dry_run, not args.disable_cache
            helm_benchmark_run.setup_default_logging(args.log_config)
            helm_patches.install("flexgen-helm run")
            # Without what is in the models' names, so that two settings never share a folder.
            context.engine_options = options
            context.service.resume()
            suite.run(args)
        except (KeyboardInterrupt, Interrupted):
            exit_code, sentences = 130, [_interrupted(suite, uses_cache)]
        except FlexgenError as error:
            exit_code, sentences = error.exit_code, [explain(error)]
        except Exception as error:
            exit_code = suite.exit_code()
            sentences = suite.explanations() or [explain(error)]
        finally:
            if ray is not None:
                context.service.close()
                context.service = service
            context.suite, context.engine_options = None, {}
    return SuiteOutcome(exit_code, sentences, suite.finished, len(warnings), is_dry)


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}; `flexgen-helm run --help` lists the flags")


def _interrupted(suite: Suite, uses_cache: bool) -> str:
    if uses_cache:
        stored = (
            f"{suite.num_stored:,} of {suite.num_requests:,} answers are stored"
            if suite.num_requests
            else "finished answers are stored"
        )
        return f"interrupted: {stored}, and the same command computes the rest"
    return (
        "interrupted: finished runs are in the suite's folder; with --disable-cache nothing else "
        "is kept, so the same command with --skip-completed-runs repeats the unfinished ones from "
        "their start"
    )


@contextmanager
def _helm_warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings and errors of HELM's logger, and remove the handlers that it gets
    meanwhile.
    """
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("helm")
    handlers = list(logger.handlers)
    handler = logging.Handler(logging.WARNING)
    handler.handle = lambda record: not records.append(record)  # type: ignore[method-assign, func-returns-value]
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.handlers[:] = handlers


class Suite:
    """One call of `run_suite`: what was submitted, what was executed, what failed.

    sample: the part of the instances that is scored.
    is_collecting: the first pass is in progress.
    entries: run name -> the run entry that HELM made it of.
    executed: names of runs that HELM has executed, also if their metrics failed.
    finished: folders of the runs of this call that did not fail, skipped ones too.
    num_stored, num_requests: of this call's unfinished runs: distinct requests that had answers at
        its end, and all.
    failures: run name -> error, and where the run's data belongs; no folder once it was executed.
    """

    def __init__(
        self, settings: ModelSettings, until: float | None = None, margin: float | None = None
    ) -> None:
        self.settings = settings
        self.sample = SuiteSample(until, margin)
        self.is_collecting = False
        self.entries: dict[str, str] = {}
        self.executed: list[str] = []
        self.failures: dict[str, tuple[Exception, Path | None]] = {}
        self.num_stored = self.num_requests = 0
        self._folders: list[Path] = []  # one per run, set when the runs begin
        self._stages: dict[str, float] = {}
        self._tried: list[str] = []  # runs of the second pass
        self._generated_at = 0.0  # when all results were there
        self._blocks: dict[str, list[SubmittedBlock]] = {}
        self._baseline = ""  # of the comparison that ends the suite
        # fingerprint -> what its blocks took together
        self._computed: dict[str, dict[str, Any]] = {}
        self._block_errors: dict[str, FlexgenError] = {}
        self.finished: list[Path] = []

    def run(self, args: Namespace) -> None:
        """Call HELM's `helm_run`, whose patches call this suite, and write `flexgen_suite.json`."""
        started = time.monotonic()
        if args.conf_paths:
            args.conf_paths = [str(conf_file(Path(path))) for path in args.conf_paths]
        if args.models_to_run:
            args.models_to_run = [without_slash(name) for name in args.models_to_run]
        try:
            helm_benchmark_run.helm_run(args)
        finally:
            blocks = [*chain(*self._blocks.values())]
            self.num_stored = sum(len(block.responses()) for block in blocks)
            self.num_requests = sum(len({*block.keys}) for block in blocks)
            for block in blocks:
                block.close()
            self._blocks.clear()
            if self.executed:
                replace_json(self._folders[0].parent / SUITE_FILE, self.as_json(started))

    # What the patches of HELM call

    def run_specs(
        self,
        make: Callable[..., list[RunSpec]],
        run_entries: list[RunEntry],
        models_to_run: list[str] | None = None,
        **filters: Any,
    ) -> list[RunSpec]:
        """Make the run specs of `run_entries` with our models' names under the settings of the
        flags.
        """
        # HELM loads plugins after it has read `prod_env`, but this one was there before and has
        # registered nothing.
        registration.complete_file_deployments()
        entries = [
            replace(entry, description=description)
            for entry in run_entries
            for description in self.settings.in_each_setting(entry.description)
        ]
        wanted = [
            name for model in models_to_run or [] for name in self.settings.in_each_setting(model)
        ]
        run_specs = []
        for entry in entries:  # one at a time, so that an error has its name
            try:
                of_entry = make(run_entries=[entry], models_to_run=wanted or None, **filters)
            except FlexgenError:
                raise
            except Exception as error:
                raise UsageError(explain_entry(error, entry.description)) from error
            run_specs += of_entry
            self.entries |= {run_spec.name: entry.description for run_spec in of_entry}
        for run_spec in run_specs:
            self.settings.check(run_spec.adapter_spec.model_deployment)
        return without_repeated(run_specs)

    def compute_all(
        self, runner: Runner, run_specs: list[RunSpec], second_pass: Callable[[], None]
    ) -> None:
        """Submit the requests of all runs (the first pass), and wait until they have results.

        second_pass: scores what has results, to see whether all pairs are decided.
        """
        self._folders = [Path(runner.runs_path) / run_spec.name for run_spec in run_specs]
        # What HELM's other commands need to know of our models.
        names = dict.fromkeys(spec.adapter_spec.model_deployment for spec in run_specs)
        if ours := [
            name
            for name in names
            if name.startswith(PREFIX) and registration.model_of(name) is not None
        ]:
            deployment_files.add_entries(
                Path(runner.executor.execution_spec.local_path or "prod_env"), ours
            )
        if runner.skip_completed_runs:
            report_other_settings(runner, run_specs)
        if (
            runner.dry_run
            or runner.cache_instances_only
            or runner.executor.execution_spec.url
            or not run_specs
        ):
            return
        models = [
            model
            for spec in run_specs
            if (model := model_of_adapter(spec.adapter_spec)) is not None
        ]
        self._baseline = baseline_of(models) if self.sample.margin is not None else ""
        started = time.monotonic()
        submissions = self._collect_runs(runner, run_specs)
        collected = time.monotonic()
        if self.sample.until is None or not submissions:
            load_s = self._compute(submissions).load_s
        else:  # the second pass takes about as long as the first one
            until = self.sample.until - (collected - started)
            load_s = self.sample.compute(
                submissions, until, self._compute, lambda: self._is_decided(second_pass)
            )
        self._generated_at = time.monotonic()
        generate_s = self._generated_at - collected - load_s
        self._stages = {"collect": collected - started, "load": load_s, "generate": generate_s}

    def _compute(
        self, submissions: Mapping[str, Submission], until: float = math.inf
    ) -> ComputedPart:
        """Wait for results of all runs that have not failed.

        Further models are loaded between their blocks.
        until: raises `TimeoutError` at that time (`time.time()`), and gives the blocks up;
            `largest_sample` catches it.
        """
        service, began = get_context().service, time.monotonic()
        with service.hold():
            blocks = {
                name: submission.submit(service)
                for name, submission in submissions.items()
                if name not in self._block_errors
            }
        for name, block in blocks.items():
            self._blocks.setdefault(name, []).append(block)
        if not all(block.wait(until) for block in blocks.values()):
            for block in blocks.values():
                block.close()
            raise TimeoutError
        for key, took in computed_blocks(service, blocks.values()).items():
            self._computed[key] = add_blocks(self._computed.get(key, {}), took)
        errors = {name: block.error() for name, block in blocks.items()}
        self._block_errors |= {
            name: error for name, error in errors.items() if isinstance(error, FlexgenError)
        }
        loaded = [
            block.model for block in blocks.values() if service.loaded(block.model) is not None
        ]
        load_s = min((service.loading_s(model, began) for model in loaded), default=0.0)
        return ComputedPart(load_s, list(blocks.values()))

    def _is_decided(self, second_pass: Callable[[], None]) -> bool:
        """Score the sample, and return whether all its pairs are decided."""
        with suppress(RunnerError):  # the last pass reports it, and a pair may lack it
            second_pass()
        folder, margin = self._folders[0].parent, self.sample.margin
        decided = margin is not None and all_decided(folder, self._baseline, margin)
        # The last pass scores all of them once more.
        for scored in (self._tried, self.executed, self.finished, self.failures):
            scored.clear()
        return decided

    def _collect_runs(self, runner: Runner, run_specs: list[RunSpec]) -> dict[str, Submission]:
        """Return the requests of each run that gets as far as `Executor.execute`."""
        submissions = {}
        logger = logging.getLogger("helm")
        level = logger.level
        self.is_collecting = True
        logger.setLevel(max(level, logging.WARNING))  # the second pass repeats what HELM logs here
        try:
            for done, run_spec in enumerate(run_specs):
                if model_of_adapter(run_spec.adapter_spec) is None:
                    continue
                report(
                    ProgressPhase("prompts", entry_of(run_spec.name), done, len(run_specs), "run")
                )
                try:
                    runner.run_one(run_spec)
                except helm_patches.RunCollected as collected:
                    if collected.submission is not None:
                        submissions[run_spec.name] = collected.submission
                except Exception:
                    # The second pass fails in the same place and reports it as HELM does.
                    if runner.exit_on_error:
                        break
        finally:
            self.is_collecting = False
            logger.setLevel(level)
            report(ProgressPhase("prompts", "", len(run_specs), len(run_specs), "run"))
        return submissions

    @contextmanager
    def recorded_run(self, runner: Runner, run_spec: RunSpec) -> Iterator[None]:
        """Record how a run of the second pass ends, and release its results."""
        if self.is_collecting:
            yield
            return
        block_error = self._block_errors.get(run_spec.name)
        report(
            ProgressPhase(
                "metrics", entry_of(run_spec.name), len(self._tried), len(self._folders), "run"
            )
        )
        self._tried.append(run_spec.name)
        try:
            if isinstance(block_error, UsageError):
                raise block_error  # else the model would be loaded again, to fail in the same way
            yield
            self.finished.append(Path(runner.runs_path) / run_spec.name)
        except Exception as error:
            # HELM's own error is the text of ours and the whole request.
            cause = block_error if block_error and isinstance(error, ExecutorError) else error
            was_executed = run_spec.name in self.executed
            data = None if was_executed else data_folder(runner, run_spec)
            self.failures[run_spec.name] = cause, data
            raise
        finally:
            if self.sample.margin is None:  # else later passes need them
                for block in self._blocks.pop(run_spec.name, ()):
                    block.close()

    def add_executed(self, run: HelmRun) -> None:
        if run.block:
            run.block = self._computed.get(run.fingerprint or "", {})
        self.executed.append(run.name)

    # What is left of it

    def as_json(self, started: float) -> dict[str, Any]:
        """Return the suite's usage after this call, which began at `started`; `wall_s` is this
        call's alone.
        """
        now = time.monotonic()
        tried = [folder.name for folder in self._folders]
        return {
            **suite_usage(self._folders[0].parent, tried, self.failures),
            "wall_s": {"total": now - started, **self._stages, "finish": now - self._generated_at},
            "versions": versions(),
        }

    def exit_code(self) -> int:
        """Return the code of a call that failed: 2 if no run finished for want of data, or all were
        refused; else 1.
        """
        if not self._folders:
            return 2
        failed = self.failures.values()
        return min(
            {exit_code_of(error, None if self.finished else data) for error, data in failed},
            default=1,
        )

    def explanations(self) -> list[str]:
        """Return a sentence for each failed run; runs that failed alike share one."""
        by_sentence = grouped(self.failures, lambda name: explain_failure(*self.failures[name]))
        return [f"{first_names(names, 1)}: {sentence}" for sentence, names in by_sentence.items()]
