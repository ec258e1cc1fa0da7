"""The short table at the end of `make gpu-check`, and its result in the format of `benchmarks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexgen_helm.benchmarks.common import machine

Line = Mapping[str, Any]


def failures(lines: Sequence[Line]) -> list[str]:
    """Return a line for each part and step that did not pass, and for each step without which nothing is complete."""
    found = [f"{line['step']} {line['name']}: {line['error']}" for line in lines if "error" in line]
    for line in lines:
        if line.get("rc"):
            last = line.get("last_line")
            found.append(
                f"{line['step']}: {line.get('left_out') or _exit(line['rc'])}" + (f" ({last})" if last else "")
            )
    return found


def _exit(code: int) -> str:
    return "killed at its limit" if code == 124 else f"exit code {code}"


def result_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the lines as a result: throughputs as rows, left out steps as notes; `failed` names what did not pass."""
    known = {key: value for line in lines for key, value in line.items()}
    return {
        "name": "gpu",
        "hardware": {**machine(), "device": known.get("device") or known.get("hardware", {}).get("name", "unknown")},
        "versions": known.get("versions", {}),
        "rows": [line for line in lines if "tokens_per_s" in line],
        "ratios": ratios(lines),
        "notes": [f"{line['step']} was left out: {line['left_out']}" for line in lines if "left_out" in line],
        "failed": failures(lines),
    }


def ratios(lines: Sequence[Line]) -> dict[str, float]:
    """Return our throughput over that of a peer, for each peer that ran the shapes of a step that ran."""
    speeds = {line["step"]: line["tokens_per_s"] for line in lines if "tokens_per_s" in line}
    peers = [line for line in lines if line.get("peer_of") in speeds]
    return {f"{line['peer_of']}_to_{line['step']}": speeds[line["peer_of"]] / line["tokens_per_s"] for line in peers}


def table(lines: Sequence[Line]) -> str:
    """Return the least important first, because a reply may show the end alone."""
    text = [_figures(line) for line in lines if len(line) > 3 and "s" in line and "tokens_per_s" not in line]
    text += [f"{line['step']:10} {_exit(line['rc'])}, {line['seconds']:.0f} s" for line in lines if "seconds" in line]
    text += [f"FAILED {failure[:240]}" for failure in failures(lines)]
    text += [f"{line['step']:10} left out: {line['left_out']}" for line in lines if "left_out" in line]
    text += [_speed(line) for line in lines if "tokens_per_s" in line]
    text += [f"{key.replace('_', ' ')}: {ratio:.2f}x" for key, ratio in ratios(lines).items()]
    return "\n".join(text)


def _figures(line: Line) -> str:
    shown = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in line.items()
        if key not in ("step", "name", "s") and value is not None
    ]
    return f"{line['step']:10} {line['name']}: {', '.join(shown)}"[:240]


def _speed(line: Line) -> str:
    text = (
        f"{line['step']:10} {line['tokens_per_s']:8.1f} tokens/s, {line['rows']} rows of {line['label']}: "
        f"{line['prefill_s']:.1f} + {line['decode_s']:.1f} s"
    )
    if predicted := line.get("predicted"):
        measured, expected = line["latency_s"], predicted["latency_s"]
        text += (
            f"; predicted {predicted['prefill_s']:.1f} + {predicted['decode_s']:.1f}, "
            f"{measured / expected:.2f} times that"
        )
    return text
