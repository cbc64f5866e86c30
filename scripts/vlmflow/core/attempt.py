"""What the pods of a training on several nodes agree on: variables, the program of the other nodes, and a port."""

ATTEMPT, NODE_0 = "VLMFLOW_ATTEMPT", "VLMFLOW_NODE_0"
"""The variables with the attempt's name, and with the host name of node 0. Without them all nodes are this machine."""

OTHER_NODE = "vlmflow.supervisor.other_node"
"""The module that runs on every node but node 0."""

PORT = 29500
"""Where the nodes of a cluster meet: torchrun's own default."""

PORT_OF = "VLMFLOW_PORT"
"""The variable with another port, where nodes may be shared with other trainings."""
