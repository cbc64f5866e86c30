"""Everything that a full run of the cluster's tests needs, built at the start in parallel."""

from concurrent.futures import ThreadPoolExecutor

from cluster import images, machine
from cluster.binaries import PROGRAMS, binary


def build() -> None:
    """Build the programs and images that the cache lacks; takes a second if it lacks none.

    Compilers keep the cores busy while the images' builds wait for downloads and the disk.
    """
    machine.prepare()
    with ThreadPoolExecutor() as pool:
        programs = pool.submit(lambda: [binary(name) for name in PROGRAMS])
        images_built = pool.submit(lambda: [images.project_image(target) for target in images.TARGETS])
        programs.result()
        images_built.result()
