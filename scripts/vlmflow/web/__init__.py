"""Bytes from the network: the hub, other servers, and downloads that are resumed."""
