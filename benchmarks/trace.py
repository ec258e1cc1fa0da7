"""`bench trace`: one decode pass as a timeline: when each thread computes, loads, stores and waits.

Prompts are random tokens, and weights random numbers unless the model is a folder or file. `-o FILE.html` draws a page,
`-o FILE.json` the events of the Trace Event Format, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import html
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.common import machine
from flexgen_helm.benchmarks.engine_task import prompts
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.benchmarks.roofline import measure_rates
from flexgen_helm.report.throughput import versions
from flexgen_helm.units import size

if TYPE_CHECKING:
    from flexgen_helm.offload.transfer_stats import Span

MODEL, SEQUENCES, PROMPT, OUTPUT = "opt-1.3b", 32, 16, 6
_DISK_FILE = 1 << 30
# The thread that computes has stages; others load or store.
_STAGE = "stage"


def run(options: Options) -> dict[str, Any]:
    """Trace the last decode pass of a block; see `flexgen_helm.benchmarks` for the format.

    `traceEvents` has a complete event for each span, in microseconds. Rows are seconds of the pass, by thread.
    """
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        model = options.model or ("opt-125m" if options.quick else MODEL)
        engine = {"offload_dir": scratch, **options.engine}
        disk_file = _DISK_FILE // 32 if options.quick else _DISK_FILE
        rate = in_own_process(measure_rates, {"folder": scratch, "file_bytes": disk_file})["disk_bytes_s"]
        record = _traced_block(model, engine, options.instances or (2 if options.quick else SEQUENCES))
        spans = last_pass(record["spans"])
    return {
        "name": "trace",
        "hardware": {**machine(), "disk_bytes_s": rate},
        "versions": versions(),
        "workload": {"model": model, "sequences": record["sequences"], "prompt": PROMPT, "output": OUTPUT},
        "rows": _rows(spans),
        "ratios": {},
        "notes": _notes(spans, record["disk_bytes"] / record["passes"], rate),
        "traceEvents": events(spans),
    }


def _traced_block(model: str, engine: Mapping[str, Any], sequences: int) -> dict[str, Any]:
    from flexgen_helm import Engine, GenerationRequest
    from flexgen_helm.checkpoint.names import resolve

    given = {"weights": "dummy"} if resolve(model).path is None else {}
    with Engine.from_pretrained(model, **{**given, **engine}) as loaded:
        block = [
            GenerationRequest(prompt_token_ids=ids, max_tokens=OUTPUT, ignore_eos=True)
            for ids in prompts(sequences, PROMPT, loaded.config.vocab_size)
        ]
        loaded.run(block[:1])  # compiles, and touches memory
        with loaded.traced() as spans:
            for result in loaded.run(block):
                if result.error is not None:
                    raise result.error
        disk_bytes = loaded.last_run["bytes"]["disk_to_cpu"]["weights"]
    return {"spans": spans, "sequences": sequences, "disk_bytes": disk_bytes, "passes": OUTPUT}


def last_pass(spans: Sequence[Span]) -> list[Span]:
    """Return the spans within the last pass, from its first stage to the end of its last one.

    A span that began before, or ends behind it, is cut.
    """
    stages = sorted((span for span in spans if span.activity == _STAGE), key=lambda span: span.start)
    first = stages[0].detail
    begins = [
        span.start
        for before, span in zip([None, *stages], stages)
        if span.detail == first and (before is None or before.detail != first)
    ]
    begin, end = begins[-1], max(span.start + span.seconds for span in stages)
    cut = []
    for span in spans:
        start, stop = max(span.start, begin), min(span.start + span.seconds, end)
        if stop > start:
            cut.append(span._replace(start=start, seconds=stop - start))
    return sorted(cut, key=lambda span: (span.thread, span.start))


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans as complete events of the Trace Event Format."""
    begin = min(span.start for span in spans)
    threads = {name: number for number, name in enumerate(dict.fromkeys(span.thread for span in spans))}
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in threads.items()
    ]
    return [
        *named,
        *(
            {
                "name": span.detail or span.activity,
                "cat": span.activity,
                "ph": "X",
                "pid": 0,
                "tid": threads[span.thread],
                "ts": 1e6 * (span.start - begin),
                "dur": 1e6 * span.seconds,
            }
            for span in spans
        ),
    ]


def pass_seconds(spans: Sequence[Span]) -> float:
    return max(span.start + span.seconds for span in spans) - min(span.start for span in spans)


def _rows(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return seconds by thread and activity, and their share of the pass."""
    total = pass_seconds(spans)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        seconds[span.thread, span.activity] += span.seconds
    for thread, activity in list(seconds):
        if activity == _STAGE:  # what it waited for is a part of it
            waited = sum(s for (name, kind), s in seconds.items() if name == thread and kind.startswith("wait_"))
            seconds[thread, activity] -= waited
    rows: list[dict[str, Any]] = [{"label": "the pass", **summary([total]), "share": 1.0}]
    for (thread, activity), taken in sorted(seconds.items()):
        what = "computing" if activity == _STAGE else activity.replace("_", " ")
        rows.append({"label": f"{thread}: {what}", **summary([taken]), "share": taken / total})
    return rows


def _notes(spans: Sequence[Span], pass_bytes: float, disk_rate: float) -> list[str]:
    if not pass_bytes:
        return ["no weights are read from the disk: give a lower --cpu-memory"]
    reached = pass_bytes / pass_seconds(spans)
    return [
        f"{size(int(pass_bytes))} of weights a pass, read at {reached / 1e9:.2f} GB/s: {reached / disk_rate:.0%} of "
        f"what the disk gives alone ({disk_rate / 1e9:.2f} GB/s)"
    ]


# ---- the page ----

_LANE, _GAP, _WIDTH, _LABELS = 22, 10, 1400, 190
_STYLE = """
  body { font: 14px system-ui, sans-serif; margin: 24px; color: #1f2933; background: #fff; }
  svg text { font: 12px system-ui, sans-serif; fill: #1f2933; }
  .stage { fill: #3f51b5; } .load { fill: #2e9e6b; } .store { fill: #b07aa1; } .wait { fill: #e4572e; }
  .key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; }
  td { padding: 2px 14px 2px 0; } td + td { text-align: right; }
  @media (prefers-color-scheme: dark) {
    body { color: #e6edf3; background: #0d1117; } svg text { fill: #e6edf3; }
    .stage { fill: #8c9eff; } .load { fill: #56d39b; } .store { fill: #d2a8ff; } .wait { fill: #ff7b54; }
  }
"""
_KEYS = {"stage": "computes", "wait": "waits", "load": "loads", "store": "stores"}


def page(result: Mapping[str, Any]) -> str:
    """Return a page with a lane for each thread; times and names of spans show under the pointer."""
    drawn = [event for event in result["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in result["traceEvents"] if event["ph"] == "M"}
    total = max(event["ts"] + event["dur"] for event in drawn)
    scale = (_WIDTH - _LABELS) / total
    parts = []
    for number, name in names.items():
        top = number * (_LANE + _GAP)
        parts.append(f'<text x="0" y="{top + 15}">{html.escape(name)}</text>')
        # What a thread waits for is drawn over the stage that waits.
        for event in sorted((e for e in drawn if e["tid"] == number), key=lambda e: e["cat"] != _STAGE):
            kind = event["cat"].partition("_")[0]
            left, width = _LABELS + scale * event["ts"], max(0.3, scale * event["dur"] - 0.2)
            title = f"{event['name']} ({event['cat'].replace('_', ' ')}): {event['dur'] / 1e3:.2f} ms"
            parts.append(
                f'<rect class="{kind}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}">'
                f"<title>{html.escape(title)}</title></rect>"
            )
    height = len(names) * (_LANE + _GAP) + 20
    axis = "".join(
        f'<text x="{_LABELS + share * (_WIDTH - _LABELS):.0f}" y="{height - 4}" text-anchor="end">'
        f"{share * total / 1e3:.0f} ms</text>"
        for share in (0.25, 0.5, 0.75, 1.0)
    )
    keys = "".join(
        f'<svg class="key" viewBox="0 0 1 1"><rect class="{kind}" width="1" height="1"/></svg>{text}'
        for kind, text in _KEYS.items()
    )
    table = "".join(
        f"<tr><td>{html.escape(row['label'])}</td><td>{1e3 * row['median']:.1f} ms</td><td>{row['share']:.0%}</td></tr>"
        for row in result["rows"]
    )
    workload = result["workload"]
    title = f"A decode pass of {workload['model']}, {workload['sequences']} sequences"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{keys}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%">{"".join(parts)}{axis}</svg>'
        f"{''.join(f'<p>{html.escape(note)}</p>' for note in result['notes'])}<table>{table}</table></html>\n"
    )


def write_page(result: Mapping[str, Any], file: Path) -> None:
    from flexgen_helm.files import replace_text

    replace_text(file, page(result))
