"""Run specs that HELM lacks. Import this package as `flexgen_helm.scenarios` only.

From the repository's root `import scenarios` would work too, and register everything a second time
under another name, so it is refused.
"""

from __future__ import annotations

if __name__ != "flexgen_helm.scenarios":
    raise ImportError(f"this package is flexgen_helm.scenarios; it was imported as {__name__}")

from flexgen_helm.scenarios import error_detection, lambada, simple, wikitext

__all__ = ["error_detection", "lambada", "simple", "wikitext"]
