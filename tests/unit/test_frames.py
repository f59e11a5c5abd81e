"""Tests of recipe.runner.verl_patches.frames: TransferQueue reads messages of the run's processes only."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQMessageDecodeError, ZMQRequestType

from recipe.runner.verl_patches import frames

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
    foreign: dict[str, list[bytes]] = {
        "nothing": [],
        "a pickle": [PICKLE, pickled],
        "a pickle with a code that is none": [PICKLE, pickled, b"c" * 32],
        "with the code of another message": [PICKLE, pickled, own[-1]],
        "with that of another key": [PICKLE, pickled, frames.code_of(b"x" * 32, [PICKLE, pickled])],
        "unsigned": own[:-1],
        "a code cut short": [*own[:-1], own[-1][:-1]],
        "a frame more": [own[0], b"", *own[1:]],
        "a boundary that has moved": [own[0][:-1], own[0][-1:] + own[1], *own[2:]],
        "in another order": [own[0], own[2], own[1], *own[3:]],
    }
    for index in range(len(own)):
        for bit in (0, 8 * len(own[index]) - 1) if own[index] else ():
            changed = bytearray(own[index])
            changed[bit // 8] ^= 1 << bit % 8
            foreign[f"bit {bit} of frame {index}"] = [*own[:index], bytes(changed), *own[index + 1 :]]
    for what, parts in foreign.items():
        with pytest.raises(ZMQMessageDecodeError):
            Signed.deserialize(parts)
            pytest.fail(f"{what} was taken")
    assert not mark.exists()
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
from recipe.runner.verl_patches.frames import are_signed
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
assert are_signed()

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
        for _ in range(3):
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
