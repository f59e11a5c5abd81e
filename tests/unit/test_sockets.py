"""Nobody else can make the socket that weights go to vLLM by, and a store listens at its address alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from recipe.runner.faults import node
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.verl_patches import sockets
from recipe.runner.verl_patches.stores import listen_at_the_address

NAME = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


def test_the_socket_is_private_and_the_run_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs at a time on one machine, each with a Ray of its own, have the same name from verl."""
    monkeypatch.setenv(node.PRIVATE_VARIABLE, private := "/tmp/fspo-12345")
    handles = []
    for run in ("1" * 32, "2" * 32):
        monkeypatch.setenv(RUN_ID_VARIABLE, run)
        handles.append(sockets.private_handle(NAME))
    assert handles == [f"ipc://{private}/{run * 16}-01000000-replica-0-rank-0.sock" for run in "12"]
    # Shorter than Ray's own, whose length is checked before a run.
    assert len(handles[0]) - len(f"ipc://{private}/") < len("12345678/") + len(node.RAY)


@pytest.fixture
def port() -> Iterator[int]:
    """One that is free, and held, so that nobody else gets it before a store does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def listening(port: int) -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_listens_at_the_address_that_it_is_reached_at(use_libuv: bool, port: int) -> None:
    how: dict[str, Any] = {"world_size": 1, "timeout": timedelta(seconds=120), "multi_tenant": True}
    how["use_libuv"] = use_libuv
    plain = TCPStore("127.0.0.1", 0, is_master=True, **how)
    assert listening(plain.port) != {"127.0.0.1"}, "torch does so itself: this patch can go"
    listen_at_the_address(patched := SimpleNamespace(TCPStore=TCPStore))  # type: ignore[arg-type]
    how |= {"host_name": "127.0.0.1", "port": port}
    store = patched.TCPStore(is_master=True, **how)
    store.set("key", "value")
    for is_master in (False, True):  # the second as for a second group of the process
        assert patched.TCPStore(is_master=is_master, **how).get("key") == b"value"
        assert listening(port) == {"127.0.0.1"}
    del plain
