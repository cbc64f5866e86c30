"""The settings of a run's evaluation."""

from typing import Annotated, Literal

from pydantic import Field

from vlmflow.config.settings import Positive, Settings


class EvaluateSettings(Settings):
    """How the tuned model is compared with its base (docs/evaluation.md)."""

    rows: Positive = 1000
    """Rows of a split that are evaluated, drawn by picture; all rows of a drawn picture are in. Of a val of 200
    pictures or more, rows of the half that judges (docs/evaluation.md)."""

    splits: Annotated[list[Literal["val", "test"]], Field(min_length=1)] = ["val"]
    """The splits whose results are in the model card of `merged/NAME`. Choose by val, and look at test at the end:
    every look is counted, and the card shows the count."""

    require: Literal["learned", "uses_feedback", "not_worse"] | None = None
    """What val must show before the weights are published. learned: the run learned to use feedback (without feedback:
    the loss of the answers fell). uses_feedback: the tuned model uses it in more than half of the rows, the base
    perhaps too. Neither looks at what the training cost. not_worse: neither the verdict worse, nor a shown cost of
    first answers. null: nothing."""

    feedback: bool | None = None
    """Whether the human's later turns are feedback on the answer before, and the last answer is right; null: true for
    data sets of kind fire and volcano."""

    answers: bool = False
    """Also ask both models (`answers/NAME/SPLIT`, settings under `answer`), and show their answers on
    `reports/eval-NAME.html`."""
