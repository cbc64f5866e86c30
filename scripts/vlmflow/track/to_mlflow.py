"""Sends a run to MLflow; runs in the environment `track` (core/child_programs).

Question: {"to": tracking address, "experiment": its name, "story": `Story`}. Answer: {"name": MLflow's id of the run,
"new": whether it was sent now, "figures": how many it has}.

A run is found again by its tag vlmflow.digest. The tag vlmflow.content is set last: a run without it is unfinished, as
after a kill, and gets all figures again. MLflow keeps one of equal figures (key, step, time and value).
"""

import os
import re
import sys
from http import HTTPStatus
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Seven tries with doubling pauses take four minutes for a server that is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from alembic.util.exc import CommandError
from google.protobuf.json_format import ParseError
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from requests.adapters import HTTPAdapter
from sqlalchemy.exc import SQLAlchemyError

from vlmflow.core.child_programs import MLFLOW_KEYS, answer_with
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.track.to_otlp import read, shown

METRICS, PARAMS = 1000, 100
"""How many metrics, and how many params or tags, a request may have (MLflow's REST API, runs/log-batch)."""

LONGEST_PARAM, LONGEST_TAG = 6000, 8000
"""Characters of a value (mlflow/utils/validation.py)."""

SHOWN_OF_ERROR = 1000
"""Characters of MLflow's own error message that ours repeats: it may quote a whole page."""

LONGEST_ANSWER = 8_000_000
"""Bytes of an answer that are read: the figures of a run have a few."""

PASSES = ("database is locked", "disk is full", "No space left")
"""What SQLite and the file system say of a file that may do another time."""

FILE = "see that runs.NAME.track.mlflow is a file of MLflow, or a new one in a folder that is writable and has room"
SERVER = "see that runs.NAME.track.mlflow is the address of an MLflow server; its log says more"


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Send the run, unless MLflow has it.

    Raises VlmflowError if MLflow refuses it, its file is none of MLflow, or its answer has another form; PassingError
    if it cannot be reached, or fails itself.
    """
    address = question["to"]
    limit_answers()
    if any(os.environ.get(name) for name in MLFLOW_KEYS):
        os.environ["NETRC"] = os.devnull  # otherwise requests would take an entry of ~/.netrc in place of the key
    try:
        try:
            return send(question)
        except MlflowException as error:
            raise explained(error, address) from None
    except (SQLAlchemyError, CommandError, OSError) as error:
        kind = PassingError if any(cause in str(error) for cause in PASSES) else VlmflowError
        raise kind(f"{address}: {shown(str(error), SHOWN_OF_ERROR)}", FILE) from None
    except (ParseError, ValueError, TypeError, LookupError, AttributeError) as error:  # what the client does not expect
        fault = f"{type(error).__name__}: {shown(str(error), SHOWN_OF_ERROR)}"
        raise VlmflowError(f"{address}: its answer is not MLflow's: {fault}", SERVER) from None


def limit_answers() -> None:
    """Let requests, by which MLflow's client asks, read no more than LONGEST_ANSWER bytes, and unpack none."""
    ask = HTTPAdapter.send

    def ask_for_little(self: HTTPAdapter, request: Any, *how: Any, **options: Any) -> Any:
        request.headers["Accept-Encoding"] = "identity"
        response = ask(self, request, *how, **options)
        if fault := read(response, LONGEST_ANSWER, SERVER):
            raise fault
        return response

    HTTPAdapter.send = ask_for_little  # type: ignore[method-assign]


def send(question: dict[str, Any]) -> dict[str, Any]:
    """Send the run, unless MLflow has it; raises MLflow's own errors, and VlmflowError as `experiment_id` does."""
    story = question["story"]
    client = MlflowClient(tracking_uri=question["to"])
    experiment = experiment_id(client, question["experiment"])
    digest = story["digest"]
    runs = client.search_runs([experiment], f"tags.`vlmflow.digest` = '{digest}'", ViewType.ACTIVE_ONLY, 1)
    if runs:
        run = runs[0]
    else:  # with the digest by which it is found again
        start = round(1000 * (story["ended"] - story["seconds"]))
        mark = {"vlmflow.digest": digest}
        run = client.create_run(experiment, start_time=start, tags=mark, run_name=story["run"])
    name = run.info.run_id
    figures = len(story["points"]) + len(story["results"]) + len(story["evaluated"])
    if run.data.tags.get("vlmflow.content") == story["content"]:
        return {"name": name, "new": False, "figures": figures}
    metrics = metrics_of(client, run, story)
    tags = [RunTag(key, cut(key, value, LONGEST_TAG)) for key, value in story["facts"].items()]
    params = [Param(key, cut(key, str(value), LONGEST_PARAM)) for key, value in story["settings"].items()]
    for kind, given, most in (("params", params, PARAMS), ("tags", tags, PARAMS), ("metrics", metrics, METRICS)):
        for at in range(0, len(given), most):
            client.log_batch(name, **{kind: given[at : at + most]})
    client.set_terminated(name, "FINISHED", end_time=run.info.start_time + round(1000 * story["seconds"]))
    client.set_tag(name, "vlmflow.content", story["content"])
    return {"name": name, "new": True, "figures": figures}


def cut(key: str, value: str, longest: int) -> str:
    """Return a value as MLflow takes it, and say so if its end is cut off."""
    if len(value) > longest:
        print(f"mlflow: {key} has {len(value):,} characters; MLflow gets {longest:,} of them", file=sys.stderr)
    return value[:longest]


def experiment_id(client: MlflowClient, name: str) -> str:
    """Return the id of the experiment, and make it if it does not exist; raises VlmflowError if it is deleted."""
    if (known := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another sender made it meanwhile
            known = client.get_experiment_by_name(name)
    if known is None or known.lifecycle_stage != "active":
        raise VlmflowError(
            f"experiment {name!r} is deleted in MLflow",
            "restore it there, or set runs.NAME.track.experiment to another",
        )
    return str(known.experiment_id)


def metrics_of(client: MlflowClient, run: Run, story: dict[str, Any]) -> list[Metric]:
    """Return the figures of a story with the same times at each sending: they count from the run's start in MLflow.

    Of two figures of an evaluation MLflow shows the one with the later time. So one that it shows is left out, and one
    of an evaluation that was made again is later than the one before.
    """
    start = run.info.start_time
    end = start + round(1000 * story["seconds"])
    of_steps = [
        Metric(point["key"], point["value"], start + round(1000 * point["seconds"]), point["step"])
        for point in story["points"]
    ]
    evaluated = []
    for key, value in story["evaluated"].items():
        if (known := run.data.metrics.get(key)) != value:
            before = [] if known is None else client.get_metric_history(run.info.run_id, key)
            evaluated.append(Metric(key, value, max((each.timestamp + 1 for each in before), default=end), 0))
    return of_steps + [Metric(key, value, end, 0) for key, value in story["results"].items()] + evaluated


def explained(error: MlflowException, address: str) -> VlmflowError:
    """Return an error of MLflow as ours, with a next step."""
    if isinstance(ours := error.__cause__ or error.__context__, VlmflowError):
        return ours
    cause = f"{address}: {shown(str(error), SHOWN_OF_ERROR)}"
    # MLflow takes an unknown status, no answer, and a page in the place of an answer for an error 500.
    match = re.search(r"failed with error code (\d{3})", cause)
    status = int(match[1]) if match else error.get_http_status_code()
    if "not in a valid JSON format" in cause:
        status = HTTPStatus.OK
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
        return PassingError(cause, "see that the server runs, and that this machine reaches it")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        keys = "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return VlmflowError(cause, f"set the key of an account that may write there: {keys}")
    return VlmflowError(cause, SERVER)


if __name__ == "__main__":
    answer_with(main)
