"""Events: what the cluster's parts said of an object. The API keeps them for an hour, also when that is gone."""

from collections.abc import Collection, Iterable

from harness.kubernetes.namespace import Object


def latest(events: Iterable[Object], kind: str, name: str, reasons: Collection[str]) -> Object | None:
    """Give the newest event of an object for one of some reasons, or None."""
    mine = [
        event
        for event in events
        if event["involvedObject"].get("kind") == kind
        and event["involvedObject"].get("name") == name
        and event.get("reason") in reasons
    ]
    return max(mine, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)


def message_of(event: Object | None) -> str:
    """Give what an event says; nothing for none."""
    return ((event or {}).get("message") or "").strip()
