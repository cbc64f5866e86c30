"""`make gpu-check`: training, merge and verification on a machine's own accelerator, with its own PyTorch."""
