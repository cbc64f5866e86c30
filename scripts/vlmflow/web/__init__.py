"""Network access: the hub, other servers, and resumed downloads."""
