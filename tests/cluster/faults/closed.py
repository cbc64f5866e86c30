"""A stage whose gate is closed."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.core.errors import VlmflowError


def main(*, target: Path) -> None:
    """Refuse to make the target."""
    raise VlmflowError(f"the gate of {target} is closed", "look at the gate's page")


if __name__ == "__main__":
    run_stage(main)
