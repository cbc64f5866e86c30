"""Sends evaluated rows as traces to an OpenTelemetry endpoint; runs in the environment `track` (core/own_environment).

Question: {"to": address without /v1/traces, "traces": list of `RowTrace`}. Answer: {"figures": spans sent}.

The ids of traces and spans come from their rows, so a second sending repeats the same spans. Headers and certificates
come from OpenTelemetry's variables (OTEL_EXPORTER_OTLP_HEADERS, …). Attributes: OpenTelemetry's conventions for
generative AI (gen_ai.*, with a score as an event gen_ai.evaluation.result), and those that Langfuse and Phoenix show
(session.id, input.value, output.value, langfuse.trace.*).
"""

import hashlib
import logging
import os
import sys
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from vlmflow.core.own_program import answer_with

SPANS = 256
"""Spans in a request; one has a few KB."""

os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
"""How long a request is tried again, in seconds in all (OpenTelemetry's variable)."""


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Send all spans; end with code 1 and the server's words if it does not take one of them."""
    refusals: list[str] = []
    session = requests.Session()
    session.max_redirects = 0  # the key is for this address alone
    session.hooks["response"].append(lambda response, **_: refusals.extend(refusal_in(response)))
    words = _Words()
    logging.getLogger("opentelemetry").addHandler(words)
    exporter = OTLPSpanExporter(endpoint=question["to"].rstrip("/") + "/v1/traces", session=session)
    spans = [span for trace in question["traces"] for span in spans_of(trace)]
    for sent in range(0, len(spans), SPANS):
        if exporter.export(spans[sent : sent + SPANS]) is not SpanExportResult.SUCCESS:
            sys.exit(f"after {sent:,} of {len(spans):,} spans: {words.last or 'no answer'}")
        if refusals:
            sys.exit(f"after {sent:,} of {len(spans):,} spans: the server took not all: {refusals[0]}")
    exporter.shutdown()
    return {"figures": len(spans)}


def refusal_in(response: requests.Response) -> list[str]:
    """Return what a server says that it refused, of a request that it otherwise took (OTLP, Partial Success)."""
    if not response.ok or not response.headers.get("content-type", "").startswith("application/x-protobuf"):
        return []
    said = ExportTraceServiceResponse.FromString(response.content).partial_success
    return [f"{said.rejected_spans} spans refused: {said.error_message}"] if said.rejected_spans else []


def spans_of(trace: dict[str, Any]) -> list[ReadableSpan]:
    """Return a trace's spans: one for the row, and one for each of its turns, a millisecond long each."""
    digest = hashlib.sha256(trace["identity"].encode()).digest()
    identity, begin = int.from_bytes(digest[:16]), round(1e9 * trace["at"])
    about = {
        "session.id": f"{trace['run']} {trace['model']}",
        "langfuse.trace.name": trace["row"],
        "langfuse.trace.metadata.split": trace["split"],
        "langfuse.trace.metadata.source": trace["source"],
        "langfuse.trace.metadata.model": trace["model"],
        "langfuse.trace.metadata.pictures": trace["pictures"],
    }
    row = SpanContext(identity, int.from_bytes(digest[16:24]), is_remote=False, trace_flags=TraceFlags(1))
    first, last = trace["turns"][0], trace["turns"][-1]
    ends = {"input.value": first["prompt"], "output.value": last["answer"]}
    spans = [_span(trace["row"], row, None, about | ends, [], begin, begin + len(trace["turns"]) * 10**6)]
    for number, turn in enumerate(trace["turns"]):
        own = hashlib.sha256(digest + str(number).encode()).digest()
        context = SpanContext(identity, int.from_bytes(own[:8]), is_remote=False, trace_flags=TraceFlags(1))
        at = begin + number * 10**6
        attributes = about | {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": f"{trace['run']} {trace['model']}",
            "input.value": turn["prompt"],
            "output.value": turn["answer"],
            **{f"langfuse.observation.metadata.{key}": value for key, value in turn["facts"].items()},
            **{f"langfuse.observation.metadata.{key}": value for key, value in turn["scores"].items()},
        }
        scores = [
            Event(
                "gen_ai.evaluation.result",
                {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value},
                timestamp=at,
            )
            for name, value in turn["scores"].items()
        ]
        spans.append(_span(turn["name"], context, row, attributes, scores, at, at + 10**6))
    return spans


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    attributes: dict[str, Any],
    events: list[Event],
    begin: int,
    end: int,
) -> ReadableSpan:
    return ReadableSpan(
        name=name,
        context=context,
        parent=parent,
        resource=Resource({"service.name": "vlmflow"}),
        attributes=attributes,
        events=events,
        kind=SpanKind.INTERNAL,
        start_time=begin,
        end_time=end,
        instrumentation_scope=InstrumentationScope("vlmflow"),
    )


class _Words(logging.Handler):
    """Keeps the exporter's last message: it reports a failure in its log alone."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = " ".join(record.getMessage().split())


if __name__ == "__main__":
    answer_with(main)
