"""Names of pictures that rows hold themselves: by their content, so that each picture is stored once."""

import binascii
import hashlib
from base64 import b64decode


def name_of(data: str) -> str:
    """Return the name of an embedded picture, `embedded/ab/SHA256.EXT`.

    data: a data URL, or base64. Raises ValueError with the reason if it is no picture.
    """
    head, comma, body = data.partition(",")
    if not comma:
        body = head
    try:
        held = b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"no base64: {error}") from None
    kind = "png" if held.startswith(b"\x89PNG") else "jpg"
    digest = hashlib.sha256(held).hexdigest()
    return f"embedded/{digest[:2]}/{digest}.{kind}"
