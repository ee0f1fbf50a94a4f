"""Can the hosts of a run reach each other? Each listens on its own addresses of a list and connects to the others'."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from draftline.environment.checks import Check
from draftline.errors import InputError

TRY_S = 1.0  # one attempt to connect
PAUSE_S = 0.2
GREETING = b"draftline\n"
Address = tuple[str, int]


def parse_hosts(text: str) -> list[Address]:
    """ "node1:29500,node2:29500". Raises InputError for anything else."""
    addresses = []
    for item in text.split(","):
        host, colon, port = item.strip().rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"--hosts: {item!r} is not host:port", "for example --hosts node1:29500,node2:29500")
        addresses.append((host.strip("[]"), int(port)))
    return addresses


def reachability_checks(addresses: Sequence[Address], limit_s: float) -> Iterator[Check]:
    """A line for every address: mine are listened on, the others are tried until they answer or `limit_s` is over.

    Run it on every host within that time. An address that this host cannot bind is another host's.
    """
    listening: dict[Address, Greeter] = {}
    faults: dict[Address, str] = {}
    for address in addresses:
        try:
            listening[address] = Greeter(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                faults[address] = f"port {address[1]} is taken on this host"
    try:
        others = [address for address in addresses if address not in listening and address not in faults]
        faults |= try_all(others, limit_s, to_the_end=bool(listening))
    finally:
        for greeter in listening.values():
            greeter.close()
    for address in addresses:
        yield line(address, address in listening, faults.get(address, ""))


def try_all(others: Sequence[Address], limit_s: float, to_the_end: bool) -> dict[Address, str]:
    """What was last wrong with each address, "" if it answered. `to_the_end`: somebody may still want to reach us."""
    deadline = time.monotonic() + limit_s
    state = dict.fromkeys(others, "not tried")
    while time.monotonic() < deadline and others and (to_the_end or any(state.values())):
        state |= {address: connect(address) for address, fault in state.items() if fault}
        time.sleep(PAUSE_S)
    return state


class Greeter:
    """Greets whoever connects to an address, in a thread of its own until closed. Raises OSError where it cannot
    listen."""

    def __init__(self, address: Address) -> None:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.server = socket.create_server(address, family=family, backlog=64)
        self.server.settimeout(PAUSE_S)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.greet, daemon=True)
        self.thread.start()

    def greet(self) -> None:
        while not self.closing.is_set():
            try:
                caller, _ = self.server.accept()
            except TimeoutError:
                continue
            with caller:
                caller.sendall(GREETING)

    def close(self) -> None:
        self.closing.set()
        self.thread.join()
        self.server.close()


def connect(address: Address) -> str:
    """ "" when draftline's greeting came back; else what was wrong, in words."""
    try:
        with socket.create_connection(address, timeout=TRY_S) as link:
            said = link.recv(len(GREETING))
    except socket.gaierror:
        return "the name is not known here"
    except TimeoutError:
        return "no answer: a firewall drops it, or the host is down"
    except OSError as error:
        return f"{error.strerror or error}"
    return "" if said == GREETING else "another program listens there"


def line(address: Address, mine: bool, fault: str) -> Check:
    name = f"{address[0]}:{address[1]}"
    if mine:
        return Check(name, "ok", "this host: listened")
    if not fault:
        return Check(name, "ok", "reached")
    remedy = "run doctor on every host at the same time; open all ports between them: NCCL picks its own"
    return Check(name, "fail", fault, remedy)
