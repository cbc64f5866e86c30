"""Progress of a fetch of pictures: bytes and pictures, their rates, and the time left."""

import threading

from vlmflow.core.progress import Progress, amount


class FetchProgress(Progress):
    """Counts received bytes, for rate and time left, and complete pictures.

    what: the stage and its subject. `total` and `total_pictures` are set after planning; `total` may be an estimate,
    and is hidden once it is exceeded. Several threads may count.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what, 0, "bytes")
        self.pictures = 0
        self.total_pictures = 0
        self._lock = threading.Lock()

    def advance(self, units: int = 1) -> None:
        """Count `units` more bytes; a negative number for dropped ones."""
        with self._lock:
            super().advance(units)

    def line(self, seconds: float) -> str:
        """Return the report after `seconds` of work."""
        if self.count > self.total:
            self.total = 0
        rate = self.pictures / seconds if seconds > 0 else 0.0
        return (
            f"{super().line(seconds)} · {self.pictures:,} of {self.total_pictures:,} pictures"
            f" · {amount(rate, 'pictures')}/s"
        )
