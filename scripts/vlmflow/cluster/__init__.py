"""The Kubernetes cluster as one sees it from outside: what it has and lacks, and how code and token reach it."""
