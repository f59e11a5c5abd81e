"""TransferQueue's messages carry a code that only processes of the run can make.

TransferQueue 0.1.11 unpickles what comes in at its sockets, which listen on the node's address: whoever reaches a port
runs code as the owner of the run. It has no setting for CURVE or a key. So the sender appends an HMAC-SHA256 over all
frames, each with its length before it, and the receiver compares it before it decodes anything. A message without the
code is undecodable: TransferQueue's loops log it, answer with an error and go on.

The key is derived from Ray's token, which every process of a Ray has. Without one the sockets are as open as Ray is. A
message that is sent again is not noticed: who reads the run's traffic reads Ray's token, too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final

from recipe.runner.when_imported import WhenImported

#: What the key is for: another use of Ray's token has another key.
_LABEL: Final = b"TransferQueue frames"
_LENGTH_BYTES: Final = 8
_MARK: Final = "_signs_frames"


def sign_messages() -> None:
    """Sign and check the messages of this process, if its Ray has a token, once TransferQueue has been imported."""
    WhenImported("transfer_queue.utils.zmq_utils", _sign)


def are_signed() -> bool:
    """Whether the messages of this process are signed and checked."""
    from transfer_queue.utils.zmq_utils import ZMQMessage

    return hasattr(ZMQMessage, _MARK)


def code_of(key: bytes, frames: Sequence[Any]) -> bytes:
    """HMAC-SHA256 over the frames; of each its number of bytes (8, little-endian), then the bytes."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for frame in frames:
        code.update(memoryview(frame).nbytes.to_bytes(_LENGTH_BYTES, "little"))
        code.update(frame)
    return code.digest()


def _key() -> bytes | None:
    # upstream: ray._private.authentication.authentication_token_setup:AuthenticationTokenLoader
    from ray._raylet import AuthenticationTokenLoader

    token = AuthenticationTokenLoader.instance().get_raw_token()
    return hmac.digest(token.encode(), _LABEL, "sha256") if token else None


def _sign(zmq_utils: Any) -> None:
    key, message = _key(), zmq_utils.ZMQMessage
    if key is None or hasattr(message, _MARK):
        return
    # upstream: transfer_queue.utils.zmq_utils "result = decode(frames)"
    # upstream: transfer_queue.utils.zmq_utils:ZMQMessage.serialize(self)
    # upstream: transfer_queue.utils.zmq_utils:ZMQMessage.deserialize(frames)
    # upstream: transfer_queue.utils.zmq_utils:ZMQMessageDecodeError
    serialize, deserialize = message.serialize, message.deserialize.__func__

    def signed(self: Any) -> list[Any]:
        frames = serialize(self)
        return [*frames, code_of(key, frames)]

    def checked(cls: Any, frames: Sequence[Any]) -> Any:
        *content, code = frames or [b""]
        if not hmac.compare_digest(memoryview(code).tobytes(), code_of(key, content)):
            raise zmq_utils.ZMQMessageDecodeError("a message from outside this run")
        return deserialize(cls, content)

    message.serialize, message.deserialize = signed, classmethod(checked)
    setattr(message, _MARK, True)
