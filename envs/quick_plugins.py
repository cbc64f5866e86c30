"""Lets Snakemake load what may use Kubernetes or S3 without their clients, which are imported when first used.

Snakemake imports every installed plugin whenever it starts, also for each local job, and smart_open, which knows S3.
The clients are a third of the time of a dry run. quick_plugins.pth, beside this file in an environment's site-packages,
imports it when Python starts (https://docs.python.org/3/library/site.html). Without it everything works, more slowly.
"""

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType

CLIENTS = {
    "snakemake_executor_plugin_kubernetes": ("kubernetes", "kubernetes.client", "kubernetes.config"),
    "snakemake_storage_plugin_s3": ("boto3", "botocore", "botocore.exceptions"),
    "smart_open.s3": ("boto3", "botocore", "botocore.client", "botocore.exceptions"),
}
"""By module, what it imports at its beginning and uses only, or nearly so, in functions."""


class Later(ModuleType):
    """Stands in one module's globals for another, which is imported when an attribute of it is needed."""

    def __getattr__(self, name):
        with out_of_the_way():
            try:
                found = import_module(f"{self.__name__}.{name}")
            except ModuleNotFoundError:
                found = getattr(import_module(self.__name__), name)
        setattr(self, name, found)
        return found


@contextmanager
def out_of_the_way():
    """Hide the stand-ins in this block, so that Python imports what they stand for."""
    hidden = {name: module for name, module in list(sys.modules.items()) if isinstance(module, Later)}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, module in hidden.items():
            sys.modules.setdefault(name, module)


class Modules:
    """Finds these modules as Python does, and runs them with stand-ins, which nobody else sees."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of one of them, else None (importlib.abc.MetaPathFinder)."""
        spec = PathFinder.find_spec(name, path) if name in CLIENTS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_without_clients(module):
                for client in CLIENTS[name]:
                    sys.modules.setdefault(client, Later(client))
                try:
                    run(module)
                finally:
                    for client in CLIENTS[name]:
                        if isinstance(sys.modules.get(client), Later):
                            del sys.modules[client]

            spec.loader.exec_module = run_without_clients
        return spec


sys.meta_path.insert(0, Modules)
