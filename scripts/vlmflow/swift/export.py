"""ms-swift's `export` in a separate process, which runs no Python from the model's folder.

python -m vlmflow.swift.export [swift arguments]
"""

import os
import sys

from vlmflow.core.process import die_with_parent
from vlmflow.swift.no_remote_code import refuse_remote_code
from vlmflow.swift.quick_imports import quick_imports
from vlmflow.swift.row_encoder import encode_rows_as_served
from vlmflow.swift.row_reader import read_rows_by_type


def main() -> None:
    """Export with the arguments of the command line."""
    die_with_parent(os.getppid())
    with quick_imports():
        refuse_remote_code()
        read_rows_by_type()
        encode_rows_as_served()
        from swift.pipelines import export_main

    export_main(sys.argv[1:])


if __name__ == "__main__":
    main()
