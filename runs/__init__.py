"""Run entries for `helm-run -c` and `flexgen-helm run -c`."""
