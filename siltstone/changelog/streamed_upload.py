"""Write an object piece by piece, and store it on another thread, so that its writer never waits longer than it may.

UploadWriter      keeps the first bytes in memory, since an object that has no more is sent in one request
StreamedUpload    the pieces of a larger one on their way to the thread that stores them
"""

import threading
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from siltstone.errors import SiltstoneError
from siltstone.model import StoredObject
from siltstone.store.base import Store

HELD_BYTES = 8 << 20
"""an object of more bytes is streamed"""
_PIECE_BYTES = 1 << 20
_QUEUED = 4
"""pieces that wait for the store, at most"""
_ABORT_WAIT_S = 30.0
"""seconds to wait until a store has discarded what an aborted upload wrote"""


class _Aborted(Exception):
    """The writer gave the object up."""


class NotAnswered(Exception):
    """The store took nothing for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer for {limit_s:g} s")
        self.limit_s = limit_s


class StreamedUpload:
    """One object on its way: `send` pieces, then `finish`, or `abort`. `run` is for the thread that stores it.

    Until the store has all of it, nothing of the object is visible. An upload that hangs keeps its thread and pieces
    until the store answers. Then it ends without an object, unless it hung in its very last request.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[memoryview] = deque()
        self._complete = self._aborted = self._ended = False
        self._stored: StoredObject | None = None
        self._error: BaseException | None = None

    def run(self, store: Store, name: str) -> None:
        """Store the object, to its end."""
        stored, failed = None, None
        try:
            with store.create(name) as out:
                while (piece := self._take_piece()) is not None:
                    out.write(piece)
            stored = out.stored
        except BaseException as error:
            failed = error
        with self._changed:
            self._stored, self._error, self._ended = stored, failed, True
            self._pieces.clear()
            self._changed.notify_all()

    def send(self, piece: memoryview, limit_s: float) -> None:
        """Have the next bytes stored; `piece` must not change any more.

        Raises:
            NotAnswered: the store took nothing for `limit_s`.
            SiltstoneError: the store failed.
        """
        self._wait_for_room(limit_s)
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def finish(self, limit_s: float) -> StoredObject:
        """Make the object appear, with all pieces sent.

        Raises:
            NotAnswered: the store did not answer for `limit_s`.
            SiltstoneError: the store failed.
        """
        with self._changed:
            self._complete = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended, limit_s):
                self._aborted = True
                raise NotAnswered(limit_s)
            if self._stored is None:
                raise self._error or SiltstoneError("an upload ended without its object")
            return self._stored

    def abort(self) -> None:
        """Give the object up, and wait a little until the store has discarded it, unless it was waited for before."""
        with self._changed:
            if self._aborted:
                return
            self._aborted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended, _ABORT_WAIT_S)

    def _wait_for_room(self, limit_s: float) -> None:
        with self._changed:

            def has_room() -> bool:
                return self._ended or len(self._pieces) < _QUEUED

            if self._aborted or not self._changed.wait_for(has_room, limit_s):
                self._aborted = True
                raise NotAnswered(limit_s)
            if self._error is not None:
                raise self._error

    def _take_piece(self) -> memoryview | None:
        """Return the next piece, waiting for it; None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._pieces or self._complete)
            if self._aborted:
                raise _Aborted
            if not self._pieces:
                return None
            self._changed.notify_all()
            return self._pieces.popleft()


class UploadWriter:
    """`ObjectWriter` of an object that may become a `StreamedUpload`.

    Args:
        begin: begins a streamed upload; returns it and the seconds that it may wait for the store.
    """

    def __init__(self, begin: Callable[[], tuple[StreamedUpload, float]]) -> None:
        self.stored: StoredObject | None = None
        self.closed = False
        self.held = bytearray()
        """bytes that are not sent yet"""
        self.upload: StreamedUpload | None = None
        """None until there are more than `HELD_BYTES`"""
        self._begin = begin
        self._limit_s = 0.0

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes.

        Raises:
            NotAnswered: the store took nothing in time.
            Unreachable: the store failed.
        """
        view = memoryview(data).cast("B")
        size = len(view)
        while len(view):
            room = (HELD_BYTES if self.upload is None else _PIECE_BYTES) - len(self.held)
            if not room:
                self._send()
                continue
            self.held += view[:room]
            view = view[room:]
        return size

    def flush(self) -> None:
        """Do nothing: data is durable only once the block ends."""

    def finish(self) -> StoredObject:
        """Send the rest of a streamed upload, and have its object appear; raises what `StreamedUpload` does."""
        self._send()
        assert self.upload is not None
        return self.upload.finish(self._limit_s)

    def _send(self) -> None:
        if self.upload is None:
            self.upload, self._limit_s = self._begin()
        self.upload.send(memoryview(self.held), self._limit_s)
        self.held = bytearray()
