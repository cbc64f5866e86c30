"""Checks the address of a server in the configuration: an address alone, without a key or password in it."""

from urllib.parse import urlsplit


def refuse_no_address(url: str, example: str, key: str) -> None:
    """Refuse what is no http(s) address, or holds more than one.

    example: of a good address. key: the environment variable in which a password or token belongs.

    Raises ValueError.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{url!r} is not an address such as {example}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"the address alone, without user, password or query; a key goes into {key}")
