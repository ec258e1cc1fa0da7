"""Bytes, seconds, counts and rates as text for people. All other modules compute with plain numbers
of bytes and seconds.
"""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Return '12.3 GiB', '345 MiB' or '17 B': three significant digits or more."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:,.0f} B"


def exact_size(num_bytes: int) -> str:
    """Return '12.3 GiB (13,207,024,435 bytes)', for messages that ask the user to change a size."""
    return (
        f"{size(num_bytes)} ({num_bytes:,} bytes)"
        if num_bytes >= 1 << 10
        else f"{num_bytes:,} bytes"
    )


def size_argument(num_bytes: int) -> str:
    """Return the size as flags take it, exactly: '8GiB', or '1000B'."""
    for unit, factor in (("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def duration(seconds: float) -> str:
    """Return 'h:mm:ss', or 'm:ss' below one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spelled_duration(seconds: float) -> str:
    """Return '3 d 4 h', '3 h 12 min', '9 min 19 s' or '4.2 s', for sentences."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    large, small, units = (*divmod(round(seconds), 60), ("min", "s"))
    if large >= 60:
        large, small, units = (*divmod(round(seconds / 60), 60), ("h", "min"))
    if large >= 48 and units[0] == "h":
        large, small, units = (*divmod(round(seconds / 3600), 24), ("d", "h"))
    return f"{large:,} {units[0]} {small} {units[1]}"


def rough_duration(seconds: float) -> str:
    """Return '2 days', '38 h', '2.5 h', '9 min' or '4.2 s', for plans: they are no more exact."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if (number := seconds / length) > 1.9:
            return f"{round(2 * number) / 2 if number < 10 else round(number):,} {unit}".replace(
                ".0 ", " "
            )
    return f"{seconds:.3g} s"


def count(number: int, noun: str) -> str:
    """Return '1 run' or '1,234 runs'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate_text(value: float) -> str:
    """Return '1,234' or '7.53': three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
