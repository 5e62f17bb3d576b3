"""Where a notification may go: the form of a hook's URL, and the policy on the addresses behind its host."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Literal, TypeAlias

from attrs import field, frozen

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

Resolver: TypeAlias = Callable[[str], Iterable[str]]
"""Turns a host name into the texts of its addresses; raises ``OSError`` when it has none."""

MAX_URL_BYTES: Final = 2048
"""The longest URL of a hook, in bytes."""

_DEFAULT_PORTS: Final = {"https": 443, "http": 80}


class TargetRefused(ValueError):
    """A hook's URL, or an address behind it, is one that is never called. It is not tried again.

    The text names the host at most, never the path or the query.
    """


class HostUnresolved(OSError):
    """A host name has no address now. It may have one later."""


@frozen
class Target:
    """A hook's URL, taken apart; one that exists has an acceptable form.

    :param scheme: ``https``, or ``http`` where the operator allows it.
    :param host: lower case, without brackets or a final dot; an address or an ASCII name.
    :param port: 1 to 65535.
    :param path: the path and the query, as they go into the request line. Not shown by ``repr``.
    """

    scheme: str
    host: str
    port: int
    path: str = field(repr=False)

    @property
    def literal(self) -> Address | None:
        """The address, where the host is one."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """What goes into the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


_URL: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>[^#]*)(?:#.*)?", re.ASCII
)
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?", re.ASCII)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
# Whatever ends in such a label is taken for an IPv4 address by one resolver or another.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)


def parse_target(url: str, *, allow_http: bool = False) -> Target:
    """Take a hook's URL apart, or refuse it.

    One spelling for each host: printable ASCII only, international names in their ``xn--`` form, IPv4
    addresses as four decimal numbers, IPv6 addresses without a zone. A fragment is dropped.

    :param url: as it is stored.
    :param allow_http: whether ``http`` is accepted beside ``https``.
    :raises TargetRefused: the URL has another form, no host, user information, a port outside 1 to 65535,
        or more than 2048 bytes.

    Source: wake chain, "Delivery of a notification", address policy.
    """
    if len(url) > MAX_URL_BYTES:
        raise TargetRefused(f"the URL is longer than {MAX_URL_BYTES} bytes")
    if not all("!" <= character <= "~" for character in url) or "\\" in url:
        raise TargetRefused(
            "the URL has white space, a control character, a backslash or a character outside ASCII;"
            " write an international host in its xn-- form, and the rest percent-encoded"
        )
    parts = _URL.fullmatch(url)
    if parts is None:
        raise TargetRefused("the URL is not https:// and a host")
    scheme = parts["scheme"].lower()
    if scheme not in (("https", "http") if allow_http else ("https",)):
        raise TargetRefused(
            "the URL's scheme is not https"
            + ("; the operator does not allow http" if scheme == "http" else "")
        )
    if "@" in parts["authority"]:
        raise TargetRefused("the URL has user information before its host")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None:
        raise TargetRefused("the URL's host and port are not of the form host:port")
    port = int(authority["port"] or _DEFAULT_PORTS[scheme])
    if not 1 <= port <= 65535:
        raise TargetRefused(f"the URL's port {port} is not between 1 and 65535")
    path = parts["path"]
    return Target(scheme, _host(authority["host"]), port, path if path.startswith("/") else "/" + path)


def _host(text: str) -> str:
    text = text.lower()
    if text.startswith("["):
        try:
            if "%" in text:
                raise ValueError
            return IPv6Address(text[1:-1]).compressed
        except ValueError:
            raise TargetRefused("the URL's host is in brackets but no IPv6 address without a zone") from None
    name = text.removesuffix(".")
    labels = name.split(".")
    if not name:
        raise TargetRefused("the URL has no host")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return IPv4Address(name).compressed
        except ValueError:
            raise TargetRefused("the URL's host is an IPv4 address but not four decimal numbers") from None
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise TargetRefused("the URL's host is not a host name in ASCII")
    return name


AddressClass: TypeAlias = Literal[
    "unspecified", "multicast", "loopback", "link-local", "private", "unique-local", "carrier-grade NAT",
    "embedded IPv4", "reserved", "documentation", "benchmarking", "cloud platform",
]  # fmt: skip

OPENED_IF_COVERED: Final = frozenset[AddressClass](("private", "unique-local", "carrier-grade NAT"))
"""What an entry of the operator's allow list opens by covering the address, however wide it is."""

OPENED_IF_INSIDE: Final = frozenset[AddressClass](("loopback", "link-local"))
"""What is opened only by an entry that lies wholly inside the range, so that 0.0.0.0/0 opens neither."""

_TABLE: Final[tuple[tuple[str, AddressClass, str], ...]] = (
    ("0.0.0.0/8", "unspecified", "RFC 791: this host on this network; Linux connects 0.0.0.0 to itself"),
    ("10.0.0.0/8", "private", "RFC 1918"),
    ("100.64.0.0/10", "carrier-grade NAT", "RFC 6598; some clouds serve metadata at 100.100.100.200"),
    ("127.0.0.0/8", "loopback", "RFC 1122"),
    ("168.63.129.16/32", "cloud platform", "Azure's host agent: a public address only in name"),
    ("169.254.0.0/16", "link-local", "RFC 3927; clouds serve instance credentials at 169.254.169.254"),
    ("172.16.0.0/12", "private", "RFC 1918"),
    ("192.0.0.0/24", "reserved", "RFC 6890: protocol assignments; a cloud's metadata at 192.0.0.192"),
    ("192.0.2.0/24", "documentation", "RFC 5737"),
    ("192.88.99.0/24", "reserved", "RFC 7526: the retired 6to4 relays"),
    ("192.168.0.0/16", "private", "RFC 1918"),
    ("198.18.0.0/15", "benchmarking", "RFC 2544"),
    ("198.51.100.0/24", "documentation", "RFC 5737"),
    ("203.0.113.0/24", "documentation", "RFC 5737"),
    ("224.0.0.0/4", "multicast", "RFC 5771"),
    ("240.0.0.0/4", "reserved", "RFC 1112: class E, and the broadcast address"),
    ("::/128", "unspecified", "RFC 4291"),
    ("::1/128", "loopback", "RFC 4291"),
    ("::/96", "embedded IPv4", "RFC 4291: IPv4-compatible"),
    ("::ffff:0:0/96", "embedded IPv4", "RFC 4291: IPv4-mapped"),
    ("::ffff:0:0:0/96", "embedded IPv4", "RFC 2765: IPv4-translated, SIIT"),
    ("64:ff9b::/96", "embedded IPv4", "RFC 6052: NAT64"),
    ("64:ff9b:1::/48", "embedded IPv4", "RFC 8215: NAT64 for local use"),
    ("2001::/32", "embedded IPv4", "RFC 4380: Teredo"),
    ("2001:2::/48", "benchmarking", "RFC 5180"),
    ("2001::/23", "reserved", "RFC 2928: protocol assignments"),
    ("2001:db8::/32", "documentation", "RFC 3849"),
    ("2002::/16", "embedded IPv4", "RFC 3056: 6to4"),
    ("3fff::/20", "documentation", "RFC 9637"),
    ("fc00::/7", "unique-local", "RFC 4193"),
    ("fe80::/10", "link-local", "RFC 4291"),
    ("ff00::/8", "multicast", "RFC 4291"),
)
# The first range that holds an address classifies it. Python's own is_global lets some of them through.
_RANGES: Final = tuple((ip_network(cidr), kind) for cidr, kind, _ in _TABLE)
_GLOBAL_UNICAST: Final = ip_network("2000::/3")
# An interface identifier of 0000:5efe or 0200:5efe and an IPv4 address, under any prefix (RFC 5214).
_ISATAP: Final = 0x00005EFE
_ISATAP_MASK: Final = 0xFDFFFFFF


def address_class(address: Address) -> AddressClass | None:
    """Return what kind of special address this is, or ``None`` for one that is public.

    IPv6 addresses outside 2000::/3 are never public, whatever is assigned there one day.
    """
    if isinstance(address, IPv6Address) and int(address) >> 32 & _ISATAP_MASK == _ISATAP:
        return "embedded IPv4"
    for network, kind in _RANGES:
        if address in network:
            return kind
    return "reserved" if address.version == 6 and address not in _GLOBAL_UNICAST else None


def _networks(cidrs: Iterable[str | Network]) -> tuple[Network, ...]:
    if isinstance(cidrs, str):
        raise TypeError(f"allow_cidrs={cidrs!r} is one text; give a list of CIDRs")
    networks = []
    for cidr in cidrs:
        try:
            networks.append(ip_network(cidr))
        except ValueError as error:
            raise ValueError(f"allow_cidrs holds {cidr!r}, which is no CIDR: {error}") from None
    return tuple(networks)


def _sockets(listening: Iterable[tuple[str, int]]) -> tuple[tuple[Address, int], ...]:
    return tuple((ip_address(host), port) for host, port in listening)


@frozen
class TargetPolicy:
    """Which hook URLs may be called: the same when a hook is made and before each attempt.

    :param allow_http: accept ``http`` beside ``https``.
    :param allow_cidrs: what the operator opens. An entry opens the private, unique-local and carrier-grade
        NAT addresses it covers. Loopback and link-local addresses are opened only by an entry wholly inside
        their range. Nothing opens the unspecified, multicast, reserved, or IPv4-embedding addresses.
    :param listening: the addresses and ports this process listens on, which no hook may name and no entry
        opens. Address 0.0.0.0 or :: stands for each address of this machine.
    :raises ValueError: an entry is no CIDR, or an address is none.

    Source: wake chain, "Delivery of a notification", address policy.
    """

    allow_http: bool = False
    allow_cidrs: tuple[Network, ...] = field(default=(), converter=_networks)
    listening: tuple[tuple[Address, int], ...] = field(default=(), converter=_sockets)

    def target(self, url: str) -> Target:
        """Take a URL apart and check all that can be checked without resolving its host.

        :raises TargetRefused: its form or its literal address is refused.
        """
        target = parse_target(url, allow_http=self.allow_http)
        if target.literal is not None:
            self.check(target, [target.host])
        return target

    def check(self, target: Target, addresses: Iterable[str]) -> tuple[Address, ...]:
        """Return the addresses to dial, each checked; one that is refused refuses all of them.

        :param addresses: what the target's host resolved to just now, as texts.
        :raises TargetRefused: one of them is refused, or is no address.
        :raises HostUnresolved: there is none.
        """
        checked: dict[Address, None] = {}
        for text in addresses:
            try:
                address = ip_address(text)
            except ValueError:
                raise TargetRefused(f"{target.host} resolves to something that is no address") from None
            refusal = self.refusal(address, target.port)
            if refusal is not None:
                raise TargetRefused(f"{target.host} is, or resolves to, {refusal}")
            if _is_localhost(target.host) and address_class(address) != "loopback":
                raise TargetRefused(f"{target.host} does not resolve to this machine")
            checked[address] = None
        if not checked:
            raise HostUnresolved(f"{target.host} has no address")
        return tuple(checked)

    def refusal(self, address: Address, port: int) -> str | None:
        """Return why this address and port are not called, or ``None`` if they may be."""
        if getattr(address, "scope_id", None):
            return "an address with a zone"
        if any(port == own_port and _same(address, own) for own, own_port in self.listening):
            return "an address this process listens on"
        kind = address_class(address)
        if kind is None or self._opened(address, kind):
            return None
        article = "an" if kind[0] in "aeiou" and not kind.startswith("uni") else "a"
        return f"{article} {kind} address"

    def _opened(self, address: Address, kind: AddressClass) -> bool:
        covering = [network for network in self.allow_cidrs if address in network]
        if kind in OPENED_IF_COVERED:
            return bool(covering)
        if kind in OPENED_IF_INSIDE:
            (whole,) = (network for network, _ in _RANGES if address in network and _ == kind)
            return any(network.version == whole.version and network.subnet_of(whole) for network in covering)  # type: ignore[arg-type]
        return False


def resolve(host: str) -> Sequence[str]:
    """Return the addresses of a host name, by the system's resolver. It may block for long.

    :raises OSError: it has none, or no resolver answers.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _is_localhost(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def _same(address: Address, own: Address) -> bool:
    return address == own or (own.is_unspecified and _is_of_this_machine(address))


def _is_of_this_machine(address: Address) -> bool:
    # Connecting a datagram socket sends nothing, and the kernel picks an own address as its own source.
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False
