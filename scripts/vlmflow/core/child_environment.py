"""The environment of the programs that stages start: an allow-list of this process's own variables.

The libraries of a training read hundreds of variables. Some change what is trained (SPATIAL_MERGE_SIZE, MAX_PIXELS),
and no digest covers them; others are left over from another program (RANK, MASTER_ADDR).
"""

import os
from fnmatch import fnmatchcase

from vlmflow.core.keys import SECRETS

NAMED = "VLMFLOW_ENVIRONMENT"
"""The variable with the names of the configuration's key `environment`."""

THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

KEPT = (
    # Who this is, where programs, libraries and free space are, and how texts are shown.
    *("HOME", "USER", "LOGNAME", "PATH", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("LANG", "LC_*", "PYTHONUTF8", "TZ"),
    # Which GPUs there are, and how they reach each other.
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_*"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*", "TORCH_NCCL_*", "GLOO_*", "UCX_*"),
    *("FI_*", "OFI_*", "RDMAV_*", "MLX5_*", "OMPI_MCA_*"),
    # Compilers of kernels, and where these are kept.
    *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "DS_SKIP_CUDA_CHECK"),
    *("TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH"),
    *("TORCH_CUDA_ARCH_LIST", "MAX_JOBS"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    # Memory and cores.
    *("MALLOC_*", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY", *THREADS_OF_LIBRARIES),
    "VLMFLOW_*",
)
"""The variables that every program gets: names, or beginnings of names before a `*`."""


def child_environment(*also: str) -> dict[str, str]:
    """Return the environment of a program: this process's variables of KEPT, of the configuration, and those of `also`.

    A key of a server passes only by its own name. Python imports nothing from the working directory, where other pods
    may write.
    """
    patterns = (*KEPT, *os.environ.get(NAMED, "").split(), *also)
    given = {name: value for name, value in os.environ.items() if _passes(name, patterns)}
    return given | {"PYTHONSAFEPATH": "1"}


def _passes(name: str, patterns: tuple[str, ...]) -> bool:
    return name in patterns or (name not in SECRETS and any(fnmatchcase(name, pattern) for pattern in patterns))
