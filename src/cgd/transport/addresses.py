"""Addresses of participants: parsing, the address to bind, and checks of the address that a peer reports."""

from __future__ import annotations

import ipaddress
import re

from cgd.errors import InputError

LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"{LABEL}(\.{LABEL})*")
ADDRESS = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]+):([1-9][0-9]{0,4})")


def host_and_port(address: object) -> tuple[str, int]:
    """Return the host and the port of an address, in canonical form.

    Raises:
        InputError: it is not an address that others can reach.

    Examples:
        >>> host_and_port("tcp://[2001:DB8:0::1]:7001")
        ('2001:db8::1', 7001)
    """
    found = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    host = _host(found[1]) if found and int(found[2]) < 2**16 else None
    if found is None or host is None:
        raise InputError(
            f"address is {address!r}; write where the others reach it, tcp://HOST:PORT, with a port from 1 to 65535, "
            "an IPv6 host in brackets, such as tcp://hospital-a.example:7001"
        )
    return host, int(found[2])


def new_address(claimed: str, listed: str, source: str) -> str:
    """Return the address at which to connect to a peer that reports the address `claimed`.

    A peer must not redirect us to a machine that is not its own. So the host is either the one that the federation file
    lists for it, or the source of its own authenticated connection; the port is its choice. A host name is not
    resolved: we connect to the source of its connection.

    Args:
        claimed: the address that the peer reports.
        listed: its address in the federation file.
        source: the IP address from which its connection comes.

    Raises:
        InputError: it is another host, or not an address.

    Examples:
        >>> new_address("tcp://a.example:7005", "tcp://a.example:7001", "192.0.2.7")
        'tcp://a.example:7005'
        >>> new_address("tcp://moved.example:7001", "tcp://a.example:7001", "::ffff:192.0.2.7")
        'tcp://192.0.2.7:7001'
    """
    host, port = host_and_port(claimed)
    if host == host_and_port(listed)[0]:
        return claimed
    source_ip = _canonical_ip(source)
    if _is_ip(host) and host != source_ip:
        raise InputError(
            f"it reports the address {claimed}, and its connection comes from {source_ip}; if it has moved there, put "
            "that address into the federation file"
        )
    return f"tcp://[{source_ip}]:{port}" if ":" in source_ip else f"tcp://{source_ip}:{port}"


def listening_address(address: str) -> str:
    """Return the address to bind for an address that others connect to: loopback only, or all interfaces.

    Examples:
        >>> listening_address("tcp://hospital-a.example:7001")
        'tcp://*:7001'
        >>> listening_address("tcp://127.0.0.1:7001")
        'tcp://127.0.0.1:7001'
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return address.replace("localhost", "127.0.0.1") if loopback else f"tcp://*:{port}"


def _host(text: str) -> str | None:
    try:
        if text.startswith("["):
            ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv6Address(text[1:-1])
        elif text.strip("0123456789."):
            return text.lower() if HOST.fullmatch(text) else None
        else:
            ip = ipaddress.IPv4Address(text)
    except ValueError:
        return None
    # 0.0.0.0 cannot be connected to, and a zone (%eth0) has a meaning on one machine only.
    return None if ip.is_unspecified or "%" in text else str(ip)


def _is_ip(host: str) -> bool:
    return ":" in host or not host.strip("0123456789.")


def _canonical_ip(source: str) -> str:
    """Return an IP address in canonical form; a dual-stack socket reports IPv4 as ::ffff:192.0.2.7."""
    ip = ipaddress.ip_address(source)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)
