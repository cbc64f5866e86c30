"""Runs inside a trainer: ms-swift's `sft` with our callbacks, once in every process that torchrun starts."""
