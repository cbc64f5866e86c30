"""Fetches single pictures from a server."""

from urllib.parse import quote

from vlmflow.core.patience import PassingFault
from vlmflow.web.missing import Refused
from vlmflow.web.transport import Answer, Transport, host_of

HEADERS = {"accept-encoding": "identity", "user-agent": "vlmflow"}


def fetch_one(base: str, member: str, transport: Transport, max_bytes: int) -> bytes:
    """Return the bytes of one picture from the address `base` + `member`.

    Raises Refused if the server refuses it or it is too large, VlmflowError if the server fails too often; Stopped.
    """
    address = base + quote(member)
    blocks: list[bytes] = []
    size = 0

    def take(block: bytes) -> None:
        nonlocal size
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            raise Refused("too_large", f"more than {max_bytes:,} bytes")

    def attempt() -> None:
        nonlocal size
        transport.discount(size)
        blocks.clear()
        size = 0
        transport.get(address, HEADERS, _accept, take)
        if not blocks:
            raise PassingFault(f"{host_of(base)} sent an empty file")

    transport.patiently(f"{base}{member}", attempt)
    return b"".join(blocks)


def _accept(answer: Answer) -> None:
    if problem := answer.problem(200):
        raise answer.fault(problem) if answer.may_pass else Refused("refused", problem)
