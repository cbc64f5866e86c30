"""Events: reports of the cluster's components about an object. By default they are kept for an hour."""

from collections.abc import Collection, Iterable

from vlmflow.remote.cluster.api import Object


def by_object(events: Iterable[Object]) -> dict[tuple[str | None, str | None], list[Object]]:
    """Group events by the kind and name of their object."""
    found: dict[tuple[str | None, str | None], list[Object]] = {}
    for event in events:
        about = event["involvedObject"]
        found.setdefault((about.get("kind"), about.get("name")), []).append(event)
    return found


def newest_of(events: Iterable[Object], reasons: Collection[str]) -> Object | None:
    """Return the event that was last seen with one of these reasons (`Failed`, `Pulling`); None without one."""
    return max((event for event in events if event.get("reason") in reasons), key=time_of, default=None)


def time_of(event: Object | None) -> str:
    """Return when an event was last seen, as the API writes times; "" for None."""
    return (event or {}).get("lastTimestamp") or (event or {}).get("eventTime") or ""


def message_of(event: Object | None) -> str:
    """Return what an event says for people, without white space around it; "" for None."""
    return ((event or {}).get("message") or "").strip()
