"""`flexgen-helm run`: `helm-run` with every flag it has, and one block per model for all its runs.

HELM's runner works run by run, so its batches end where a run ends. Here it goes over the runs twice:

1. Each `run_one` goes as far as `Executor.execute`, where the run is left with its requests. The service then computes
   those of all runs, one model after another, each in one block.
2. HELM's own `run_all`, unchanged. Every request finds its result ready.

So results, metrics, errors, exit and skipping are those of a plain `helm-run`. The price is that data and prompts are
made twice, which takes no time of the model.
"""

from __future__ import annotations

import logging
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark import run as helm_benchmark_run
from helm.benchmark.executor import ExecutorError
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner

from flexgen_helm.checkpoint.names import split_precision
from flexgen_helm.config import OPTIONS, PROMPT_OPTIONS, parse_option
from flexgen_helm.errors import FlexgenError, Interrupted, UsageError
from flexgen_helm.files import read_object
from flexgen_helm.plugin import deployment_files, helm_patches, interrupt, models, registration
from flexgen_helm.plugin.context import get_context
from flexgen_helm.plugin.failures import data_folder, explain_failure
from flexgen_helm.plugin.helm_log import HelmLog
from flexgen_helm.plugin.models import prompt_digest
from flexgen_helm.plugin.service import ClusterLoader, Service, Submission, SubmittedBlock
from flexgen_helm.plugin.usage import HelmRun, suite_usage, write_json
from flexgen_helm.progress import Message, Stage, observed_by, report
from flexgen_helm.quant.precisions import split_precisions
from flexgen_helm.report.suite import SUITE_FILE
from flexgen_helm.report.throughput import versions

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession

_SLASH_NAME = re.compile(r"\bflexgen/([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_NAME = re.compile(r"\bflexgen/[A-Za-z0-9][\w.-]*")


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
    argv: Sequence[str], options: Mapping[str, Any] | None = None, ray: RaySession | None = None
) -> SuiteOutcome:
    """Run `argv`, the arguments of `helm-run`.

    options: engine flags (client arguments such as `policy` or `device`) for every model of the suite. `precision` may
        name several, separated by commas: every run of ours is then run in each of them.
    ray: compute with the workers of a Ray cluster; None computes in this process.
    """
    options = {key: value for key, value in (options or {}).items() if value is not None}
    precisions = split_precisions(options.pop("precision", ""))
    template = options.pop("apply_chat_template", None)
    parser = helm_benchmark_run.build_parser()
    parser.error = _refuse  # argparse would print its usage and exit
    context = get_context()
    suite = context.suite = Suite(precisions, template if isinstance(template, bool) else None, prompt_digest(options))
    exit_code, sentences, is_dry, uses_cache = 0, [], False, True
    interrupt.install()
    with _helm_warnings() as warnings, observed_by(HelmLog()), _computing_on(ray):
        try:
            args = parser.parse_args(list(argv))
            is_dry, uses_cache = args.dry_run, not args.disable_cache
            helm_benchmark_run.setup_default_logging(args.log_config)
            helm_patches.install("flexgen-helm run")
            # Without what is in the models' names, so that two settings never share a folder.
            context.engine_options = options
            context.service.resume()
            suite.run(args)
        except (KeyboardInterrupt, Interrupted):
            exit_code, sentences = 130, [_interrupted(suite.num_answers, uses_cache)]
        except FlexgenError as error:
            exit_code, sentences = error.exit_code, [str(error)]
        except Exception as error:
            exit_code = suite.exit_code()
            sentences = suite.explanations() or [f"{type(error).__name__}: {error}"]
        finally:
            context.suite, context.engine_options = None, {}
    return SuiteOutcome(exit_code, sentences, suite.finished, len(warnings), is_dry)


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}; `flexgen-helm run --help` lists the flags")


def _interrupted(num_answers: tuple[int, int], uses_cache: bool) -> str:
    if uses_cache:
        done, total = num_answers
        stored = f"{done:,} of {total:,} answers are stored" if total else "finished answers are stored"
        return f"interrupted: {stored}, and the same command computes the rest"
    return (
        "interrupted: finished runs are in the suite's folder; with --disable-cache nothing else is kept, so the same "
        "command with --skip-completed-runs repeats the unfinished ones from their start"
    )


@contextmanager
def _computing_on(ray: RaySession | None) -> Iterator[None]:
    """Let workers of a Ray cluster compute meanwhile; None leaves everything to this process."""
    if ray is None:
        yield
        return
    context = get_context()
    own, context.service = context.service, Service(ClusterLoader(ray))
    try:
        yield
    finally:
        context.service.close()
        context.service = own


@contextmanager
def _helm_warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings and errors of HELM's logger, and remove the handlers that it gets meanwhile."""
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

    is_collecting: the first pass is in progress.
    executed: runs that HELM has executed, in order, also if their metrics failed.
    finished: folders of the runs of this call that did not fail, skipped ones too.
    num_answers: how many of this call's unfinished runs were there at its end, of how many.
    failures: run name -> error.
    """

    def __init__(self, precisions: Sequence[str], chat_template: bool | None = None, prompt_digest: str = "") -> None:
        """Take the flags that change models' names. prompt_digest: of other settings of prompts."""
        self.precisions = list(dict.fromkeys(precisions))
        self.chat_template, self.prompt_digest = chat_template, prompt_digest
        self.is_collecting = False
        self.executed: list[HelmRun] = []
        self.failures: dict[str, Exception] = {}
        self.num_answers = (0, 0)
        self._folders: list[Path] = []  # one per run, set when the runs begin
        self._stages: dict[str, float] = {}
        self._tried: list[str] = []  # runs of the second pass
        self._generated_at = 0.0  # when all results were there
        self._blocks: dict[str, SubmittedBlock] = {}
        self._block_errors: dict[str, FlexgenError] = {}
        self.finished: list[Path] = []
        self._explanations: dict[str, list[str]] = {}  # sentence -> failed runs

    def run(self, args: Namespace) -> None:
        """Call HELM's `helm_run`, whose patches call this suite, and write `flexgen_suite.json`."""
        started = time.monotonic()
        if args.models_to_run:
            args.models_to_run = [_SLASH_NAME.sub(r"flexgen/\1--\2", name) for name in args.models_to_run]
        try:
            helm_benchmark_run.helm_run(args)
        finally:
            counts = [(len(block.responses()), len({*block.keys})) for block in self._blocks.values()]
            self.num_answers = sum(done for done, _ in counts), sum(total for _, total in counts)
            while self._blocks:
                self._blocks.popitem()[1].close()
            if self.executed:
                write_json(self._folders[0].parent / SUITE_FILE, self.as_json(started))

    # What the patches of HELM call

    def run_specs(
        self,
        make: Callable[..., list[RunSpec]],
        run_entries: list[RunEntry],
        models_to_run: list[str] | None = None,
        **filters: Any,
    ) -> list[RunSpec]:
        """Make the run specs of `run_entries` with our models' names under the settings of the flags."""
        # HELM loads plugins after it has read `prod_env`, but this one was there before and has registered nothing.
        registration.complete_file_deployments()
        entries = [
            replace(entry, description=description)
            for entry in run_entries
            for description in self.names(entry.description)
        ]
        wanted = [name for model in models_to_run or [] for name in self.names(model)]
        run_specs = make(run_entries=entries, models_to_run=wanted or None, **filters)
        for run_spec in run_specs:
            self._check_settings(run_spec.adapter_spec.model_deployment)
        return run_specs

    def collect(self, runner: Runner, run_specs: list[RunSpec]) -> None:
        """Submit the requests of all runs (the first pass), and wait until they have results."""
        self._folders = [Path(runner.runs_path) / run_spec.name for run_spec in run_specs]
        names = dict.fromkeys(spec.adapter_spec.model_deployment for spec in run_specs)
        ours = [name for name in names if name.startswith(models.PREFIX) and registration.model_of(name) is not None]
        if ours:
            deployment_files.merge(Path(runner.executor.execution_spec.local_path or "prod_env"), ours)
        if runner.skip_completed_runs:
            _report_other_sizes(runner, run_specs)
        if runner.dry_run or runner.cache_instances_only or runner.executor.execution_spec.url:
            return
        started = time.monotonic()
        submissions = self._collect_runs(runner, run_specs)
        collected = time.monotonic()
        service = get_context().service
        with service.hold():
            self._blocks = {name: service.submit(*submission) for name, submission in submissions.items()}
        helm_patches.import_classes(
            metric.class_name for spec in run_specs if spec.name in self._blocks for metric in spec.metric_specs
        )
        for block in self._blocks.values():
            block.wait()
        errors = {name: block.error() for name, block in self._blocks.items()}
        self._block_errors = {name: error for name, error in errors.items() if isinstance(error, FlexgenError)}
        self._generated_at = time.monotonic()
        # Of the first model: further models are loaded between their blocks.
        load_s = min((service.loading_s(block.model, collected) for block in self._blocks.values()), default=0.0)
        generate_s = self._generated_at - collected - load_s
        self._stages = {"collect": collected - started, "load": load_s, "generate": generate_s}

    def _collect_runs(self, runner: Runner, run_specs: list[RunSpec]) -> dict[str, Submission]:
        """Return the requests of each run that gets as far as `Executor.execute`."""
        submissions = {}
        logger = logging.getLogger("helm")
        level = logger.level
        self.is_collecting = True
        logger.setLevel(max(level, logging.WARNING))  # the second pass repeats what HELM logs here
        try:
            for done, run_spec in enumerate(run_specs):
                if helm_patches.model_of(run_spec.adapter_spec) is None:
                    continue
                report(Stage("prompts", _entry(run_spec), done, len(run_specs), "run"))
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
            report(Stage("prompts", "", len(run_specs), len(run_specs), "run"))
        return submissions

    @contextmanager
    def watched(self, runner: Runner, run_spec: RunSpec) -> Iterator[None]:
        """Record how a run of the second pass ends, and release its results."""
        if self.is_collecting:
            yield
            return
        block_error = self._block_errors.get(run_spec.name)
        report(Stage("metrics", _entry(run_spec), len(self._tried), len(self._folders), "run"))
        self._tried.append(run_spec.name)
        try:
            if isinstance(block_error, UsageError):
                raise block_error  # else the model would be loaded again, to fail in the same way
            yield
            self.finished.append(Path(runner.runs_path) / run_spec.name)
        except Exception as error:
            # HELM's own error is the text of ours and the whole request.
            cause = block_error if block_error and isinstance(error, ExecutorError) else error
            self.failures[run_spec.name] = cause
            was_executed = any(run.name == run_spec.name for run in self.executed)
            sentence = explain_failure(cause, None if was_executed else data_folder(runner, run_spec))
            self._explanations.setdefault(sentence, []).append(run_spec.name)
            raise
        finally:
            if run_spec.name in self._blocks:
                self._blocks.pop(run_spec.name).close()

    # Names and settings

    def names(self, text: str) -> list[str]:
        """Write our models' names as HELM needs them: without a second slash, once per precision of the flags.

        A suffix would make another name of a deployment that has an entry in `prod_env`, so these stay unchanged.
        """
        text = _SLASH_NAME.sub(r"flexgen/\1--\2", text)

        def in_precision(precision: str | None) -> str:
            def name(match: re.Match[str]) -> str:
                if _has_entry(match[0]):
                    return match[0]
                return models.with_settings(match[0], precision, self.chat_template, self.prompt_digest)

            return _NAME.sub(name, text)

        precisions: Sequence[str | None] = self.precisions or [None]
        return list(dict.fromkeys(map(in_precision, precisions)))

    def _check_settings(self, name: str) -> None:
        """Raise `UsageError` if a flag differs from what an entry says of the deployment `name`.

        Its runs would be computed under one setting and filed under another, or written over those of another.
        """
        model = registration.model_of(name)
        if model is not None and _has_entry(name):
            self._check_prompts(name, model)
        if model is None or not self.precisions:
            return
        own, flag = model.config.precision or "fp16", ",".join(self.precisions)
        if _has_entry(name):
            if self.precisions != [own]:
                raise UsageError(
                    f"--precision {flag} cannot change {name}, which its entry in model_deployments.yaml says is "
                    f"{own}; give each precision an entry of its own, with `precision` in its args, and leave out "
                    "--precision"
                )
        elif own != split_precision(name)[1]:
            raise UsageError(
                f"--precision {flag} cannot change {name}, which the file that FLEXGEN_HELM_MODELS names says is "
                f"{own}; take `precision` out of its entry there, or leave out --precision"
            )

    def _check_prompts(self, name: str, model: models.ModelArguments) -> None:
        # The flags of the digest are among the model's options already; the entry alone says what its name stands for.
        own = registration.entry_arguments(name)
        flags = {**get_context().engine_options, "apply_chat_template": self.chat_template}
        for option in PROMPT_OPTIONS:
            flag = flags.get(option)
            if flag is not None and (own.get(option) is None or parse_option(option, own[option]) != flag):
                raise UsageError(
                    f"{OPTIONS[option].metadata['flags'][0].name} cannot change {name}, which has an entry in "
                    f"model_deployments.yaml; write `{option}` into the args of an entry with a name of its own"
                )

    # What is left of it

    def as_json(self, started: float) -> dict[str, Any]:
        """Return the suite's usage after this call, which began at `started`; `wall_s` is this call's alone."""
        now = time.monotonic()
        tried = [folder.name for folder in self._folders]
        return {
            **suite_usage(self._folders[0].parent, self.executed, tried, self.failures),
            "wall_s": {"total": now - started, **self._stages, "finish": now - self._generated_at},
            "versions": versions(),
        }

    def exit_code(self) -> int:
        """Return the code of a call that failed: 2 if no run began or all were refused for wrong usage, else 1."""
        if not self._folders:
            return 2
        codes = {error.exit_code if isinstance(error, FlexgenError) else 1 for error in self.failures.values()}
        return codes.pop() if len(codes) == 1 else 1

    def explanations(self) -> list[str]:
        """Return a sentence for each failed run; runs that failed alike share one."""
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {sentence}"
            for sentence, names in self._explanations.items()
        ]


def _entry(run_spec: RunSpec) -> str:
    """Return a run's name without its model, which is shown beside it."""
    return re.sub(r"[,:]model=[^,]*", "", run_spec.name)


def _report_other_sizes(runner: Runner, run_specs: Sequence[RunSpec]) -> None:
    """Tell the user of completed runs that `--skip-completed-runs` keeps though `-m` is another number now."""
    for run_spec in run_specs:
        folder, wanted = Path(runner.runs_path) / run_spec.name, run_spec.adapter_spec.max_eval_instances
        if (folder / helm_patches.LAST_FILE).is_file():
            made = read_object(folder / helm_patches.FIRST_FILE).get("adapter_spec", {}).get("max_eval_instances")
            if made != wanted:
                report(
                    Message(
                        f"{_entry(run_spec)} was completed with -m {made} and is kept by --skip-completed-runs; leave "
                        f"that flag out to run it with -m {wanted}"
                    )
                )


def _has_entry(name: str) -> bool:
    """Whether a user's file defines the deployment `name`; ours are generated and never in HELM's registry."""
    return name in deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT
