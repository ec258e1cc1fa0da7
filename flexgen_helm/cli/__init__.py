"""The flexgen-helm command."""
