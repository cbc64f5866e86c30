"""Let ms-swift read a run's rows and pictures once, on the CPU, into its cached data set."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.run_blocks import LengthBlock, TrainBlock
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.config.tuners import LORA
from vlmflow.core.files import whole_folder
from vlmflow.training.cached_dataset import cache_dataset
from vlmflow.training.plan_training import plan_training


class RunBlock(LengthBlock):
    """The run's settings that this stage uses; see docs/config.md."""

    max_length: int
    seed: int
    dtype: str


def main(
    *,
    rows: Path,
    model: Path,
    cached: Path,
    settings: RunBlock,
    picture_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Cache the data set of one run.

    rows: the run's rows that fit (fitted/RUN). model: folder with the base model's manifest.
    cached: the folder to write (cached/RUN).
    settings: those of the run that determine the cache. picture_store: the folder with all picture stores.
    pictures: the image manifests of the train and val splits; none if rows have no pictures.
    """
    named = settings.model_dump(exclude={"model_type", "text_args"})
    train = TrainSettings(**named, swift_args=settings.text_args)
    block = TrainBlock(
        train=train,
        device="cpu",
        nodes=1,
        processes=1,
        tuner=LORA.name,
        strategy=DDP.name,
        deepspeed=None,
        model_type=settings.model_type,
    )
    training = plan_training(block, rows, model, picture_store, pictures or [])
    with whole_folder(cached) as folder:
        cache_dataset(training, rows, folder, threads, f"cache_dataset {cached.name}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
