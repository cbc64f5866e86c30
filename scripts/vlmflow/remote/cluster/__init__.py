"""The Kubernetes cluster from outside: its API, and how code, files and the token get there."""
