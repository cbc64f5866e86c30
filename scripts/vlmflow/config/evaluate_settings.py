"""The settings of a run's evaluation."""

from typing import Annotated, Literal

from pydantic import Field

from vlmflow.config.settings import Positive, Settings


class EvaluateSettings(Settings):
    """How the tuned model is compared with its base (docs/evaluation.md)."""

    rows: Positive = 1000
    """Rows of a split that are evaluated, drawn by picture; all rows of a drawn picture are in. Of val with 200
    pictures or more, rows of the half that judges (docs/evaluation.md#val-to-choose-test-at-the-end)."""

    splits: Annotated[list[Literal["val", "test"]], Field(min_length=1)] = ["val"]
    """The splits whose results are in the model card of `merged/NAME`. Choose by val, and look at test at the end:
    every look is counted, and the card shows the count."""

    require: Literal["learned", "uses_feedback", "not_worse"] | None = None
    """What val must show before the weights are published. learned: this verdict: the run learned to use feedback
    (without feedback: the loss of the answers fell). uses_feedback: its own feedback makes the right answer likelier
    than another row's in more than half of the rows, by the whole interval; in the base perhaps too. not_worse: the
    verdict is not worse, and first answers are not shown to have suffered; too few rows show neither, and pass. null:
    nothing."""

    feedback: bool | None = None
    """Whether the human's later turns are feedback on the answer before, and the last answer is right; null: true for
    data sets of kind fire and volcano; of a mixture with such data sets, only their rows are evaluated then."""

    answers: bool = False
    """Also ask both models (`answers/NAME/SPLIT`, settings under `answer`), and show their answers on
    `reports/eval-NAME.html`."""
