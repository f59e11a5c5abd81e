"""Tests of recipe.runner.verl_patches.stores: a store listens at its address alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from recipe.runner.verl_patches.stores import listen_at_the_address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def patched() -> Any:
    rendezvous = SimpleNamespace(TCPStore=TCPStore)
    listen_at_the_address(rendezvous)
    return rendezvous.TCPStore


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_listens_at_the_address_that_it_is_reached_at(use_libuv: bool) -> None:
    how: dict[str, Any] = {"world_size": 1, "timeout": timedelta(seconds=20), "multi_tenant": True}
    how["use_libuv"] = use_libuv
    port = free_port()
    plain = TCPStore("127.0.0.1", port, is_master=True, **how)
    assert listening(port) != {"127.0.0.1"}, "torch does so itself: this patch can go"
    port = free_port()
    store = patched()(host_name="127.0.0.1", port=port, is_master=True, **how)
    assert listening(port) == {"127.0.0.1"}
    store.set("key", "value")
    other = patched()(host_name="127.0.0.1", port=port, is_master=False, **how)
    assert other.get("key") == b"value"
    again = patched()(host_name="127.0.0.1", port=port, is_master=True, **how)  # as for a second group of the process
    assert again.get("key") == b"value" and listening(port) == {"127.0.0.1"}
    del plain


def test_a_store_by_a_name_listens_as_before() -> None:
    """A name may mean another address on another machine."""
    port = free_port()
    store = patched()(host_name="localhost", port=port, world_size=1, is_master=True, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert store.get("key") == b"value" and listening(port)
