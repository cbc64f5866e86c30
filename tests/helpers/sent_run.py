"""Sends the run of `tracked_run` to trackers, as the rule does."""

from pathlib import Path

from stages.track import main as track
from tracked_run import RUN
from vlmflow.config.after_training import TrackSettings
from vlmflow.core.account import read_account
from vlmflow.track.story import Tracked


def send(folder: Path, store: str = "stores/trackers", **trackers: str) -> Tracked:
    """Call the rule's script."""
    track(
        full=folder / "checkpoints" / RUN / "full",
        merged=folder / "merged" / RUN,
        evaluated=[folder / "eval" / RUN / "val"],
        answered=[folder / "answers" / RUN / "val"],
        rows=[folder / "data" / "fire" / "val.jsonl"],
        pictures=[folder / "images" / "fire" / "train.jsonl"],
        tracked=folder / "tracked" / f"{RUN}.json",
        track=TrackSettings.model_validate(trackers),
        tracker_store=folder / store,
    )
    return read_account(folder / "tracked" / f"{RUN}.json", Tracked)
