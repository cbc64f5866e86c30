"""Send a finished run to its trackers."""

from pathlib import Path

from vlmflow.config.after_training import TrackSettings
from vlmflow.core.account import write_account
from vlmflow.harness.stage import run_stage
from vlmflow.track.send import all_traces, send
from vlmflow.track.story import story_of


def main(
    *,
    full: Path,
    merged: Path,
    evaluated: list[Path],
    answered: list[Path],
    rows: list[Path],
    pictures: list[Path],
    tracked: Path,
    track: TrackSettings | None,
    tracker_store: Path,
) -> None:
    """Send one run.

    full, merged: checkpoints/RUN/full and merged/RUN. evaluated, answered: eval/RUN/SPLIT and answers/RUN/SPLIT, as far
    as the run has them. rows: the data set's files of these splits. pictures: the image manifests; none if rows have no
    pictures.
    tracked: the file to write, tracked/RUN.json: what each tracker has.
    track: the run's settings. tracker_store: the folder of offline runs.
    """
    story = story_of(full, merged, evaluated, answered)
    files = {file.stem: file for file in rows}
    trackers = track or TrackSettings()
    write_account(
        tracked,
        send(story, lambda: all_traces(evaluated, answered, files, pictures, story.ended), trackers, tracker_store),
    )


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
