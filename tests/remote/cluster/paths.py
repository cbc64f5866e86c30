"""Where the tests' cluster keeps what it built and what it runs, and the addresses it uses."""

import os
from pathlib import Path

SOURCES = Path(__file__).parent
PROJECT = SOURCES.parents[2]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmflow" / "cluster"
STATE = CACHE / "state"
"""What lives only while the cluster runs: keys, logs, sockets, etcd's and the kubelets' folders."""
KUBECONFIG = STATE / "admin.kubeconfig"

# The machine reaches nodes and pods over one link of its own; all else is in the nodes' network namespaces.
LINK = "vlmflow0"
MACHINE_ADDRESS = "10.231.0.254"
NODE_ADDRESSES = {"node-a": "10.231.0.1", "node-b": "10.231.0.2"}
POD_RANGES = {"node-a": ("10.231.0.10", "10.231.0.119"), "node-b": ("10.231.0.120", "10.231.0.229")}
POD_NETWORK = "10.231.0.0/24"
SERVICE_NETWORK = "10.232.0.0/24"
API_SERVICE_ADDRESS = "10.232.0.1"
DNS_SERVICE_ADDRESS = "10.232.0.10"
API_URL = f"https://{NODE_ADDRESSES['node-a']}:6443"
