"""The least that any converter must do: split a file into rows, decode each with its type and encode it, on all cores.

Run in its own process: python tests/bench/limit.py FORM FOLDER CORES; it prints the seconds of the work.
FORM is fire, volcano or any (rows without a type); with the suffix `-unwritten` the rows are not written.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from vlmflow.core.files import whole_file
from vlmflow.core.processes import ordered_map
from vlmflow.raw.split import RawRows, open_rows
from vlmflow.rows.chat import Turn
from vlmflow.rows.convert import SHARD_BYTES
from vlmflow.rows.forms.fire import RawRow


class VolcanoRow(msgspec.Struct, gc=False):
    """A raw row of Volcano, fully typed."""

    id: str
    conversations: list[Turn]
    image: str | None = None


ROWS_OF = {"fire": RawRow, "volcano": VolcanoRow, "any": Any}


def command(form: str, folder: Path, cores: int) -> list[str]:
    """Return the command line that measures FORM on the rows of `folder`/train.json."""
    return [sys.executable, __file__, form, str(folder), str(cores)]


def go(form: str, folder: Path, cores: int) -> None:
    """Split, decode and encode; write, or discard."""
    form, _, unwritten = form.partition("-")
    decoder, encoder = msgspec.json.Decoder(ROWS_OF[form]), msgspec.json.Encoder()

    def again(rows: RawRows, shard: range) -> bytes:
        return encoder.encode_lines([decoder.decode(row) for row in rows.of(shard)])

    with open_rows([folder / "train.json"], "train") as rows:
        shards = ordered_map(partial(again, rows), rows.shards(SHARD_BYTES), cores)
        if unwritten:
            for _ in shards:
                pass
            return
        with whole_file(folder / "limit.jsonl") as out:
            for lines in shards:
                out.write(lines)


if __name__ == "__main__":
    begun = time.perf_counter()
    go(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    print(time.perf_counter() - begun)
