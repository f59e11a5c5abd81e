"""TransferQueue reads messages of the run only, weights go by its own socket, a store listens at its address alone."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQMessageDecodeError, ZMQRequestType

from recipe.runner.faults import node
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.verl_patches import frames, sockets
from recipe.runner.verl_patches.stores import listen_at_the_address

#: What TransferQueue takes for a pickle.
PICKLE = b"\xc1\xfe\xed"


def test_a_message_of_somebody_else_is_refused_unread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Signed(ZMQMessage):  # with the patch
        deserialize = classmethod(ZMQMessage.deserialize.__func__)  # type: ignore[attr-defined]

    monkeypatch.setattr(frames, "_key", lambda: b"k" * 32)
    frames._sign(SimpleNamespace(ZMQMessage=Signed, ZMQMessageDecodeError=ZMQMessageDecodeError))
    mark = tmp_path / "executed"
    payload = type("Payload", (), {"__reduce__": lambda _: (Path.touch, (mark,))})
    pickled = pickle.dumps(payload())  # leaves a file where it is unpickled
    sent = Signed.create(ZMQRequestType.PUT_DATA, "sender", {"a": torch.arange(6).view(2, 3), "empty": torch.empty(0)})
    received = Signed.deserialize(sent.serialize())
    assert torch.equal(received.body["a"], sent.body["a"]) and received.body["empty"].shape == (0,)
    own = [bytes(memoryview(frame)) for frame in sent.serialize()]
    foreign = [
        *([], [PICKLE, pickled], [PICKLE, pickled, own[-1]], own[:-1], [*own[:-1], own[-1][:-1]]),
        [PICKLE, pickled, frames.code_of(b"x" * 32, [PICKLE, pickled])],  # of another key
        [own[0], b"", *own[1:]],  # a frame more
        [own[0], own[2], own[1], *own[3:]],  # in another order
        *([*own[:i], bytes([one[0] ^ 1, *one[1:]]) if one else b"x", *own[i + 1 :]] for i, one in enumerate(own)),
    ]
    for number, parts in enumerate(foreign):
        with pytest.raises(ZMQMessageDecodeError, match="outside this run"):  # not of what has decoded it
            Signed.deserialize(parts)
            pytest.fail(f"message {number} was taken")
    assert not mark.exists()
    assert frames.code_of(b"k", [b"ab", b"c"]) != frames.code_of(b"k", [b"a", b"bc"]), "a boundary that has moved"
    with pytest.raises(TypeError):
        ZMQMessage.deserialize([PICKLE, pickled])  # as it is: not a message, but it has been unpickled
    assert mark.exists()


#: The loops of TransferQueue's controller and storage at real sockets, which a stranger and then the run write to.
LOOPS = """
import pickle, sys, types, zmq
from pathlib import Path
from recipe.runner.ray_worker import begin
begin()
import transfer_queue.controller, transfer_queue.storage.simple_storage
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

Payload = type("Payload", (), {"__reduce__": lambda _: (Path.touch, (Path(sys.argv[1]),))})

def class_of(actor):
    return actor.__ray_metadata__.modified_class

controller = class_of(transfer_queue.controller.TransferQueueController)()
storage = class_of(transfer_queue.storage.simple_storage.SimpleStorageUnit)({})
pickled = pickle.dumps(Payload())
of = ZMQRequestType
asked = [
    (controller.get_zmq_server_info(), "request_handle_socket", of.GET_LIST_PARTITIONS, of.LIST_PARTITIONS_RESPONSE),
    (controller.get_zmq_server_info(), "handshake_socket", of.HANDSHAKE, of.HANDSHAKE_ACK),
    (storage.get_zmq_server_info(), "put_get_socket", of.GET_METRICS, of.METRICS_RESPONSE),
]
for info, name, request, answer in asked:
    stranger, own = (zmq.Context.instance().socket(zmq.DEALER) for _ in range(2))
    stranger.identity, own.identity = b"TQ_STORAGE_stranger", b"TQ_STORAGE_own"
    for socket in (stranger, own):
        socket.connect(info.to_addr(name))
        socket.linger = 0
    for frames in ([b"\\xc1\\xfe\\xed", pickled], [b"\\xc1\\xfe\\xed", pickled, b"c" * 32], [b""], [b"x"] * 9):
        stranger.send_multipart(frames)
    stranger.poll(2000)
    own.send_multipart(ZMQMessage.create(request, "own", {}).serialize())
    assert own.poll(60000), name
    print(name, ZMQMessage.deserialize(own.recv_multipart(copy=False)).request_type is answer)
"""


@pytest.mark.slow  # fresh processes that import torch or verl
def test_the_loops_survive_strangers_and_serve_the_run(tmp_path: Path) -> None:
    mark, token = tmp_path / "executed", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a token of this run's own"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN_PATH"}
    environment |= token | {"FSPO_RAY_TMP": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", LOOPS, str(mark)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    answered = [f"{name} True" for name in ("request_handle_socket", "handshake_socket", "put_get_socket")]
    assert (done.returncode, done.stdout.splitlines()) == (0, answered), done.stderr[-3000:]
    assert not mark.exists()


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
    own = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {connection.laddr.ip for connection in own if connection.laddr.port == port}


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_listens_at_the_address_that_it_is_reached_at(use_libuv: bool, port: int) -> None:
    how: dict[str, Any] = {"world_size": 1, "timeout": timedelta(seconds=120), "multi_tenant": True}
    how |= {"host_name": "127.0.0.1", "use_libuv": use_libuv}
    plain = TCPStore(port=0, is_master=True, **how)
    assert listening(plain.port) != {"127.0.0.1"}, "torch does so itself: this patch can go"
    listen_at_the_address(patched := SimpleNamespace(TCPStore=TCPStore))  # type: ignore[arg-type]
    how["port"] = port
    store = patched.TCPStore(is_master=True, **how)
    store.set("key", "value")
    for is_master in (False, True):  # the second as for a second group of the process
        assert patched.TCPStore(is_master=is_master, **how).get("key") == b"value"
        assert listening(port) == {"127.0.0.1"}
