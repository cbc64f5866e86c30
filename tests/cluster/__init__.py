"""A real Kubernetes cluster on one Debian machine, for the tests: `python -m cluster` says how it is called."""
