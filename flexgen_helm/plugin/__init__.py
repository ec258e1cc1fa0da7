"""Importing registers `flexgen/…` models: HELM does it through its entry point.

HELM swallows an error of this import and later says 'model not found'. So nothing is raised here;
one line says what failed.
"""

from __future__ import annotations


def _register() -> None:
    """Register names and run specs and patch HELM, each once per process."""
    from helm.common.hierarchical_logger import herror

    try:
        import flexgen_helm.scenarios  # noqa: F401  (run spec functions register themselves)
        from flexgen_helm.plugin import helm_patches, registration

        registration.register()
        helm_patches.install_or_warn()
    except Exception as error:
        herror(
            f"flexgen_helm cannot register its models with HELM: {type(error).__name__}: {error}"
        )


_register()
