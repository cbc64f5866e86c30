"""Which trackers a finished run is sent to."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from vlmflow.config.settings import Settings
from vlmflow.config.source import refuse_path
from vlmflow.config.web_address import refuse_no_address

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
