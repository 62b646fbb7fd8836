"""Which replica a conversation goes to, so that its turns find their cached prefix (13.1).

Consistent hashing with bounded load: every key has an order of the replicas of its own, and goes
to the first one that is not overloaded. Replicas that come or go move only their own keys, and two
idle replicas are told apart by the key, never by whose turn it is (C58). It is a hint: any replica
gives the same answer.

The door to a replica is ``core.client.EngineClient``; its load is what its ``stats`` count. What is
served from several ranks or processes places each request by ``place`` and submits it there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

# A replica is overloaded when it has this many times its even share.
LOAD_FACTOR = 1.25


def prefix_key(token_ids: Sequence[int], block_size: int) -> str:
    """The key of a request that names no session: equal first blocks meet.

    A prompt shorter than a block has no prefix to find and is hashed whole.
    """
    return ",".join(map(str, token_ids[:block_size]))


def place(key: str, loads: Sequence[int]) -> int:
    """The replica for a key, as an index of ``loads``.

    Args:
        key: what names the session (``Caller.session_key``), else ``prefix_key``.
        loads: requests that each replica runs or has waiting.
    """
    bound = math.ceil(LOAD_FACTOR * (sum(loads) + 1) / len(loads))
    order = sorted(range(len(loads)), key=lambda replica: _weight(key, replica), reverse=True)
    return next(replica for replica in order if loads[replica] < bound)


def _weight(key: str, replica: int) -> bytes:
    return hashlib.blake2b(f"{replica}:{key}".encode(), digest_size=8).digest()
