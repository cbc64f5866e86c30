"""The objectives of a search: what they are called, and which of their values is better."""

from vlmflow.config.search_settings import Objective

NAMES: dict[Objective, str] = {
    "eval_loss": "validation loss",
    "uses_feedback": "use of feedback",
}

MEANINGS: dict[Objective, str] = {
    "eval_loss": "validation loss in nats per token, the lower the better",
    "uses_feedback": "use of feedback, the higher the better: in how many rows of val its own feedback makes the right "
    "answer likelier than another row's does",
}


def cost(objective: Objective, value: float) -> float:
    """Return what a search makes as low as possible. value: the objective's; shares are the better the higher."""
    return value if objective == "eval_loss" else -value


def shown(objective: Objective, value: float) -> str:
    """Return a value for people."""
    return f"{value:.5g}" if objective == "eval_loss" else f"{value:.1%}"
