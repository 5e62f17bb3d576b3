from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from switchboard_stall.notify.target import (
    _RANGES,
    HostUnresolved,
    TargetPolicy,
    TargetRefused,
    address_class,
    parse_target,
)

STRICT = TargetPolicy()
PUBLIC = "93.184.216.34"
PUBLIC6 = "2606:2800:220:1:248:1893:25c8:1946"

LOOPBACK_SPELLINGS = [
    "https://127.0.0.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0X7F000001/",
    "https://017700000001/",
    "https://0177.0.0.1/",
    "https://0x7f.0.0.1/",
    "https://0x7f.1/",
    "https://127.1/",
    "https://127.0.1/",
    "https://127.0.0.01/",
    "https://127.0.0.1./",
    "https://127.0.0.1../",
    "https://127.000.000.001/",
    "https://127.0.0.1.0/",
    "https://0/",
    "https://0x/",
    "https://[::1]/",
    "https://[0:0:0:0:0:0:0:1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[0:0:0:0:0:FFFF:127.0.0.1]/",
    "https://[::127.0.0.1]/",
    "https://[::ffff:0:127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::127.0.0.1]/",
    "https://[64:ff9b:1::7f00:1]/",
    "https://[2002:7f00:1::]/",
    "https://[2001:0:7f00:1::]/",
    "https://[2001:0:53aa:64c:0:0:80ff:fffe]/",
    "https://[fe80::5efe:127.0.0.1]/",
    "https://[2606:2800:220:1:0:5efe:127.0.0.1]/",
    "https://[2606:2800:220:1:200:5efe:127.0.0.1]/",
    "https://[::1%25lo]/",
    "https://[::1%lo]/",
    "https://[fe80::1%25eth0]/",
    "https://127.0.0.1%2f@good.example/",
    "https://%31%32%37.0.0.1/",
    "https://127。0。0。1/",
    "https://127．0．0．1/",
    "https://127｡0｡0｡1/",
    "https://１２７.0.0.1/",
    "https://①②⑦.0.0.1/",
    "https://127.0.0.١/",
    "https://[::１]/",
    "https://loc\u00adalhost/",
    "https://ⓛocalhost/",
    "https://127.0.0.1\t/",
    "https://\t127.0.0.1/",
    "https://127.0.\n0.1/",
    " https://127.0.0.1/",
    "https://127.0.0.1/\x00",
    "https://127.0.0.1\\@good.example/",
    "https:\\\\127.0.0.1\\",
    "https:/127.0.0.1/",
    "https:127.0.0.1/",
    "//127.0.0.1/",
    "https:///127.0.0.1/",
    "https:////127.0.0.1/",
    "HTTPS://127.0.0.1/",
    "HtTpS://[::FFFF:127.0.0.1]/",
]

FORMS = [
    "",
    "https://",
    "https:///path",
    "https://:443/",
    "https://?",
    "https://#good.example",
    "good.example",
    "ftp://good.example/",
    "file:///etc/passwd",
    "gopher://good.example/",
    "javascript:alert(1)",
    "unix:///var/run/docker.sock",
    "http://good.example/",
    "HTTP://good.example/",
    "https+unix://good.example/",
    "https://good@127.0.0.1/",
    "https://user:password@good.example/",
    "https://@good.example/",
    "https://good.example:0/",
    "https://good.example:00/",
    "https://good.example:65536/",
    "https://good.example:99999/",
    "https://good.example:443443443/",
    "https://good.example:-1/",
    "https://good.example:+443/",
    "https://good.example: 443/",
    "https://good.example:４４３/",
    "https://good.example:443:443/",
    "https://good.example:https/",
    "https://[::1/",
    "https://::1/",
    "https://[]/",
    "https://[v1.good]/",
    "https://[1.2.3.4]/",
    "https://[2606::1]good.example/",
    "https://good.example[2606::1]/",
    "https://good..example/",
    "https://.good.example/",
    "https://./",
    "https://good.example../",
    "https://-good.example/",
    "https://good-.example/",
    "https://" + "a" * 64 + ".example/",
    "https://" + "a." * 130 + "example/",
    "https://go od.example/",
    "https://good.example/a b",
    "https://good.example/a\r\nX-Injected: yes",
    "https://good.example/\u2028",
    "https://good.example/é",
    "https://bücher.example/",
    "https://good%2eexample/",
    "https://good.example%00.evil.example/",
    "https://good.example;evil.example/",
    "https://good.example,evil.example/",
    "https://$(id).example/",
    "https://good.example/\ud800",
    "https://good.example/" + "a" * 2048,
]

REFUSED_ADDRESSES = {
    "unspecified": ["0.0.0.0", "0.1.2.3", "0.255.255.255", "::"],
    "loopback": ["127.0.0.1", "127.255.255.255", "::1"],
    "link-local": ["169.254.0.0", "169.254.169.254", "169.254.255.255", "fe80::", "febf:ffff::1"],
    "private": ["10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.255.255"],
    "unique-local": ["fc00::", "fd00::1", "fd00:ec2::254", "fdff:ffff::1"],
    "carrier-grade NAT": ["100.64.0.0", "100.64.0.1", "100.100.100.200", "100.127.255.255"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1", "ffff:ffff::"],
    "reserved": [
        "192.0.0.0", "192.0.0.192", "192.88.99.1", "240.0.0.1", "255.255.255.255", "100::1", "100:0:0:1::1",
        "2001:10::1", "2001:20::1", "2001:1ff::1", "5f00::1", "fec0::1", "4000::1", "1::1", "64:ff9b:2::1",
    ],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.255", "2001:db8::1", "3fff::1"],
    "benchmarking": ["198.18.0.0", "198.19.255.255", "2001:2::1"],
    "cloud platform": ["168.63.129.16"],
    "embedded IPv4": [
        "::93.184.216.34", "::ffff:93.184.216.34", "::ffff:0:93.184.216.34", "64:ff9b::93.184.216.34",
        "64:ff9b:1::93.184.216.34", "64:ff9b:1:ffff::1", "2002:5db8:d822::1", "2001:0:5db8:d822::1",
        "2606:2800:220:1::5efe:93.184.216.34", "2606:2800:220:1:200:5efe:93.184.216.34",
        "fd00::5efe:10.0.0.1",
    ],
}  # fmt: skip
ADDRESSES = [address for group in REFUSED_ADDRESSES.values() for address in group]

PUBLIC_ADDRESSES = [
    PUBLIC, PUBLIC6, "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
    "126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0",
    "192.167.255.255", "192.169.0.0", "223.255.255.255", "2000::1", "2001:200::1", "2001:4860:4860::8888",
    "2001:db7:ffff::1", "2003::1", "3ffe::1", "3fff:1000::1",
]  # fmt: skip


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("url", LOOPBACK_SPELLINGS)
def test_no_spelling_of_this_machine_is_a_target(url: str) -> None:
    with pytest.raises(TargetRefused):
        STRICT.target(url)


@pytest.mark.parametrize("url", FORMS)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(TargetRefused):
        STRICT.target(url)


@pytest.mark.parametrize("url", LOOPBACK_SPELLINGS + FORMS)
def test_a_refusal_tells_nothing_of_path_query_or_user(url: str) -> None:
    with pytest.raises(TargetRefused) as caught:
        STRICT.target(url.rstrip("/") + "/the-path?the-query" if "://" in url else url)
    assert not any(word in str(caught.value) for word in ("the-path", "the-query", "password"))


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_special_address_is_refused_as_a_literal_and_as_an_answer(address: str) -> None:
    with pytest.raises(TargetRefused):
        STRICT.target(f"https://{bracketed(address)}/")
    with pytest.raises(TargetRefused):
        STRICT.check(parse_target("https://good.example/"), [address])


@pytest.mark.parametrize(
    ("kind", "address"), [(k, a) for k, group in REFUSED_ADDRESSES.items() for a in group]
)
def test_an_address_is_of_its_class(kind: str, address: str) -> None:
    assert address_class(ip_address(address)) == kind


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_a_public_address_next_to_a_special_range_is_called(address: str) -> None:
    target = STRICT.target(f"https://{bracketed(address)}/")
    assert target.literal == ip_address(address)


@pytest.mark.parametrize("special", ADDRESSES)
@pytest.mark.parametrize("order", [1, -1])
def test_one_refused_address_among_several_refuses_all_in_either_order(special: str, order: int) -> None:
    answers = [PUBLIC, special, PUBLIC6][::order]
    with pytest.raises(TargetRefused):
        STRICT.check(parse_target("https://good.example/"), answers)


def test_public_answers_are_kept_in_the_resolvers_order_without_repeats() -> None:
    checked = STRICT.check(parse_target("https://good.example/"), [PUBLIC6, PUBLIC, PUBLIC6])
    assert checked == (ip_address(PUBLIC6), ip_address(PUBLIC))


def test_no_answer_is_no_refusal_but_unresolved() -> None:
    with pytest.raises(HostUnresolved):
        STRICT.check(parse_target("https://good.example/"), [])


@pytest.mark.parametrize(
    "answer", ["", "good.example", "127.1", "1.2.3.4/32", "::1%lo", "fe80::1%eth0", "1.2.3.4 "]
)
def test_an_answer_that_is_no_plain_address_is_refused(answer: str) -> None:
    with pytest.raises(TargetRefused):
        STRICT.check(parse_target("https://good.example/"), [answer])


@pytest.mark.parametrize("host", ["localhost", "localhost.", "LOCALHOST", "a.localhost", "a.b.localhost."])
def test_localhost_is_this_machine_or_nothing_whatever_the_resolver_says(host: str) -> None:
    target = parse_target(f"https://{host}/")
    opened = TargetPolicy(allow_cidrs=["127.0.0.0/8", "10.0.0.0/8"])
    for answers in ([PUBLIC], ["127.0.0.1"], ["127.0.0.1", PUBLIC]):
        with pytest.raises(TargetRefused):
            STRICT.check(target, answers)
    for answers in ([PUBLIC], ["10.0.0.1"], ["127.0.0.1", PUBLIC]):
        with pytest.raises(TargetRefused):
            opened.check(target, answers)
    assert opened.check(target, ["127.0.0.1"]) == (ip_address("127.0.0.1"),)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("https://good.example", "good.example", 443, "/"),
        ("HTTPS://GOOD.Example./", "good.example", 443, "/"),
        ("https://good.example:8443/a?b=c", "good.example", 8443, "/a?b=c"),
        ("https://good.example?b", "good.example", 443, "/?b"),
        ("https://good.example/a#fragment", "good.example", 443, "/a"),
        ("https://good.example#@127.0.0.1/", "good.example", 443, "/"),
        ("https://good.example/@127.0.0.1", "good.example", 443, "/@127.0.0.1"),
        ("https://good.example?@127.0.0.1", "good.example", 443, "/?@127.0.0.1"),
        ("https://good.example:/", "good.example", 443, "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/"),
        ("https://a_b.example/%2f", "a_b.example", 443, "/%2f"),
        ("https://intranet/", "intranet", 443, "/"),
        ("https://1.2.3.4.example/", "1.2.3.4.example", 443, "/"),
        ("https://0x7f.example/", "0x7f.example", 443, "/"),
        ("https://93.184.216.34:65535/", "93.184.216.34", 65535, "/"),
        ("https://[2606:2800:220:1:248:1893:25C8:1946]/", PUBLIC6, 443, "/"),
    ],
)
def test_an_acceptable_url_is_taken_apart_one_way(url: str, host: str, port: int, path: str) -> None:
    target = STRICT.target(url)
    assert (target.scheme, target.host, target.port, target.path) == ("https", host, port, path)
    assert "b=c" not in repr(target)


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("https://good.example:443/", "good.example"),
        ("http://good.example/", "good.example"),
        ("http://good.example:443/", "good.example:443"),
        (f"https://[{PUBLIC6}]:8443/", f"[{PUBLIC6}]:8443"),
    ],
)
def test_the_host_header_names_what_is_called(url: str, authority: str) -> None:
    assert parse_target(url, allow_http=True).authority == authority


def test_http_is_for_the_operator_to_allow_and_opens_no_address() -> None:
    allowed = TargetPolicy(allow_http=True)
    assert allowed.target("http://good.example/").port == 80
    with pytest.raises(TargetRefused):
        allowed.target("http://127.0.0.1/")


def test_the_longest_url_is_2048_bytes() -> None:
    assert len(parse_target("https://good.example/" + "a" * (2048 - 21)).path) == 2028
    with pytest.raises(TargetRefused):
        parse_target("https://good.example/" + "a" * (2049 - 21))


# The operator's allow list.

OPENS = [
    ("10.0.0.0/8", "10.1.2.3"),
    ("10.1.2.3", "10.1.2.3"),
    ("10.1.2.3/32", "10.1.2.3"),
    ("0.0.0.0/0", "10.1.2.3"),
    ("0.0.0.0/0", "172.16.0.1"),
    ("0.0.0.0/0", "192.168.1.1"),
    ("0.0.0.0/0", "100.64.0.1"),
    ("100.64.0.0/10", "100.100.100.200"),
    ("fd00::/8", "fd00::1"),
    ("::/0", "fd00::1"),
    ("127.0.0.0/8", "127.0.0.1"),
    ("127.0.0.1/32", "127.0.0.1"),
    ("::1/128", "::1"),
    ("169.254.0.0/16", "169.254.169.254"),
    ("169.254.169.254/32", "169.254.169.254"),
    ("fe80::/10", "fe80::1"),
]  # fmt: skip

OPENS_NOT = [
    ("10.0.0.0/8", "192.168.1.1"),
    ("10.1.2.3/32", "10.1.2.4"),
    ("0.0.0.0/0", "127.0.0.1"),
    ("0.0.0.0/0", "169.254.169.254"),
    ("126.0.0.0/7", "127.0.0.1"),
    ("64.0.0.0/2", "127.0.0.1"),
    ("169.254.0.0/15", "169.254.169.254"),
    ("::/0", "::1"),
    ("::/127", "::1"),
    ("::/0", "fe80::1"),
    ("fe80::/9", "fe80::1"),
    ("0.0.0.0/0", "0.0.0.0"),
    ("0.0.0.0/32", "0.0.0.0"),
    ("::/128", "::"),
    ("224.0.0.0/4", "224.0.0.1"),
    ("ff00::/8", "ff02::1"),
    ("240.0.0.0/4", "255.255.255.255"),
    ("192.0.2.0/24", "192.0.2.1"),
    ("198.18.0.0/15", "198.18.0.1"),
    ("168.63.129.16/32", "168.63.129.16"),
    ("127.0.0.0/8", "::ffff:127.0.0.1"),
    ("::ffff:127.0.0.0/104", "::ffff:127.0.0.1"),
    ("::ffff:10.0.0.0/104", "::ffff:10.0.0.1"),
    ("10.0.0.0/8", "::10.0.0.1"),
    ("64:ff9b::/96", "64:ff9b::a00:1"),
    ("2002::/16", "2002:a00:1::"),
    ("fd00::/8", "fd00::5efe:10.0.0.1"),
    ("fe80::/10", "fe80::5efe:127.0.0.1"),
]  # fmt: skip


def network(text: str) -> str:
    # Some of these have host bits on purpose: "wider than the range by one bit".
    return str(ip_network(text, strict=False))


@pytest.mark.parametrize(("entry", "address"), OPENS)
def test_an_entry_opens_what_it_covers_or_lies_in(entry: str, address: str) -> None:
    TargetPolicy(allow_cidrs=[entry]).target(f"https://{bracketed(address)}/")


@pytest.mark.parametrize(("entry", "address"), OPENS_NOT)
def test_an_entry_opens_nothing_else(entry: str, address: str) -> None:
    with pytest.raises(TargetRefused):
        TargetPolicy(allow_cidrs=[network(entry)]).target(f"https://{bracketed(address)}/")


def test_many_entries_open_no_more_than_each() -> None:
    halves = TargetPolicy(allow_cidrs=["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"])
    for address in ("127.0.0.1", "169.254.169.254", "::1", "fe80::1", "0.0.0.0", "::"):
        with pytest.raises(TargetRefused):
            halves.target(f"https://{bracketed(address)}/")


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/33", "localhost", "", "10.0.0.0/8 "])
def test_an_entry_that_is_no_cidr_is_an_error_that_names_it(entry: str) -> None:
    with pytest.raises(ValueError, match="allow_cidrs"):
        TargetPolicy(allow_cidrs=[entry])


def test_one_text_is_no_list_of_entries() -> None:
    with pytest.raises(TypeError, match="allow_cidrs"):
        TargetPolicy(allow_cidrs="10.0.0.0/8")


def test_what_the_process_listens_on_is_refused_though_it_is_public_or_opened() -> None:
    policy = TargetPolicy(
        allow_cidrs=["127.0.0.0/8"], listening=[(PUBLIC, 443), (PUBLIC6, 443), ("127.0.0.1", 8443)]
    )
    for refused in (f"https://{PUBLIC}/", f"https://[{PUBLIC6}]/", "https://127.0.0.1:8443/"):
        with pytest.raises(TargetRefused, match="listens"):
            policy.target(refused)
    for called in (f"https://{PUBLIC}:444/", "https://127.0.0.1:8444/", "https://127.0.0.2:8443/"):
        policy.target(called)
    with pytest.raises(TargetRefused, match="listens"):
        policy.check(parse_target("https://good.example/"), [PUBLIC])


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_listening_on_every_address_refuses_each_of_this_machine_and_no_other(wildcard: str) -> None:
    policy = TargetPolicy(allow_cidrs=["127.0.0.0/8"], listening=[(wildcard, 8443)])
    with pytest.raises(TargetRefused, match="listens"):
        policy.target("https://127.0.0.1:8443/")
    policy.target("https://127.0.0.1:8444/")
    policy.target(f"https://{PUBLIC}:8443/")


# Properties.

ipv4 = st.integers(0, 2**32 - 1).map(IPv4Address)
ipv6 = st.integers(0, 2**128 - 1).map(IPv6Address)

EMBEDDINGS = [
    lambda v4: v4,
    lambda v4: 0xFFFF << 32 | v4,
    lambda v4: 0xFFFF << 48 | v4,
    lambda v4: 0x64_FF9B << 96 | v4,
    lambda v4: 0x64_FF9B_0001 << 80 | v4,
    lambda v4: 0x2002 << 112 | v4 << 80,
    lambda v4: 0x2001_0000 << 96 | v4 << 64,
    lambda v4: 0x2001_0000 << 96 | v4 ^ 0xFFFFFFFF,
    lambda v4: 0x2606_2800 << 96 | 0x5EFE << 32 | v4,
    lambda v4: 0x2606_2800 << 96 | 0x200_5EFE << 32 | v4,
]


@given(ipv4, st.sampled_from(EMBEDDINGS))
def test_no_embedding_of_any_ipv4_address_is_called_or_can_be_opened(
    v4: IPv4Address, embedding: object
) -> None:
    address = IPv6Address(embedding(int(v4)))  # type: ignore[operator]
    assume(int(address) > 1)  # The unspecified address and loopback have classes of their own.
    everything = TargetPolicy(allow_cidrs=["::/0", "0.0.0.0/0", f"{address}/128", str(v4)])
    with pytest.raises(TargetRefused):
        everything.target(f"https://[{address}]/")


@given(st.one_of(ipv4, ipv6))
def test_every_address_is_public_or_in_the_table_or_outside_global_unicast(
    address: IPv4Address | IPv6Address,
) -> None:
    kind = address_class(address)
    if any(address in network for network, _ in _RANGES):
        assert kind is not None
    if kind is None:
        assert address.version == 4 or address in ip_network("2000::/3")
        # Python knows fewer special addresses, never more.
        assert address.is_global


@given(st.one_of(ipv4, ipv6), st.integers(0, 128))
def test_no_entry_of_any_width_opens_what_never_opens(address: IPv4Address | IPv6Address, width: int) -> None:
    entry = ip_network((address, min(width, address.max_prefixlen)), strict=False)
    kind = address_class(address)
    opened = TargetPolicy(allow_cidrs=[entry]).refusal(address, 443) is None
    if kind in (None, "private", "unique-local", "carrier-grade NAT"):
        assert opened
    elif kind in ("loopback", "link-local"):
        whole = next(network for network, of in _RANGES if of == kind and address in network)
        assert opened == (entry.prefixlen >= whole.prefixlen)
    else:
        assert not opened


numbers = st.one_of(
    st.integers(0, 2**32).map(str),
    st.integers(0, 2**32).map(hex),
    st.integers(0, 2**32).map(lambda number: f"0{number:o}"),
    st.integers(0, 300).map(str),
    st.integers(0, 300).map(lambda number: f"{number:03}"),
)


@given(st.lists(numbers, min_size=1, max_size=5).map(".".join))
def test_whatever_a_c_library_takes_for_an_ipv4_address_is_that_address_or_refused(host: str) -> None:
    try:
        target = parse_target(f"https://{host}/")
    except TargetRefused:
        return
    assert target.literal == IPv4Address(socket.inet_aton(host))


@given(
    st.text(st.characters(codec=None), max_size=60), st.sampled_from(["", "https://", "https://good.example"])
)
@example("127.0.0.1", "https://")
def test_any_text_is_refused_or_becomes_one_plain_target(text: str, prefix: str) -> None:
    with suppress(TargetRefused):
        target = parse_target(prefix + text)
        assert target.host.isascii()
        assert not set(target.host) & set("/?#@\\%[] \t\r\n")
        assert 1 <= target.port <= 65535
        assert target.path.startswith("/")
        assert target.path.isascii()
        assert target.path.isprintable()
        assert " " not in target.path
        # One spelling for each target: what is called is what was read.
        assert parse_target(f"https://{bracketed(target.host)}:{target.port}{target.path}") == target
