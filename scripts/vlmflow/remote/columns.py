"""Sets the tables of `make status`."""

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row. The columns are aligned, but for the last, of which each cell keeps its width."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
