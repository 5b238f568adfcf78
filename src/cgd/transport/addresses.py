"""Addresses: how they are written, where to listen for one, and which one we follow a peer to."""

from __future__ import annotations

import ipaddress
import re

from cgd.errors import InputError

LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"{LABEL}(\.{LABEL})*")
ADDRESS = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]+):([1-9][0-9]{0,4})")


def host_and_port(address: object) -> tuple[str, int]:
    """Return where an address leads, written in one way only.

    Raises:
        InputError: it is no address that others can reach.

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
    """Return where to connect to a peer that says that it is at `claimed`.

    A peer must not send us to a machine of somebody else's. So it is either the host that the federation file lists for
    it, or the one that its own authenticated connection comes from; the port is its choice. A name is not looked up:
    we connect to where its connection comes from.

    Args:
        claimed: what the peer says.
        listed: its address in the federation file.
        source: the IP address that its connection comes from.

    Raises:
        InputError: it is another host, or no address.

    Examples:
        >>> new_address("tcp://a.example:7005", "tcp://a.example:7001", "192.0.2.7")
        'tcp://a.example:7005'
        >>> new_address("tcp://moved.example:7001", "tcp://a.example:7001", "::ffff:192.0.2.7")
        'tcp://192.0.2.7:7001'
    """
    host, port = host_and_port(claimed)
    if host == host_and_port(listed)[0]:
        return claimed
    origin = _plain(source)
    if _is_ip(host) and host != origin:
        raise InputError(
            f"it says that it is at {claimed}, and its connection comes from {origin}; if it has moved there, put that "
            "address into the federation file"
        )
    return f"tcp://[{origin}]:{port}" if ":" in origin else f"tcp://{origin}:{port}"


def listening_address(address: str) -> str:
    """Return where to bind for an address that others connect to: this machine if it is a loopback, else everywhere.

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
    # Nobody can connect to 0.0.0.0, and a zone (%eth0) means something on one machine only.
    return None if ip.is_unspecified or "%" in text else str(ip)


def _is_ip(host: str) -> bool:
    return ":" in host or not host.strip("0123456789.")


def _plain(source: str) -> str:
    """Write an IP address in one way only; a socket for both versions reports IPv4 as ::ffff:192.0.2.7."""
    ip = ipaddress.ip_address(source)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)
