"""GPU products, by the name in `runs.NAME.gpu`: what the estimate needs of each, from NVIDIA's data sheets.

Memory and rates are in bytes and seconds, with NVIDIA's decimal prefixes: 80 GB are 80 · 10⁹ bytes. A driver reports up
to 7 % more than that (an H100 of 80 GB: 85 · 10⁹), so that the estimate errs to the safe side. Rates of matrix products
are dense, where data sheets show twice as much with sparsity; for GeForce, with accumulation in float32.
"""

from dataclasses import dataclass

ASSUMED = 0.2, 0.4
"""Shares of `flops` on products that nobody has measured; PaLM's paper (arXiv:2204.02311, table 3) lists 0.21 to 0.46.
"""

A100, H100 = (0.38, 0.55), (0.27, 0.35)
"""Measured shares, of trainings with more than 1,000 tokens in a batch, by the operations that the estimate counts."""

PCIE_4, PCIE_5 = 32e9, 64e9
"""Bytes per second in one direction over 16 lanes."""


@dataclass(frozen=True)
class Gpu:
    """One product.

    memory: bytes. flops: dense bfloat16 operations per second. bandwidth: bytes per second of its memory. link: bytes
    per second that it receives from other GPUs of its machine, at most. source: NVIDIA's document with these figures.
    measured: the lowest and the highest share of `flops` that trainings reached on it (docs/benchmarks.md, "On a GPU");
    None if none is known.
    """

    name: str
    title: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    source: str
    measured: tuple[float, float] | None = None

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of `flops` to count with, a low and a high one."""
        return self.measured or ASSUMED


_ALL = (
    Gpu("rtx-3090", "GeForce RTX 3090", 24 * 10**9, 71e12, 936e9, PCIE_4, "GA102 architecture white paper, V2.1"),
    Gpu("rtx-4090", "GeForce RTX 4090", 24 * 10**9, 165.2e12, 1008e9, PCIE_4, "Ada architecture white paper, V2.1"),
    Gpu("a10", "A10", 24 * 10**9, 125e12, 600e9, PCIE_4, "A10 data sheet"),
    Gpu("l4", "L4", 24 * 10**9, 121e12, 300e9, PCIE_4, "L4 data sheet"),
    Gpu("rtx-5090", "GeForce RTX 5090", 32 * 10**9, 209.5e12, 1792e9, PCIE_5, "RTX Blackwell architecture white paper"),
    Gpu("a100-40gb", "A100 SXM 40 GB", 40 * 10**9, 312e12, 1555e9, 300e9, "A100 data sheet"),
    Gpu("a40", "A40", 48 * 10**9, 149.7e12, 696e9, PCIE_4, "A40 data sheet"),
    Gpu("l40s", "L40S", 48 * 10**9, 362e12, 864e9, PCIE_4, "L40S data sheet"),
    Gpu("a100-80gb", "A100 SXM 80 GB", 80 * 10**9, 312e12, 2039e9, 300e9, "A100 data sheet", A100),
    Gpu("h100-pcie", "H100 PCIe 80 GB", 80 * 10**9, 756e12, 2000e9, PCIE_5, "H100 data sheet"),
    Gpu("h100", "H100 SXM 80 GB", 80 * 10**9, 989e12, 3350e9, 450e9, "H100 data sheet", H100),
    Gpu("h200", "H200 SXM 141 GB", 141 * 10**9, 989e12, 4800e9, 450e9, "H200 data sheet"),
    Gpu("b200", "B200 SXM 180 GB", 180 * 10**9, 2250e12, 7700e9, 900e9, "HGX B200 data sheet"),
)

GPUS = {gpu.name: gpu for gpu in _ALL}
"""All products, by name; those with less memory first."""


def meaning() -> str:
    """Return what `runs.NAME.gpu` is, for docs/config.md."""
    return (
        "The GPU product that it trains on, for the estimate (reports/estimate-RUN.html); with null that shows all "
        "products, and refuses nothing. Names and figures: scripts/vlmflow/config/gpus.py."
    )
