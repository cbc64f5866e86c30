"""A real Kubernetes cluster on one Debian machine, for the tests; for its usage run `python -m cluster`."""
