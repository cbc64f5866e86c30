"""Reads answers of trackers with requests: uncompressed, and up to a limit; runs in the environment `track`."""

import time

import requests
import urllib3

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
