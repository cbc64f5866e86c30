"""A data set's account (stats.json), for tests that need one without a data set."""

from typing import Any

from vlmflow.config.data_settings import RowLimits
from vlmflow.pictures.manifest import PictureCounts
from vlmflow.rows.stats import RulesUsed, SplitCounts, Stats
from vlmflow.rows.strict_rows import Found


def some_stats(**fields: Any) -> Stats:
    """Return the account of the data set `fire` with one raw row. fields: those that differ."""
    used = RulesUsed(
        max_history_rounds=None,
        val_share=0.1,
        seed=1,
        max_reject_share=0.5,
        row_limits=RowLimits().model_dump(),
        test_share=0.0,
    )
    usual: dict[str, Any] = {
        "dataset": "fire",
        "kind": "fire",
        "modality": "image",
        "skip_images": False,
        "form": "trajectory",
        "mended": [],
        "settings": used,
        "train": SplitCounts(1, 1, {}),
        "examples": {"train": 1, "val": 0, "test": 0},
        "kept_by_source": {"train": {"": 1}},
        "kept_by_attempts": {"train": {1: 1}},
        "mended_rows": {"train": 0},
        "score_field_differs": {"train": 0},
        "pictures": {"train": PictureCounts()},
        "unread": {"train": Found().counts(())},
        "digests": {},
        "raw": {"train": []},
    }
    return Stats(**(usual | fields))
