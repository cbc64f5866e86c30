"""The adapter into the base's weights, and the proof that it is in them; nothing here asks the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported, so here, before any module
