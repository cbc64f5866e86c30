"""A working directory with a finished run that was never trained: its files are small, its accounts fit them."""

import json
from pathlib import Path
from typing import Any

from hub_server import sha256
from made_accounts import some_provenance, some_report
from vlmflow.core.account import write_account
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import LicenceOfSource, StatedLicences
from vlmflow.supervisor.report import TrainingDigests

MERGED = {
    "config.json": b"{}\n",
    "model-00001-of-00002.safetensors": b"first shard" * 9_000,
    "model-00002-of-00002.safetensors": b"second shard" * 9_000,
}
ADAPTER = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "/home/ann/views/tiny", "r": 8}).encode(),
    "adapter_model.safetensors": b"adapter" * 1_000,
}
RUN = "mine"


def rights(licence: str = "cc-by-4.0", pictures: str = "cc-by-nc-4.0") -> StatedLicences:
    return StatedLicences("fire", [], licence, [], [LicenceOfSource("coco", 9, pictures)])


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: sha256(content) for name, content in files.items()}


def finished_run(folder: Path, **facts: Any) -> Path:
    """Make the run in a working directory; return merged/RUN. facts: of the provenance, those that differ."""
    merged, full = folder / "merged" / RUN, folder / "checkpoints" / RUN / "full"
    report = some_report(digests=TrainingDigests("job", "data", "model", digests(ADAPTER), "progress"))
    provenance = some_provenance(**{"merged": digests(MERGED), "training": report, "rights": rights()} | facts)
    for place, files in ((merged, MERGED), (full, ADAPTER)):
        place.mkdir(parents=True)
        for name, content in files.items():
            (place / name).write_bytes(content)
        (place / ".snakemake_timestamp").touch()
    write_account(full / "report.json", report)
    write_account(merged / "provenance.json", provenance)
    (merged / "README.md").write_text(model_card(provenance))
    return merged
