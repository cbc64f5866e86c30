"""Make one archive of this checkout and of the packages that a machine without network lacks, and say how to use it.

    .venv/bin/python tests/gpu/pack.py [--out vlmflow-gpu.tar.xz] [--python 3.12] [--cuda 13.0]

The machine has a Python of that version, with torch for that CUDA, and OF_THE_MACHINE. Packages are those of
envs/train.lock, taken from the package index by uv. PYTHONPATH finds them: nothing is installed there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OF_THE_MACHINE = ("torch", "torchvision", "numpy", "scipy", "pandas", "pyarrow", "matplotlib")
"""Packages that the machine brings, with what only these need."""

LEFT_OUT = (
    *("snakemake-executor-plugin-kubernetes", "snakemake-storage-plugin-s3"),
    *(
        "av",
        "cpm-kernels",
        "cryptography",
        "grpcio",
        "hf-xet",
        "oss2",
        "sentencepiece",
        "tiktoken",
        "transformers-stream-generator",
    ),
    "zstandard",
)
"""Packages that no part of the check imports, with what only these need: plugins for clusters and buckets; what other
packages take along for films, downloads, servers and other models."""

TRIMMED = ("pulp/solverdir/cbc/*", "tensorboard/webfiles.zip", "bin/*")
"""Parts of packages that the check does not use: solvers (the greedy scheduler needs none), a web page, programs."""


def main() -> None:
    """Make the archive of the command line."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as folder:
        site = Path(folder) / "site"
        install(site, options.python)
        trim(site, options.cuda)
        for name, size in sorted(sizes(site).items(), key=lambda one: -one[1]):
            print(f"{size / 1e6:8.1f} MB  {name}")
        write_archive(site, options.out)
    print(
        f"\n{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, with these packages and the files of this "
        "checkout.\n\nCopy it to the machine, and run there:\n\n"
        f"  tar -xf {options.out.name}\n"
        "  export PYTHONPATH=$PWD/site TMPDIR=/dev/shm\n"
        "  make -C vlmflow gpu-check SHAPE=8b MINUTES=8 OUT=$PWD/out\n\n"
        "or, without make, in place of the last line:\n\n"
        "  python3 vlmflow/tests/gpu/gpu_check.py --shape 8b --minutes 8 --out out"
    )


def locked() -> dict[str, tuple[str, set[str]]]:
    """Return the entries of envs/train.lock by name: the text, and which packages need it; none for one of our own.

    A package may have an entry for each of several Pythons; they are one text here.
    """
    found: dict[str, tuple[str, set[str]]] = {}
    for entry in re.split(r"(?m)^(?=\w)", (ROOT / "envs" / "train.lock").read_text())[1:]:
        name = entry.partition("==")[0].partition("[")[0]
        text, needed_by = found.get(name, ("", set()))
        # As uv writes it: `# via NAME`, or a line for each name behind `# via`.
        via = set(re.findall(r"(?m)^    #(?: via|  ) *(\S+)$", entry))
        found[name] = text + entry, needed_by | via
    return found


def wanted() -> str:
    """Return the part of envs/train.lock that the archive has."""
    entries = locked()
    without = {*OF_THE_MACHINE, *LEFT_OUT}
    while more := {name for name, (_, by) in entries.items() if name not in without and by and by <= without}:
        without |= more
    return "".join(text for name, (text, _) in entries.items() if name not in without)


def install(site: Path, python: str, *options: str) -> str:
    """Install what is wanted for a Python on Linux into a folder, and return what uv says.

    Raises CalledProcessError if a package has no file for it.
    """
    lock = site.with_suffix(".lock")
    lock.write_text(wanted())
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--no-deps", "--require-hashes", *options]
    place = ["--target", site, "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    done = subprocess.run([*uv, *place, "-r", lock], check=True, text=True, stderr=subprocess.PIPE)
    return done.stderr


def trim(site: Path, cuda: str) -> None:
    """Remove what the check does not use: TRIMMED, compiled Python, and bitsandbytes for other CUDAs."""
    for file in [file for pattern in (*TRIMMED, "**/__pycache__") for file in site.glob(pattern)]:
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    libraries = set(site.glob("bitsandbytes/libbitsandbytes_*.so"))
    kept = {library for library in libraries if library.stem.endswith(("_cpu", f"_cuda{cuda.replace('.', '')}"))}
    if len(kept) < 2:
        known = sorted(library.stem.partition("_cuda")[2] for library in libraries if "_cuda" in library.stem)
        sys.exit(f"gpu-pack: bitsandbytes has no library for CUDA {cuda}; it has: {', '.join(known)}")
    for library in libraries - kept:
        library.unlink()


def sizes(site: Path) -> dict[str, int]:
    """Return the bytes of each folder and file of the packages, by name; information on packages counts as one."""
    found: dict[str, int] = {}
    for file in site.rglob("*"):
        if file.is_file():
            top = file.relative_to(site).parts[0]
            name = "*.dist-info" if top.endswith(".dist-info") else top
            found[name] = found.get(name, 0) + file.stat().st_size
    return found


def write_archive(site: Path, out: Path) -> None:
    """Write the tracked files as vlmflow/, with the commit in vlmflow/COMMIT, and the packages as site/."""
    git = ["git", "-C", str(ROOT)]
    tracked = subprocess.run([*git, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    commit = subprocess.run([*git, "describe", "--always", "--dirty"], check=True, capture_output=True).stdout
    (site.parent / "COMMIT").write_bytes(commit)
    with tarfile.open(out, "w:xz", preset=2) as archive:
        for name in _that_exist(tracked.split("\0")[:-1]):
            archive.add(ROOT / name, f"vlmflow/{name}", recursive=False)
        archive.add(site.parent / "COMMIT", "vlmflow/COMMIT")
        archive.add(site, "site")


def _that_exist(names: Iterable[str]) -> list[str]:
    return [name for name in names if (ROOT / name).exists()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pack.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("vlmflow-gpu.tar.xz"), help="the archive (%(default)s)")
    parser.add_argument("--python", default="3.12", help="the machine's version (%(default)s)")
    parser.add_argument("--cuda", default="13.0", help="that of the machine's torch (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
