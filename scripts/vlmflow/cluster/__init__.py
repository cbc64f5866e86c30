"""The Kubernetes cluster seen from outside: how code, files and the token reach it."""
