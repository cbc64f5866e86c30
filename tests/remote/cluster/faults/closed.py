"""A stage whose gate is closed."""

from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.harness.stage import run_stage


def main(*, target: Path) -> None:
    """Refuse to make the target."""
    raise VlmflowError(f"the gate of {target} is closed", "look at the gate's page")


if __name__ == "__main__":
    run_stage(main)
