"""Pictures that a server gives one by one."""

from urllib.parse import quote

from vlmflow.web import hub
from vlmflow.web.missing import Refused
from vlmflow.web.retry import PassingFault
from vlmflow.web.transport import Answer, Wire, host_of

HEADERS = {"accept-encoding": "identity", "user-agent": "vlmflow"}


def fetch_single(base: str, member: str, wire: Wire, max_bytes: int) -> bytes:
    """Give the bytes of one picture, read from `base` + `member`.

    Raises Refused where the server does not give it, VlmflowError where it fails too often, Stopped.
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
        wire.transfer.advance(-size)
        blocks.clear()
        size = 0
        wire.get(address, HEADERS, _accept, take)
        if not blocks:
            raise PassingFault(f"{host_of(base)} gives nothing")

    wire.patiently(f"{base}{member}", attempt)
    return b"".join(blocks)


def _accept(answer: Answer) -> None:
    if answer.status in hub.PASSING_STATUS:
        raise PassingFault(f"{answer.host} answers {answer.status}", hub.asked_wait(answer.headers))
    if answer.status != 200:
        raise Refused("refused", f"{answer.host} answers {answer.status}")
    if answer.is_page:
        raise Refused("refused", f"{answer.host} gives an HTML page in place of the picture")
