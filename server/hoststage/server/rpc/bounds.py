"""How much one message may list.

Messages are taken in on the loop, entry by entry. A message of many megabytes can name millions of entries, and while they were looked at nobody else
would be served. What a sound client sends in one message is far less.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hoststage.server.contract import RequestError
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane

MOST_ENTRIES = 1 << 16
"""Messages within one message: ranges, lists of slots, inline pages."""
MOST_NUMBERS = 1 << 20
"""Numbers in all lists of one message: slots, generations, offsets."""
MOST_RELEASED = lane.MAX_RELEASED
"""Loads and pins of one release: they are looked up one by one."""
MOST_TOUCHED = 1 << 17
"""Slots of one touch, of all pools."""
_SMALL_BYTES = 1 << 15
"""A message that is no larger can list no more than is looked at in a few milliseconds."""


def check(message: pb.ClientMessage) -> None:
    """Check that a message lists no more than is looked at quickly. Raises `RequestError`."""
    if message.ByteSize() <= _SMALL_BYTES:
        return
    _Count().take(message, "")
    if message.HasField("release"):
        _most("release", len(message.release.load_ids) + len(message.release.pins), MOST_RELEASED)
    elif message.HasField("touch"):
        _most("touch.slots", sum(len(entry.slots) for entry in message.touch.slots), MOST_TOUCHED)


def _most(field: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            "TOO_MANY_ENTRIES",
            f"{field} brings the entries of one message to {count}, at most {most} are allowed",
            code="RESOURCE_EXHAUSTED",
            field=field,
            remedy="split the request",
        )


class _Count:
    """What the lists of one message hold together."""

    def __init__(self) -> None:
        self.entries = self.numbers = 0

    def take(self, message: Message, at: str) -> None:
        for field, value in message.ListFields():
            name = f"{at}.{field.name}" if at else field.name
            is_message = field.type == FieldDescriptor.TYPE_MESSAGE
            # Asking the descriptor whether it is a list is deprecated in some versions of protobuf, and lacking in others.
            if not hasattr(value, "append"):
                if is_message:
                    self.take(value, name)
                continue
            self._add(name, len(value), is_message)
            if is_message:
                for each in value:
                    self.take(each, name)

    def _add(self, name: str, count: int, is_message: bool) -> None:
        if is_message:
            self.entries += count
            _most(name, self.entries, MOST_ENTRIES)
        else:
            self.numbers += count
            _most(name, self.numbers, MOST_NUMBERS)
