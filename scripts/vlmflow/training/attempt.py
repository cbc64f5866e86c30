"""What the environment of a pod says about the attempt that it belongs to, if its training has several nodes."""

ATTEMPT, NODE_0 = "VLMFLOW_ATTEMPT", "VLMFLOW_NODE_0"
"""The variables with the attempt's name, and with the host name of node 0. Without them all nodes are this machine."""

PORT = 29500
"""Where the nodes of a cluster meet: torchrun's own default."""
