"""Writing files so that nobody, not even the next start after a crash, ever sees half of one."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file whole or not at all (UTF-8); it is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
