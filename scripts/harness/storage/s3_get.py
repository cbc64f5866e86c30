"""Downloads a folder that a run made in S3: `python -m harness.storage.s3_get s3://BUCKET/merged/RUN FOLDER`."""

import argparse
import os
import sys
from pathlib import Path
from urllib.parse import urlparse

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from harness.storage.s3_folder import Folder
from vlmflow.core.errors import VlmflowError


def main(address: str, local: Path) -> None:
    """Download the folder and check every file's SHA-256; it gets the name `local` once all match.

    address: s3://BUCKET/FOLDER. Server and keys come from the storage plugin's variables SNAKEMAKE_STORAGE_S3_…, or
    from those of AWS.

    Raises VlmflowError if the folder is damaged or missing, or if `local` already exists.
    """
    given = {name: os.environ.get(f"SNAKEMAKE_STORAGE_S3_{name.upper()}") for name in ("access_key", "secret_key")}
    server = boto3.resource(
        "s3",
        endpoint_url=os.environ.get("SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"),
        aws_access_key_id=given["access_key"],
        aws_secret_access_key=given["secret_key"],
    )
    if local.exists():
        raise VlmflowError(f"{local} already exists", "use another folder, or remove it")
    place = urlparse(address)
    try:
        Folder(server.Bucket(place.netloc), place.path.strip("/")).retrieve(local)
    except (ClientError, BotoCoreError, FileNotFoundError) as error:
        raise VlmflowError(
            f"{address}: cannot download the folder ({type(error).__name__}: {error})",
            "check that the run has made it, and that SNAKEMAKE_STORAGE_S3_… set its server and keys",
        ) from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m harness.storage.s3_get", description=__doc__)
    parser.add_argument("address", help="s3://BUCKET/FOLDER")
    parser.add_argument("folder", type=Path, help="where to put it; it must not exist")
    given = parser.parse_args()
    try:
        main(given.address, given.folder)
    except VlmflowError as error:
        sys.exit(str(error))
