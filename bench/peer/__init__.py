"""Ways to give several processes the same data, one module each, behind one small protocol (protocol.py).

Each is used as its own documentation would have it. Where a library leaves a step to its user (a lock so that one
process loads, writing under another name and renaming), the module does what a careful user does, and says so.
"""

from __future__ import annotations

from importlib import import_module

from peer.protocol import Peer, Place

PEERS = ("legroom", "h5py", "numpy", "tensordict", "datasets", "vineyard", "ray")


def make(name: str, place: Place) -> Peer:
    """The contender of that name, with everything it needs imported."""
    found: Peer = import_module(f"peer.by_{name}").Contender(place)
    return found
