"""Merges the adapter into the base's weights, and verifies the result; nothing here uses the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so here, before any module
