"""What is published on the control server comes back as it was, or the error says what did not, and whose it is."""

import pytest

from sglang_reshard.errors import DeadlineExceeded, Mismatch
from sglang_reshard.protocol.session import Session, handles_key

NAMES = ("model.embed_tokens.weight", "lm_head.weight")
WHAT = "the names of trainer rank 3"


@pytest.fixture
def session():
    session = Session.host(timeout_s=10)
    yield session
    session.end(1)


def test_ranks_that_publish_the_same_delete_their_own_only(session):
    digest = session.put(NAMES, handles_key(0))
    assert session.put(NAMES, handles_key(1)) == digest
    session.client.delete_keys([handles_key(0, digest)])
    assert session.get(handles_key(1, digest), tuple[str, ...], WHAT, 1) == NAMES
    with pytest.raises(DeadlineExceeded):
        session.get(handles_key(0, digest), tuple[str, ...], WHAT, 0)


def test_an_error_says_what_and_whose_it_is(session):
    digest = session.put(NAMES)
    with pytest.raises(DeadlineExceeded, match=rf"^{WHAT} did not arrive within 0 s; look at the log of the rank"):
        session.get("f" * 64, tuple[str, ...], WHAT, 0)
    with pytest.raises(Mismatch, match=rf"^{WHAT} cannot be read: .* same version of sglang-reshard"):
        session.get(digest, int, WHAT, 1)
    session.put(NAMES[:1], digest, hashed=False)
    with pytest.raises(Mismatch, match=rf"^{WHAT} does not match its content hash .*: .* Start a new session"):
        session.get(digest, tuple[str, ...], WHAT, 1)
