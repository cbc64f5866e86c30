"""Serves a model folder to people and stages: transformers on the CPU, vLLM on GPUs, one form of request."""
