"""What NetworkPolicies allow, by the API's rules: the network of the tests' cluster does not enforce them.

https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network

End = Mapping[str, str] | str
"""An end of a connection: the labels of a pod in the policies' namespace, or the address of anything else."""

PEERS = {"Egress": "to", "Ingress": "from"}


def allowed(policies: list[dict], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Return whether the policies of one namespace allow a connection: both ends must.

    Raises ValueError for a peer or an operator that no policy of ours uses.
    """
    ends = (("Egress", source, target), ("Ingress", target, source))
    return all(_end_allows(policies, *end, port, protocol) for end in ends)


def _end_allows(policies: list[dict], direction: str, own: End, other: End, port: int, protocol: str) -> bool:
    if isinstance(own, str):
        return True
    specs = [policy["spec"] for policy in policies]
    selecting = [spec for spec in specs if direction in spec["policyTypes"] and _selects(spec["podSelector"], own)]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    # A pod that no policy selects may do everything. So may a rule for what it does not restrict.
    return not selecting or any(
        (not rule.get(PEERS[direction]) or any(_is_peer(peer, other) for peer in rule[PEERS[direction]]))
        and (not rule.get("ports") or any(_is_port(each, port, protocol) for each in rule["ports"]))
        for rule in rules
    )


def _is_peer(peer: dict, end: End) -> bool:
    match peer, list(peer):
        case {"podSelector": selector}, [_]:
            return not isinstance(end, str) and _selects(selector, end)
        case {"ipBlock": block}, [_]:
            return isinstance(end, str) and _is_in([block["cidr"]], end) and not _is_in(block.get("except", []), end)
    raise ValueError(f"not evaluated: the peer {peer}")


def _is_in(ranges: list[str], address: str) -> bool:
    return any(ip_address(address) in ip_network(each) for each in ranges)


def _is_port(given: dict, port: int, protocol: str) -> bool:
    first = given.get("port", port)
    return given.get("protocol", "TCP") == protocol and first <= port <= given.get("endPort", first)


def _selects(selector: dict, labels: Mapping[str, str]) -> bool:
    fits = [_fits(each, labels) for each in selector.get("matchExpressions", [])]
    return all(fits) and selector.get("matchLabels", {}).items() <= labels.items()


def _fits(expression: dict, labels: Mapping[str, str]) -> bool:
    match expression["operator"]:
        case "Exists":
            return expression["key"] in labels
        case "DoesNotExist":
            return expression["key"] not in labels
    raise ValueError(f"not evaluated: {expression}")
