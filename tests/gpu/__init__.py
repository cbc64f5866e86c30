"""`make gpu-check`: the workflow on a machine's own GPU, with its own PyTorch; `make gpu-pack`: what it takes along."""
