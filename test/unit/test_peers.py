"""Which servers a server takes weights from: an address is not what somebody asks for, but what the operator lists."""

import socket

import pytest

from sglang_reshard.extras.replicas.pull import PEERS, is_peer, refusal

LISTED = "gpu7, *.train.example.com 10.2.0.0/16,192.0.2.9,2001:db8::/32"


@pytest.mark.parametrize(
    ("host", "listed", "expected"),
    [
        ("127.0.0.1", "", True),
        ("127.8.8.8", "", True),
        ("::1", "", True),
        ("::ffff:127.0.0.1", "", True),
        ("localhost", "", True),
        (socket.gethostname().lower(), "", True),
        ("gpu7", "", False),
        ("192.0.2.9", "", False),
        ("169.254.169.254", "", False),
        ("gpu7", LISTED, True),
        ("gpu70", LISTED, False),
        ("a.train.example.com", LISTED, True),
        ("train.example.com", LISTED, False),
        ("train.example.com.evil.org", LISTED, False),
        ("10.2.255.1", LISTED, True),
        ("::ffff:10.2.255.1", LISTED, True),
        ("10.3.0.1", LISTED, False),
        ("192.0.2.9", LISTED, True),
        ("192.0.2.10", LISTED, False),
        ("2001:db8::7", LISTED, True),
        ("2001:db9::7", LISTED, False),
        ("10.2.evil.org", "10.2.*", False),
        ("0x0a020001", LISTED, False),  # which a resolver takes for 10.2.0.1
        ("169.254.169.254", "*", True),
    ],
)
def test_only_this_host_and_what_is_listed(host, listed, expected):
    assert is_peer(host, listed) is expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://gpu7:30000", ""),
        ("https://GPU7:30000/", ""),
        ("http://gpu7:30000/behind/a/proxy", ""),
        ("http://gpu8:30000", f"'gpu8': it is another host, and {PEERS} in this server's environment does not list it"),
        ("http://gpu7@gpu8:30000", "not the URL of a server"),
        ("http://gpu7:30000/flush_cache?x=", "not the URL of a server"),
        ("http://gpu7:30000/flush_cache#", "not the URL of a server"),
        ("http://gpu7:30000#x", "not the URL of a server"),
        ("ftp://gpu7", "not the URL of a server"),
        ("gpu7:30000", "not the URL of a server"),
        ("", "not the URL of a server"),
        ("http://gpu7:99999", "not the URL of a server"),
        ("http://[::1", "not a valid URL"),
        ("http://" + "x" * 3000, "characters"),
    ],
)
def test_urls(monkeypatch, url, says):
    monkeypatch.setenv(PEERS, LISTED)
    found = refusal(url)
    assert bool(found) == bool(says)
    assert len(found) < 400
    if says != "characters":
        assert says in found
