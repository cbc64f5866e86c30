"""The settings of the answers by which a run's weights are compared with their base."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from vlmflow.config.settings import Count, Positive, Settings
from vlmflow.config.web_address import refuse_no_address


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
