"""The instance of vlmflow, if several people share a namespace: a suffix of names, and a label.

The environment variable VLMFLOW_INSTANCE names it, on a laptop and in the controller (k8s/base/controller.yaml).
Without it the namespace has one vlmflow, whose objects have no suffix and no label. k8s/components/instance sets both.
"""

import os
import re

from vlmflow.core.errors import VlmflowError

VARIABLE = "VLMFLOW_INSTANCE"
LABEL = "app.kubernetes.io/instance"
PART_OF = "app.kubernetes.io/part-of=vlmflow"


def instance() -> str:
    """Return the name of the instance, or "".

    Raises VlmflowError if it cannot be part of an object's name.
    """
    name = os.environ.get(VARIABLE, "")
    if name and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", name):
        what = f"{VARIABLE} is {name!r}, not a name of at most 30 lower-case letters, digits and dashes"
        raise VlmflowError(
            what, f"unset {VARIABLE}, or export {VARIABLE}=NAME with the name in your copy of k8s/components/instance"
        )
    return name


def named(name: str) -> str:
    """Return the name of an object of k8s/ in this instance."""
    return f"{name}-{instance()}" if instance() else name


def short(name: str) -> str:
    """Return the name of an object in k8s/."""
    return name.removesuffix(f"-{instance()}") if instance() else name


def labels() -> dict[str, str]:
    """Return the labels of this instance's objects."""
    return {LABEL: instance()} if instance() else {}


def selector() -> str:
    """Return the selector of this instance's objects, which excludes those of other instances."""
    return f"{PART_OF},{LABEL}={instance()}" if instance() else f"{PART_OF},!{LABEL}"
