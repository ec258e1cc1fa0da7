"""Write docs/paper.md: `make pages`."""

from pathlib import Path

from flexgen_helm.benchmarks.paper.page import page

PAGE = Path(__file__).resolve().parent / "paper.md"

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
