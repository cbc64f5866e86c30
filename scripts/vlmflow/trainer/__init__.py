"""Runs inside a trainer: ms-swift's `sft` with our callback, once in every process that torchrun starts."""
