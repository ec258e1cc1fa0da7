"""`python -m benchmarks.paper [TABLE]`: the page, or one of its tables."""

from __future__ import annotations

import sys

from flexgen_helm.benchmarks.paper.page import page, table
from flexgen_helm.errors import UsageError

if __name__ == "__main__":
    try:
        print(table(sys.argv[1]) if sys.argv[1:] else page())
    except UsageError as error:
        sys.exit(f"error: {error}")
