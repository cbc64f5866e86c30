"""The settings of a run's evaluation.

The settings of the answers by which a run's weights are compared with their base.

Which trackers a finished run is sent to.

What chose a run's settings: the block that a search's `best.yaml` or `probably.yaml` sets.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from vlmflow.config.settings import Count, Name, Positive, Settings, refuse_no_address
from vlmflow.config.source import refuse_path

Measure = Literal["right_first", "right_with_feedback", "uses_feedback", "adds", "helps", "sees"]
"""A share of rows that an evaluation compares (`evaluation.report.MarginFigures`)."""

Word = Literal["learned", "uses_feedback", "not_worse"]

Requirement = Word | dict[Measure, Literal["not_worse"]]

Requirements = Requirement | list[Requirement] | None
"""What an evaluation must show: a word for its verdict, a word for each of some measures, or a list of these."""


def each_requirement(require: Requirements) -> list[tuple[Measure | None, str]]:
    """Return requirements one by one: a measure, or None for the verdict, and the word for it."""
    some = require if isinstance(require, list) else [] if require is None else [require]
    return [pair for one in some for pair in (one.items() if isinstance(one, dict) else [(None, one)])]


class EvaluateSettings(Settings):
    """How the tuned model is compared with its base (docs/evaluation.md)."""

    rows: Positive = 1000
    """Rows of a split that are evaluated, drawn by picture; all rows of a drawn picture are in. Of val with 200
    pictures or more, rows of the half that judges (docs/evaluation.md#val-to-choose-test-at-the-end)."""

    splits: Annotated[list[Literal["val", "test"]], Field(min_length=1)] = ["val"]
    """The splits whose results are in the model card of `merged/NAME`. Choose by val, and look at test at the end:
    every look is counted, and the card shows the count."""

    require: Requirements = None
    """What val must show before the weights are published: a word, a word for a measure (`sees: not_worse`), or a list
    of these. learned: this verdict: the run learned to use feedback (without feedback: most answers became likelier).
    uses_feedback: its own feedback helps the right answer more than another row's in more than half of the rows, by the
    whole interval; in the base perhaps too: a small untrained model that sees no picture reached 73 %. not_worse: the
    verdict is not worse, and first answers are not shown to have suffered; too few rows show neither, and pass. Of a
    measure: its share of rows is not shown to have fallen. null: nothing."""

    feedback: bool | None = None
    """Whether the human's later turns are feedback on the answer before, and the last answer is right; null: true for
    data sets of kind fire and volcano; of a mixture with such data sets, only their rows are evaluated then."""

    neutral_feedback: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = [
        "Your answer is not correct. Please look again.",
        "That is not right. Please try once more.",
        "This answer is wrong. Please think about it again.",
    ]
    """Feedback that says nothing but that the answer is wrong: a control beside another row's feedback. A row gets one
    of these texts, in the form of its own feedback and with its score. Write them in the language of your data."""

    answers: bool = False
    """Also ask both models (`answers/NAME/SPLIT`, settings under `answer`), and show their answers on
    `reports/eval-NAME.html`."""

    @field_validator("require", mode="before")
    @classmethod
    def _requires_what_is_known(cls, require: Any) -> Any:
        for measure, word in each_requirement(require):
            known = measure in get_args(Measure) and word == "not_worse" if measure else word in get_args(Word)
            if not known:
                raise ValueError(
                    f"{f'{measure}: ' if measure else ''}{word} is unknown; a word is {', '.join(get_args(Word))}; of "
                    f"a measure, {', '.join(get_args(Measure))}, write MEASURE: not_worse"
                )
        return require or None

    @model_validator(mode="after")
    def _val_decides(self) -> Self:
        if self.require is not None and "val" not in self.splits:
            raise ValueError(f"require: {self.require} is judged on val; add val to splits")
        return self


class AnswerSettings(Settings):
    """What base and tuned model are asked for `answers/NAME/SPLIT` (docs/evaluation.md, Answers)."""

    rows: Positive = 200
    """Rows of a split that are asked, drawn by picture: a part of those that `evaluate` draws."""

    rounds: Count = 3
    """After how many rounds of feedback, at most, a model answers: 0 for the first answer alone."""

    max_tokens: Positive = 512
    """Tokens of an answer, at most; answers that are cut there are counted."""

    url: str | None = None
    """An OpenAI-compatible server to ask, with /v1: http://HOST:8000/v1. null: the rule runs a server for each model
    with the run's picture limits; those of another server are unknown. A server with a key gets that of the environment
    variable VLMFLOW_ANSWER_KEY."""

    url_base: Annotated[str, Field(min_length=1)] | None = None
    """The base model's name on the server at `url`."""

    url_tuned: Annotated[str, Field(min_length=1)] | None = None
    """The tuned model's name there."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is not None:
            refuse_no_address(url, "http://HOST:8000/v1", "the environment variable VLMFLOW_ANSWER_KEY")
        return url

    @model_validator(mode="after")
    def _names_are_of_a_server(self) -> Self:
        for key in ("url_base", "url_tuned"):
            if (self.url is None) != (getattr(self, key) is None):
                raise ValueError(
                    f"{key}: a name on the server at url; set url, url_base and url_tuned together, or none"
                )
        return self


SQLITE = "sqlite:///"
"""How MLflow's address of a file begins (SQLAlchemy's form): sqlite:///FILE, or sqlite:////PATH for an absolute one."""

Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]


class TrackSettings(Settings):
    """Trackers that get a finished run's losses, settings, digests and evaluation (docs/use.md, Trackers).

    No training knows them: a tracker that fails costs nothing but itself.
    """

    mlflow: str | None = None
    """MLflow: the address of a server (https://HOST), or a file of this machine: sqlite:///FILE, relative to the
    working directory. User and password, or token, come from MLflow's environment variables (MLFLOW_TRACKING_USERNAME,
    MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN)."""

    experiment: Label = "vlmflow"
    """MLflow's experiment, and the project in which Phoenix shows the traces; it is made if it does not exist."""

    wandb: Label | None = None
    """Weights & Biases: the name of a project. The run is written as an offline run under `stores.trackers`; `wandb
    sync` sends it, where you have a key and a network."""

    otlp: str | None = None
    """An OpenTelemetry endpoint that takes traces over HTTP, as Langfuse does: https://HOST/api/public/otel
    (`/v1/traces` is added). It gets a trace for each evaluated row and model, so the run needs `evaluate`. Its key is
    in the environment variable OTEL_EXPORTER_OTLP_HEADERS."""

    @field_validator("mlflow")
    @classmethod
    def _is_a_server_or_a_file(cls, address: str | None) -> str | None:
        if address is None:
            return None
        if address.startswith(SQLITE):
            file = address.removeprefix(SQLITE)
            if not file or re.search(r"[?#]", file):
                raise ValueError(f"{address!r} names no file: sqlite:///FILE")
            refuse_path(file)
        else:
            refuse_no_address(
                address, "https://HOST or sqlite:///FILE", "MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN"
            )
        return address

    @field_validator("otlp")
    @classmethod
    def _is_an_endpoint(cls, address: str | None) -> str | None:
        if address is not None:
            refuse_no_address(address, "https://HOST/api/public/otel", "OTEL_EXPORTER_OTLP_HEADERS")
            if address.rstrip("/").endswith("/v1/traces"):
                raise ValueError(f"{address!r}: leave /v1/traces out; it is added")
        return address

    @model_validator(mode="after")
    def _names_a_tracker(self) -> Self:
        if not (self.mlflow or self.wandb or self.otlp):
            raise ValueError("names no tracker: set mlflow, wandb or otlp, or remove it")
        return self

    def within(self, folder: Path) -> Self:
        """Return these settings with the file of `mlflow` as a path that does not depend on the current folder.

        folder: the working directory, to which a relative one is relative.
        """
        if self.mlflow is None or not self.mlflow.startswith(SQLITE):
            return self
        file = (folder / self.mlflow.removeprefix(SQLITE)).absolute()
        return self.model_copy(update={"mlflow": f"{SQLITE}{file}"})


class ChosenBy(Settings):
    """The search that chose a run's settings (docs/search.md)."""

    search: Name
    """Its name."""

    trial: Count
    """The number of the trial whose settings these are; 0 has the run's own."""

    trials: Positive
    """How many it had."""

    shown: bool = True
    """Whether the search shows that the trial beats the run's own settings; true for trial 0, which has them."""

    study: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of its last `study.json`."""

    settings: dict[str, bool | int | float | str]
    """The values that it chose, by key of `train`; the run must have them."""

    def in_words(self) -> str:
        """Return it for people, and for provenance.json."""
        own = f"the run's own settings; none of {self.trials} is shown to beat them"
        best = f"best of {self.trials}" + ("" if self.shown else "; not shown to beat the run's own settings")
        which = best if self.trial else own
        return f"search {self.search}, trial {self.trial} ({which}), study.json with sha256 {self.study}"

    def refuse_others(self, train: Any) -> None:
        """Raise ValueError with the first key of `train` that has another value than the search chose."""
        for key, chosen in self.settings.items():
            value = train
            for name in key.split("."):
                value = getattr(value, name, None)
            if value != chosen:
                raise ValueError(
                    f"chosen_by: search {self.search} chose {key}: {chosen}, but train.{key} is {value}; name "
                    "best.yaml or probably.yaml after your other files, or remove chosen_by"
                )
