"""Run the workflow on this machine's GPU, with its own PyTorch, offline, and print what it measures.

    python tests/gpu/gpu_check.py [--minutes 8] [--shape 8b|2b|tiny] [--out FOLDER] [--only PART …]

`gpu.parts` lists the parts in their order. FOLDER gets gpu-check.json and the logs. The work itself, of two models and
more, is in a folder under TMPDIR (a RAM disk is quickest), which is removed at the end.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the parts of the command line; ends with 1 if one of them fails."""
    if sys.version_info < (3, 11):  # noqa: UP036 (the machine's own Python may be any)
        sys.exit(f"gpu-check: Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    options = _options()
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
    # instead of this folder, whose modules are found as gpu.NAME.
    sys.path[0:1] = [str(TESTS), str(TESTS.parent / "scripts")]
    from gpu.needs import what_is_missing
    from vlmflow.core.processes import import_path

    os.environ["PYTHONPATH"] = import_path()
    if missing := what_is_missing():
        sys.exit("\n".join(f"gpu-check: {line}" for line in missing))

    from gpu.parts import in_time, parts_of, table
    from gpu.road import Road, machine
    from vlmflow.core.files import write_json

    device = "cpu" if options.shape == "tiny" else "cuda"
    here = machine(device)
    if device == "cuda" and not here["card"]:
        sys.exit("gpu-check: PyTorch finds no GPU here; to try the check itself on the CPU: SHAPE=tiny")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder is removed
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"machine": here, "shape": options.shape, "minutes": options.minutes, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        road = Road(Path(folder), options.out.resolve(), device, options.shape)
        parts = parts_of(road, here["card"])
        if unknown := [name for name in options.only if name not in {part.name for part in parts}]:
            known = ", ".join(part.name for part in parts)
            sys.exit(f"gpu-check: --only {' '.join(unknown)}: no such part; there are {known}")
        if options.only:
            parts = [part for part in parts if part.name in ("model", "road", *options.only)]
        for name, found in in_time(parts, 60 * options.minutes):
            print(f"{name}: {found['status']} ({found['seconds']:.1f} s)", flush=True)
            figures["parts"][name] = found
            write_json(options.out / "gpu-check.json", figures)
    print(f"\n{table(figures)}\n\n{options.out / 'gpu-check.json'}")
    if any(found["status"].startswith("failed") for found in figures["parts"].values()):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="for all parts together (default: 8)")
    parser.add_argument("--shape", choices=["8b", "2b", "tiny"], default="8b", help="of the model; tiny: on the CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="for gpu-check.json and the logs")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts, and what they need")
    return parser.parse_args()


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes")
    return minutes


if __name__ == "__main__":
    main()
