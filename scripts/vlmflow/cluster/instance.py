"""Whose vlmflow it is in a namespace that several people share: a suffix of names, and a label.

The environment variable VLMFLOW_INSTANCE says it, on a person's side and in the controller (k8s/base/controller.yaml);
without it there is one vlmflow in the namespace, whose objects have neither. k8s/components/instance sets both.
"""

import os
import re

from vlmflow.core.errors import VlmflowError

VARIABLE = "VLMFLOW_INSTANCE"
LABEL = "app.kubernetes.io/instance"
PART_OF = "app.kubernetes.io/part-of=vlmflow"


def instance() -> str:
    """Give the name of the instance, empty for the one without.

    Raises VlmflowError where it could be no part of an object's name.
    """
    name = os.environ.get(VARIABLE, "")
    if name and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", name):
        what = f"{VARIABLE} is {name!r}, which is no name of at most 30 small letters, digits and dashes"
        raise VlmflowError(
            what, f"unset {VARIABLE}, or export {VARIABLE}=NAME as your copy of k8s/components/instance has it"
        )
    return name


def named(name: str) -> str:
    """Give the name that an object of k8s/ has in this instance."""
    return f"{name}-{instance()}" if instance() else name


def short(name: str) -> str:
    """Give the name that an object has in k8s/."""
    return name.removesuffix(f"-{instance()}") if instance() else name


def labels() -> dict[str, str]:
    """Give the labels by which objects are this instance's."""
    return {LABEL: instance()} if instance() else {}


def selector() -> str:
    """Give the selector of this instance's objects, and of no other's."""
    return f"{PART_OF},{LABEL}={instance()}" if instance() else f"{PART_OF},!{LABEL}"
