"""The meeting point takes the agents' state only if the job's secret signed it."""

from __future__ import annotations

import pickle
from base64 import b64encode

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousStateError

from parallax.launch.host.rendezvous import SignedBackend


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def backend(store: HashStore, secret: bytes = b"secret") -> SignedBackend:
    return SignedBackend(store, "run", secret)


def test_agents_with_the_secret_exchange_state(store: HashStore) -> None:
    one, other = backend(store), backend(store)
    assert one.get_state() is None
    written = one.set_state(b"first")
    assert written is not None
    assert (written[0], written[2]) == (b"first", True)
    found = other.get_state()
    assert found is not None
    assert found[0] == b"first"
    changed = other.set_state(b"second", found[1])
    assert changed is not None
    assert changed[2]
    late = one.set_state(b"third", written[1])  # it has not seen the second
    assert late is not None
    assert (late[0], late[2]) == (b"second", False)


def test_state_that_another_wrote_is_not_read(store: HashStore) -> None:
    ours = backend(store)
    ours.set_state(b"ours")
    forged = pickle.dumps(print)
    store.set("torch.rendezvous.run", b64encode(forged))
    with pytest.raises(RendezvousStateError, match="not of this job"):
        ours.get_state()
    with pytest.raises(RendezvousStateError, match="not of this job"):
        ours.set_state(b"ours again", b64encode(b"old"))
    foreign = backend(store, b"another")
    store.set("torch.rendezvous.run", b64encode(b""))
    with pytest.raises(RendezvousStateError):
        foreign.get_state()
