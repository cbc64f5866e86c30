"""Reads answers of trackers with requests: uncompressed, and up to a limit; runs in the environment `track`.

Sends evaluated rows as traces to an OpenTelemetry endpoint; runs in the environment `track` (core/child_programs).

Question: {"to": address without /v1/traces, "project": the collector's name for what belongs together, "traces": list
of `RowTrace`}. Answer: {"figures": spans sent}.

The ids of traces and spans come from their rows, so a second sending repeats the same spans. Headers and certificates
come from OpenTelemetry's variables (OTEL_EXPORTER_OTLP_HEADERS, …). Attributes: OpenTelemetry's conventions for
generative AI (gen_ai.*, with a score as an event gen_ai.evaluation.result), OpenInference's, which Phoenix shows (kind,
project, session.id, input.value, output.value), langfuse.*, and vlmflow.score.NAME, by which people filter and sort. An
output is what the model said, and nothing else.
"""

import hashlib
import os
import time
from functools import partial
from typing import Any

import requests
import urllib3
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from vlmflow.core.child_programs import answer_with, without_keys
from vlmflow.core.errors import PassingError, VlmflowError


def read(response: requests.Response, most: int, next_step: str, until: float = float("inf")) -> VlmflowError | None:
    """Read a streamed answer into `response.content`, as it was sent; return what kept it from being whole, else None.

    most: bytes. next_step: for an answer that is longer. until: when it must end, on the monotonic clock.

    Raises as `requests` does when a connection breaks.
    """
    content, fault = b"", None
    try:
        while block := response.raw.read1(most, decode_content=False):
            content += block
            if len(content) > most:
                fault = VlmflowError(f"{response.url}: its answer has more than {most:,} bytes", next_step)
                break
            if time.monotonic() > until:
                fault = PassingError(
                    f"{response.url}: its answer did not end in time",
                    "see that the server runs, and that this machine reaches it",
                )
                break
        else:
            response._content_consumed = True  # so that its connection serves the next request
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise requests.ConnectionError(error) from None
    finally:
        response.close()
    response._content = content
    return fault


SPANS = 256
"""Spans in a request; one has a few KB."""

os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
"""How long a request is tried again, in seconds in all (OpenTelemetry's variable)."""

SHOWN_OF_ERROR = 500
"""Characters of each part of a server's answer that our message repeats."""

LONGEST_ANSWER = 1_000_000
"""Bytes of an answer that are read; a collector's has a few."""

RUNS = "see that the server runs, and that this machine reaches it"
ADDRESS = "see that runs.NAME.track.otlp is the address of an OpenTelemetry endpoint, without /v1/traces"
KEY = "set the key of an account that may write there: OTEL_EXPORTER_OTLP_HEADERS"


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Send all spans.

    Raises VlmflowError if the server does not take one of them, PassingError if it cannot be reached, or fails itself.
    """
    session = Session()
    session.headers["Accept-Encoding"] = "identity"  # so that no answer grows when it is unpacked
    session.auth = lambda request: request  # otherwise an entry of ~/.netrc would replace the key
    exporter = OTLPSpanExporter(endpoint=question["to"].rstrip("/") + "/v1/traces", session=session)
    resource = Resource({"service.name": "vlmflow", "openinference.project.name": question["project"]})
    spans = [span for trace in question["traces"] for span in spans_of(trace, resource)]
    for sent in range(0, len(spans), SPANS):
        result = exporter.export(spans[sent : sent + SPANS])
        if fault := session.fault:
            raise type(fault)(f"{fault.cause} (after {sent:,} of {len(spans):,} spans)", fault.next_step)
        if result is not SpanExportResult.SUCCESS:
            raise VlmflowError(f"{question['to']}: the exporter sent nothing", "its messages above say why")
    exporter.shutdown()
    return {"figures": len(spans)}


class Session(requests.Session):
    """Remembers how the last request ended: of that the exporter tells less, and any answer below 400 suits it.

    fault: what was wrong with it; None if the server took everything.
    """

    fault: VlmflowError | None = None

    def request(self, method: str, url: str, **options: Any) -> requests.Response:  # type: ignore[override]
        """Send a request as `requests` does, which also says what it raises; timeout: also of the whole answer."""
        until = time.monotonic() + options["timeout"]
        try:
            response = super().request(method, url, stream=True, **options)
            missing = read(response, LONGEST_ANSWER, ADDRESS, until)
        except requests.RequestException as error:
            passes = isinstance(error, requests.ConnectionError | requests.Timeout)
            lasts = isinstance(error, requests.exceptions.SSLError)
            self.fault = (PassingError if passes and not lasts else VlmflowError)(f"{url}: {shown(str(error))}", RUNS)
            raise
        response.reason = shown(response.reason or "")  # the exporter repeats it
        self.fault = fault_of(response) if response.status_code >= 300 else missing or fault_of(response)
        return response


def shown(text: str, most: int = SHOWN_OF_ERROR) -> str:
    """Return a server's text as our messages have it: without keys, and only then cut, which may leave half a key."""
    return " ".join(without_keys(text).split())[:most]


def text_of(response: requests.Response) -> str:
    """Return an answer's text; the server's own name of its letters may be none that Python can read."""
    try:
        return response.content.decode(response.encoding or "utf-8", errors="replace")
    except (LookupError, ValueError):
        return response.content.decode(errors="replace")


def fault_of(response: requests.Response) -> VlmflowError | None:
    """Return what is wrong with a server's answer; None if it is OTLP's, and the server took all spans."""
    url, status, text = response.url, response.status_code, text_of(response)
    reply = shown(text)
    if status >= 500 or status in (408, 429):
        return PassingError(f"{url}: HTTP {status}: {reply or response.reason}", RUNS)
    if status >= 400:
        step = KEY if status in (401, 403) else ADDRESS
        return VlmflowError(f"{url}: HTTP {status}: {reply or response.reason}", step)
    if status >= 300:
        target = shown(response.headers.get("location", "nowhere"))
        return VlmflowError(f"{url}: it redirects to {target}, which would get the key, so nothing was sent", ADDRESS)
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    answer = ExportTraceServiceResponse()
    try:
        if kind == "application/json":
            json_format.Parse(text or "{}", answer, ignore_unknown_fields=True)
        elif kind in ("application/x-protobuf", ""):
            answer.ParseFromString(response.content)
        else:
            return VlmflowError(f"{url}: its answer is no OTLP but {shown(kind)}: {reply}", ADDRESS)
    except (DecodeError, json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        return VlmflowError(f"{url}: its answer is no OTLP: {shown(str(error))}: {reply}", ADDRESS)
    refused = answer.partial_success
    if refused.rejected_spans:
        return VlmflowError(
            f"{url}: {refused.rejected_spans} spans refused: {shown(refused.error_message)}",
            "see the server's log, and what it says about the spans that it takes",
        )
    return None


def spans_of(trace: dict[str, Any], resource: Resource) -> list[ReadableSpan]:
    """Return a trace's spans: one for the row, and one for each of its turns, a millisecond long each.

    The row's has the model's last answer, if it was asked, and all scores of the row after that.
    """
    digest = hashlib.sha256(trace["identity"].encode()).digest()
    identity, begin = int.from_bytes(digest[:16]), round(1e9 * trace["at"])
    about = {
        "session.id": f"{trace['run']} {trace['model']}",
        "langfuse.trace.name": (name := f"{trace['row']} {trace['model']}"),
        "langfuse.trace.metadata.split": trace["split"],
        "langfuse.trace.metadata.source": trace["source"],
        "langfuse.trace.metadata.model": trace["model"],
        "langfuse.trace.metadata.pictures": trace["pictures"],
    }
    row = SpanContext(identity, int.from_bytes(digest[16:24]), is_remote=False, trace_flags=TraceFlags(1))
    answers = [turn["answer"] for turn in trace["turns"] if turn["answer"] is not None]
    ends = {"input.value": trace["turns"][0]["prompt"], **({"output.value": answers[-1]} if answers else {})}
    scores = {key: value for turn in trace["turns"] for key, value in _scores(turn).items()}
    whole = about | {"openinference.span.kind": "CHAIN"} | ends | scores
    span = partial(ReadableSpan, resource=resource, instrumentation_scope=InstrumentationScope("vlmflow"))
    end = begin + len(trace["turns"]) * 10**6
    spans = [span(name, row, attributes=whole, start_time=begin, end_time=end)]
    for number, turn in enumerate(trace["turns"]):
        own = hashlib.sha256(digest + str(number).encode()).digest()
        context = SpanContext(identity, int.from_bytes(own[:8]), is_remote=False, trace_flags=TraceFlags(1))
        at = begin + number * 10**6
        call = {
            "openinference.span.kind": "LLM",
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": f"{trace['run']} {trace['model']}",
            "output.value": turn["answer"],
        }
        attributes = about | {
            **(call if turn["answer"] is not None else {"openinference.span.kind": "EVALUATOR"}),
            "input.value": turn["prompt"],
            **_scores(turn),
            **{f"langfuse.observation.metadata.{key}": value for key, value in turn["facts"].items()},
            **{f"langfuse.observation.metadata.{key}": value for key, value in turn["scores"].items()},
        }
        events = [
            Event(
                "gen_ai.evaluation.result",
                {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value},
                timestamp=at,
            )
            for name, value in turn["scores"].items()
        ]
        spans.append(
            span(turn["name"], context, row, attributes=attributes, events=events, start_time=at, end_time=at + 10**6)
        )
    return spans


def _scores(turn: dict[str, Any]) -> dict[str, float]:
    """Return a turn's scores as attributes."""
    return {f"vlmflow.score.{name}": value for name, value in turn["scores"].items()}


if __name__ == "__main__":
    answer_with(main)
