"""Events: what the cluster's parts said of an object. The API keeps them for an hour, also when that is gone."""

from collections.abc import Collection, Iterable

from vlmflow.cluster.api import Object


def by_object(events: Iterable[Object]) -> dict[tuple[str | None, str | None], list[Object]]:
    """Give events by the kind and name of the object that they are about."""
    found: dict[tuple[str | None, str | None], list[Object]] = {}
    for event in events:
        about = event["involvedObject"]
        found.setdefault((about.get("kind"), about.get("name")), []).append(event)
    return found


def newest_of(events: Iterable[Object], reasons: Collection[str]) -> Object | None:
    """Give the newest event for one of some reasons, or None."""
    return max((event for event in events if event.get("reason") in reasons), key=time_of, default=None)


def time_of(event: Object | None) -> str:
    """Give when an event was last seen, as the API writes times; nothing for none."""
    return (event or {}).get("lastTimestamp") or (event or {}).get("eventTime") or ""


def message_of(event: Object | None) -> str:
    """Give what an event says; nothing for none."""
    return ((event or {}).get("message") or "").strip()
