"""Scores and instances of finished HELM runs, read from the files in their folders."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flexgen_helm.checkpoint.suffixes import split_precision
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.answers import is_answered, is_choice, state_text
from flexgen_helm.report.metrics import MAIN_METRICS, MAX_SHOWN, metric_named
from flexgen_helm.report.run_folder import (
    INSTANCE_STATS_FILE,
    RUN_FILE,
    data_set_size,
    read_instances,
    read_settings,
    read_states,
)
from flexgen_helm.suggestions import question

if TYPE_CHECKING:
    import pandas as pd

_T = TypeVar("_T")
# The scenarios report these as `perplexity` too, because HELM's tables know that name.
_PRECISE_PERPLEXITIES = ("target_perplexity", "token_perplexity")
_MODEL_ARGUMENT = re.compile(r"(?<=[:,])model=([^,]*),?")
# Types of files that are no quantization.
_FULL_PRECISION_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class RunScores:
    """Scores of one finished run.

    name: of the run's folder.
    scores: metric -> mean over the instances of the evaluated split, without perturbations.
    record: content of `flexgen_run.json`; empty if the run has none.
    instances: a row per scored instance, with the statistics that the scores follow from.
    folder: of the run's files; None for a pool.
    parts: the runs of a pool.
    against: the model that all models are compared with; empty where the precisions of a model are.
    """

    name: str
    scores: dict[str, float]
    record: dict[str, Any]
    instances: pd.DataFrame = field(compare=False, repr=False)
    folder: Path | None = field(default=None, compare=False)
    parts: Sequence[RunScores] = field(default=(), compare=False, repr=False)
    against: str = ""

    @property
    def num_runs(self) -> int:
        return len(self.parts) or 1

    @cached_property
    def digests(self) -> dict[Any, str]:
        """Digests of what was asked, by the index of `instances`; {} if it is not known."""
        if self.parts:
            return self._joined_of_parts("digests")
        return {
            key: self._all_digests[key] for key in self.instances.index if key in self._all_digests
        }

    def _joined_of_parts(self, name: str) -> dict[Any, str]:
        return {
            (run.entry, key): value
            for run in self.parts
            for key, value in getattr(run, name).items()
        }

    @cached_property
    def _all_digests(self) -> dict[str, str]:
        """Digests by id, also of instances of a split that HELM does not score."""
        return {} if self.folder is None else read_instances(self.folder)

    @cached_property
    def answers(self) -> dict[Any, str]:
        """The answers, by the index of `instances`: texts, or numbers of chosen references; {} if
        they are not known.
        """
        if self.parts:
            return self._joined_of_parts("answers")
        if self.folder is None or not is_answered(self.settings):
            return {}
        if is_choice(self.settings):
            chosen = self.instances.get("predicted_index")
            return {} if chosen is None else {str(key): str(value) for key, value in chosen.items()}
        texts: dict[str, list[str]] = {}
        for state in read_states(self.folder):
            texts.setdefault(state["instance"]["id"], []).append(state_text(state))
        return {key: "\0".join(answers) for key, answers in texts.items()}

    @property
    def num_ties(self) -> int:
        """Number of choices that are ties of right and wrong ones: HELM's exact match is then a
        fraction.
        """
        if self.parts:
            return sum(run.num_ties for run in self.parts)
        has_trials = self.settings.get("num_train_trials", 1) > 1  # whose mean is a fraction, too
        if not is_choice(self.settings) or has_trials or "exact_match" not in self.instances:
            return 0
        return int(self.instances["exact_match"].between(0, 1, inclusive="neither").sum())

    @cached_property
    def data_size(self) -> float:
        """Instances of the data set that HELM can score; infinite if that is not known."""
        if self.parts:
            return sum(run.data_size for run in self.parts)
        if self.folder is None:
            return math.inf
        # The folder of a sample has a part of the instances that HELM found.
        num_instances = 0 if self.record.get("sample") else len(self._all_digests)
        size = data_set_size(self.folder, self.scenario, num_instances)
        if size is None:
            return math.inf
        # All were found: more of other splits cannot be scored.
        return self.num_scored if size == num_instances else size

    @property
    def level_share(self) -> float:
        """Share of the level that a look at this sample may spend: 1 but with --until-decided."""
        shares = (part.level_share for part in self.parts)
        return min(shares, default=self.record.get("look") or 1.0)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What HELM was asked to do with the instances; {} for a pool, or if it is not known."""
        return {} if self.folder is None else read_settings(self.folder)

    @property
    def entry(self) -> str:
        """The run entry without its model, such as 'mmlu:subject=anatomy'."""
        return entry_of(self.name)

    @property
    def scenario(self) -> str:
        return self.entry.partition(":")[0]

    @property
    def model(self) -> str:
        """The model without `flexgen/` and without the suffix of its precision; as the folder says
        if HELM ran it.
        """
        match = _MODEL_ARGUMENT.search(self.name)
        name = str(self.record.get("model", match[1] if match else ""))
        base, suffix = split_precision(name)
        return base if suffix == self.precision else name

    @property
    def typed_model(self) -> str:
        """The model as it is typed, without the suffix of its precision."""
        return f"flexgen/{self.model}" if self.record else self.model

    @property
    def precision(self) -> str:
        return str(self.record.get("precision", ""))

    @property
    def label(self) -> str:
        """What is compared: the precision, or the model by its name with suffixes."""
        return str(self.record["model"]) if self.against else self.precision

    @property
    def stored(self) -> Counter[str]:
        """Type -> bytes of the model's files; empty if it is not known."""
        return Counter(self.record.get("checkpoint_bytes"))

    @property
    def is_full_precision(self) -> bool | None:
        """Whether 99 % of the weights have 16 bits or more at rest, and are computed as they are;
        None if unknown.
        """
        if self.precision != "fp16":
            return False
        full = sum(self.stored[name] for name in _FULL_PRECISION_TYPES)
        return full >= 0.99 * self.stored.total() if self.stored else None

    @property
    def at_rest(self) -> str:
        """Model, precision, and the types of the model's files by bytes, in words."""
        shares = {
            name: 100 * size / self.stored.total() for name, size in self.stored.most_common()
        }
        types = ", ".join(f"{share:.0f} % {name}" for name, share in shares.items() if share > 0.5)
        return f"{self.typed_model} in {self.precision}; at rest {types or 'of unknown types'}"

    @property
    def workload(self) -> dict[str, float]:
        return dict(self.record.get("workload", {}))

    @property
    def num_tokens(self) -> float:
        """Tokens asked for: prompts and outputs."""
        return self.workload.get("prompt_tokens", 0) + self.workload.get("output_tokens", 0)

    @property
    def latency_s(self) -> float:
        return float(self.record.get("latency_s", 0.0))

    @property
    def num_scored(self) -> int:
        """Number of instances that HELM scored: those of one split."""
        return len(self.instances)

    @property
    def num_reused(self) -> int:
        """Number of answers that an earlier run computed."""
        return int(self.record.get("num_reused", 0))

    @property
    def prompts(self) -> str:
        """What became of plain prompts, in words; '' if the record does not say."""
        chat = self.record.get("chat_template")
        if not chat:
            return ""
        if not chat["applied"]:
            return "unchanged"
        settings = [f"{name}={json.dumps(value)}" for name, value in chat.get("kwargs", {}).items()]
        settings += ["a system prompt"] if chat.get("system_prompt") else []
        if chat.get("thinking_budget") is not None:
            settings.append(f"a thinking budget of {chat['thinking_budget']:,}")
        return "through the chat template" + (f", with {', '.join(settings)}" if settings else "")

    @property
    def num_answers(self) -> int:
        """Number of distinct requests; identical requests share an answer."""
        return int(
            self.workload.get("num_unique", self.workload.get("num_requests", self.num_reused))
        )

    @cached_property
    def ratios(self) -> dict[str, pd.DataFrame]:
        """Numerator and denominator of each instance, by the scores that follow from instances.

        HELM may aggregate a metric in another way, such as F1 over classes, which is no function of
        their sums.
        """
        by_metric = {name: metric_ratio(name, self.instances) for name in self.scores}
        return {
            name: ratio
            for name, (ratio, value) in by_metric.items()
            if math.isclose(value, self.scores[name], rel_tol=1e-6, abs_tol=1e-9)
        }

    @cached_property
    def standard_errors(self) -> dict[str, float]:
        """Standard errors of the scores that follow from their instances, if there are two or
        more.
        """
        errors = {
            name: metric_named(name).standard_error(*ratio.to_numpy().T)  # its columns
            for name, ratio in self.ratios.items()
        }
        return {name: error for name, error in errors.items() if error is not None}


def entry_of(name: str) -> str:
    """Return the name of a run without its model."""
    return _MODEL_ARGUMENT.sub("", name).rstrip(",:")


def describe_run(name: str) -> str:
    """Return 'mmlu:subject=anatomy of flexgen/opt-125m in 4bit' for the name of a run's folder."""
    match = _MODEL_ARGUMENT.search(name)
    if match is None or not match[1].startswith("flexgen_"):
        return name
    model, precision = split_precision(match[1].removeprefix("flexgen_"))
    return f"{entry_of(name)} of flexgen/{model} in {precision}"


def read_scores(folder: Path) -> RunScores:
    """Read the run in `folder`; raises `FileNotFoundError` or ValueError if HELM has not finished
    it.
    """
    stats = json.loads((folder / "stats.json").read_text(encoding="utf-8"))
    means: dict[str, float] = {}
    for split in ("test", "valid"):
        for stat in stats:
            name = stat["name"]
            if name.get("split") == split and "perturbation" not in name and stat.get("count"):
                means.setdefault(name["name"], float(stat["mean"]))
    if any(name in means for name in _PRECISE_PERPLEXITIES):
        means.pop("perplexity", None)
    scores = {
        name: means[name] for name in [name for name in MAIN_METRICS if name in means][:MAX_SHOWN]
    }
    file = folder / RUN_FILE
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    # The last file that HELM writes: without it the others are those of an earlier call.
    per_instance = json.loads((folder / INSTANCE_STATS_FILE).read_text(encoding="utf-8"))
    return RunScores(folder.name, scores, record, _instances_frame(per_instance, scores), folder)


def require_suite(suite: Path, remedy: str) -> None:
    """Raise `UsageError` where there is no folder of a suite; remedy: where no name is close."""
    if not suite.is_dir():
        known = (
            [path.name for path in suite.parent.iterdir() if path.is_dir()]
            if suite.parent.is_dir()
            else []
        )
        raise UsageError(
            f"there is no suite in {suite}; {question(suite.name, known, remedy).strip()}"
        )


def read_finished_runs(suite: Path) -> list[RunScores]:
    """Read the finished runs of flexgen models in the folder of a suite; raises `UsageError` if
    there is no folder.
    """
    require_suite(suite, "run one first, or name another folder with -o")
    runs = []
    for folder in sorted(suite.iterdir()):
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError):
            runs.append(read_scores(folder))
    return [run for run in runs if run.record]


def grouped(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Return lists of items by key, in the order in which keys first appear."""
    groups: dict[Any, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def precision_rank(precision: str) -> tuple[int, str]:
    """Return a key that sorts precisions as `PRECISIONS` does, and others by name behind them."""
    order = tuple(PRECISIONS)
    return (order.index(precision) if precision in order else len(order), precision)


def finite(content: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot hold, by None, at any depth."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def metric_ratio(name: str, instances: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Return numerators and denominators of a metric, and its value; NaN if an instance lacks one,
    or none counts.
    """
    import pandas as pd

    metric = metric_named(name)
    columns = {"numerator": metric.numerator, "denominator": metric.denominator}
    ratio = pd.DataFrame(
        {
            part: 1.0 if column is None else instances.get(column, np.nan)
            for part, column in columns.items()
        },
        index=instances.index,
        dtype=np.float64,
    )
    is_known = ratio.notna().to_numpy().all() and ratio["denominator"].sum() > 0
    return ratio, float(metric.value(*ratio.to_numpy().T)) if is_known else math.nan


def _instances_frame(
    per_instance: Sequence[Mapping[str, Any]], scores: Iterable[str]
) -> pd.DataFrame:
    """Return a row per instance and a column per statistic that `scores` follow from, averaged over
    trials.

    Of the split that HELM scores (test, else valid), without perturbations.
    """
    import pandas as pd

    metrics = [metric_named(name) for name in scores]
    wanted = {
        "num_references",  # of every instance, so each has a row
        "predicted_index",
        *(name for metric in metrics for name in (metric.numerator, metric.denominator)),
    }
    rows = [
        (stat["name"].get("split"), entry["instance_id"], stat["name"]["name"], float(stat["mean"]))
        for entry in per_instance
        for stat in entry["stats"]
        if stat["name"]["name"] in wanted
        and "perturbation" not in stat["name"]
        and stat.get("count")
    ]
    stats = pd.DataFrame(rows, columns=["split", "instance", "statistic", "mean"])
    split = "test" if (stats["split"] == "test").any() else "valid"
    stats = stats[stats["split"] == split]
    frame = stats.pivot_table("mean", "instance", "statistic", aggfunc="mean", sort=False)
    if "predicted_index" in frame:  # a reference's number has no mean: that of the first trial
        chosen = stats[stats["statistic"] == "predicted_index"]
        frame["predicted_index"] = chosen.groupby("instance", sort=False)["mean"].first()
    return frame
