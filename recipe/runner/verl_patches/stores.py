"""torch's stores listen at the address that they are reached at, and nowhere else."""

from __future__ import annotations

import ipaddress
import socket
from functools import wraps
from typing import Any


def listen_at_the_address(rendezvous: Any) -> None:
    """Bind the store of a process group, of verl's workers or of vLLM's, to the address in its name.

    torch 2.13 tells the other ranks this address, and listens on all. Who reaches a store can read and write what the
    ranks agree on. torch takes a socket that listens already, but no rendezvous (``env://``, ``tcp://``) passes one on.
    """
    # upstream: torch.distributed.rendezvous "timeout=timeout, multi_tenant=True, use_libuv=use_libuv, )"
    # upstream: torch.distributed.rendezvous:TCPStore
    original = rendezvous.TCPStore

    @wraps(original, updated=())
    def store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> Any:
        if is_master and not args and "master_listen_fd" not in kwargs:
            kwargs |= _listening(host_name, port)
        return original(host_name, port, *args, is_master=is_master, **kwargs)

    rendezvous.TCPStore = store


def _listening(host: str, port: int) -> dict[str, int]:
    """A listening socket as torch takes it; nothing where there can be none, and torch does as it does."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return {"master_listen_fd": socket.create_server((host, port), family=family, backlog=2048).detach()}
    except (ValueError, OSError):  # a name; not an address of this machine; a store of this process has the port
        return {}
