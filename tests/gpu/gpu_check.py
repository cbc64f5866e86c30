"""Train, merge and verify on this machine's GPU, with its own PyTorch, and print the speed.

    python tests/gpu/gpu_check.py [--device cpu] [--small] [--trainer plain] [--batch ROWS]
                                  [--folder FOLDER] [--json FILE]

It runs offline. It first prints a line for each missing requirement. `gpu.check` describes the work.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the check of the command line, print the figures, and leave only --json's file."""
    if sys.version_info < (3, 11):  # noqa: UP036 (the machine's own Python may be any)
        sys.exit(f"gpu-check: Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    options = _options()
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
    # instead of this folder, whose modules are found as gpu.NAME.
    sys.path[0:1] = [str(TESTS), str(TESTS.parent / "scripts")]
    from gpu.needs import what_is_missing

    if missing := what_is_missing():
        sys.exit("\n".join(f"gpu-check: {line}" for line in missing))

    from gpu.check import check
    from gpu.table import table
    from vlmflow.core.errors import VlmflowError
    from vlmflow.core.files import write_json

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder is removed
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as folder:
            figures = check(Path(folder), options.device, options.small, options.trainer, options.batch)
    except VlmflowError as error:
        sys.exit(f"gpu-check: {error}")
    print(table(figures))
    if options.json:
        write_json(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where to compute (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps: the same code in a minute")
    parser.add_argument(
        "--trainer",
        choices=["ms-swift", "plain"],
        help="the workflow's own trainer, or a plain loop (default: ms-swift where it is installed)",
    )
    parser.add_argument("--batch", type=_count, metavar="ROWS", help="rows per forward pass (default: 32, small 1)")
    parser.add_argument(
        "--folder", type=_folder, help="where the temporary folder is made, of up to 9 GB (default: as TMPDIR says)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of rows; 1 or more")
    return int(text)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


if __name__ == "__main__":
    main()
