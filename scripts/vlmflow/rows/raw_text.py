"""What raw rows of every form have in common: texts, and no identity of their own."""

from zlib import crc32


def row_id(split: str, number: int, row: bytes) -> str:
    """Make a row's identity: split, row number from 0, and a checksum (CRC-32) of the raw bytes.

    It shows where a file of the same name holds another row; a SHA-256 would take a fifth of the conversion's time.
    """
    return f"{split}-{number:07}-{crc32(row):08x}"


def clean(text: str) -> str:
    """Give a text with line feeds alone as line ends, and without white space around it."""
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).strip()
