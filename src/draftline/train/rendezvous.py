"""Where the ranks of one attempt find each other, and never the dead of the attempt before.

A launcher's store outlives attempts, and torch separates them by each agent's own count of failures. That differs
between hosts where one only saw the others go: its ranks then connect to addresses of processes that are gone. So rank
0 names the attempt, and answers every rank that greets it under that name; who is not answered has read an old one.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, with their types

from draftline.environment import variables
from draftline.errors import PeerLost

NAME = "draftline/attempt"
POLL_S = 0.05
PATIENCE_S = 0.5  # for an answer under a name before the name is read again


def meet(timeout_s: float) -> Store:
    """The store of this attempt alone. Collective. Raises PeerLost where not all ranks come within `timeout_s`."""
    rank, size, deadline = variables.rank(), variables.world_size(), time.monotonic() + timeout_s
    host, port = variables.master()
    store = TCPStore(
        host, port, size, rank == 0 and not variables.has_agent_store(), timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )  # fmt: skip
    name = host_attempt(store, size, deadline) if rank == 0 else find_attempt(store, rank, deadline)
    return PrefixStore(name, store)


def host_attempt(store: Store, size: int, deadline: float) -> str:
    name = uuid.uuid4().hex
    store.set(NAME, name)
    for rank in range(1, size):
        wait_for(store, f"{name}/{rank}", deadline)
        store.set(f"{name}/{store.get(f'{name}/{rank}').decode()}", "welcome")
    return name


def find_attempt(store: Store, rank: int, deadline: float) -> str:
    mine = uuid.uuid4().hex
    while True:
        wait_for(store, NAME, deadline)
        name = store.get(NAME).decode()
        store.set(f"{name}/{rank}", mine)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if store.check([f"{name}/{mine}"]):
                return name
            time.sleep(POLL_S)
        if time.monotonic() > deadline:
            raise PeerLost("rank 0 did not come to start the run")


def wait_for(store: Store, key: str, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerLost(f"a rank did not come to start the run ({key})")
        time.sleep(POLL_S)
