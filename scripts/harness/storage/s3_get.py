"""Download a folder that a run made in S3: `python -m harness.storage.s3_get s3://BUCKET/merged/RUN FOLDER`."""

import os
import sys
from pathlib import Path
from urllib.parse import urlparse

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from harness.storage.s3_folder import Folder
from vlmflow.core.errors import VlmflowError


def main(address: str, local: Path) -> None:
    """Download the folder and compare every file's SHA-256; `local` takes its name when all are right.

    address: s3://BUCKET/FOLDER. Server and keys are those of the storage plugin: SNAKEMAKE_STORAGE_S3_…, or AWS' own.

    Raises VlmflowError where it is not what was stored, or no folder, or `local` is there already.
    """
    given = {name: os.environ.get(f"SNAKEMAKE_STORAGE_S3_{name.upper()}") for name in ("access_key", "secret_key")}
    server = boto3.resource(
        "s3",
        endpoint_url=os.environ.get("SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"),
        aws_access_key_id=given["access_key"],
        aws_secret_access_key=given["secret_key"],
    )
    if local.exists():
        raise VlmflowError(f"{local} already exists", "name another folder, or remove it")
    place = urlparse(address)
    try:
        Folder(server.Bucket(place.netloc), place.path.strip("/")).retrieve(local)
    except (ClientError, BotoCoreError, FileNotFoundError) as error:
        raise VlmflowError(
            f"{address}: cannot fetch a folder from there ({type(error).__name__}: {error})",
            "check that the run has made it, and that SNAKEMAKE_STORAGE_S3_… give its server and keys",
        ) from None


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except VlmflowError as error:
        sys.exit(str(error))
