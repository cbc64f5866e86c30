"""Have ms-swift read a run's rows and pictures once, on the CPU, into its cached data set."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.core.files import whole_folder
from vlmflow.lengths.fitted import fitted_data
from vlmflow.swift.arguments import BaseModel, TrainJob
from vlmflow.training.cached_dataset import cache_dataset


def main(
    *,
    rows: Path,
    model: Path,
    cached: Path,
    settings: TrainSettings,
    model_type: str,
    picture_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Cache the data set of one run.

    rows: the run's rows that fit (fitted/RUN). model: folder with the base model's manifest.
    cached: the folder to write (cached/RUN).
    settings: those of the run's that decide what is cached; of swift_args those that change the text.
    model_type: see docs/config.md.
    picture_store: the folder that holds all picture stores.
    pictures: the image manifest of the train split, none where rows have no pictures.
    """
    data = fitted_data(rows, settings.max_length, picture_store, pictures or [])
    job = TrainJob(data, BaseModel.read(model, model_type), settings, device="cpu", processes=1, strategy=DDP)
    with whole_folder(cached) as folder:
        cache_dataset(job, rows, folder, threads, f"cache_dataset {cached.name}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
