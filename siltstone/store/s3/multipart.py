"""Multipart objects in S3: written piece by piece, with parts sent in parallel, complete or absent."""

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pyarrow as pa

from siltstone.errors import CorruptObject, ObjectExists, SiltstoneError, Unreachable
from siltstone.model import StoredObject
from siltstone.store.checksums import Checksum
from siltstone.store.s3.client import MIB, S3Link

CHECKSUM = "siltstone-checksum"
"""name of our checksum in an object's metadata, only for people: anyone who replaces an object can replace it, too"""
_WRITE = "siltstone-write"
_IN_FLIGHT = 4  # parts that a writer keeps in memory until they are sent
PARTS = 10_000
"""S3's own limit"""


class Body:
    """Bytes to send without a copy, as a file, since boto3 does not accept a memoryview."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, count: int = -1) -> memoryview:
        """Read the next bytes: more than `count`, since one system call per 16 KiB is slow."""
        stop = len(self._data) if count < 0 else self._at + max(count, MIB)
        piece = self._data[self._at : stop]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move the read offset, relative to the start, the current offset, or the end."""
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        """Return the read offset."""
        return self._at


def part_bytes(wanted: int, part: int) -> int:
    """Return the bytes of part number `part` (from 0) of an object of unknown size: `wanted` at first, then growing."""
    return wanted * (1 + part // 1000)


class Multipart:
    """One multipart upload in progress. `add` sends a part in the background, `complete` ends it.

    Each request is retried by the link's policy.
    """

    def __init__(self, link: S3Link, bucket: str, key: str, what: str, metadata: dict[str, str]) -> None:
        self._link = link
        self._what = what
        self._object = {"Bucket": bucket, "Key": key}
        self._mark = uuid.uuid4().hex
        self._sent: list[Future[str]] = []
        self._done = 0
        self._aborted = False
        metadata = {**metadata, _WRITE: self._mark}
        begun = self._ask("create_multipart_upload", Metadata=metadata, **link.options.stored_with, **self._object)
        self._upload = {**self._object, "UploadId": begun["UploadId"]}

    def add(self, data: memoryview) -> None:
        """Send the next part; `data` must not change before the end.

        Raises:
            Unreachable: S3 accepts no more parts.
        """
        if len(self._sent) == PARTS:
            raise Unreachable(f"cannot write {self._what}: it has more than {PARTS} parts; raise the option part_bytes")
        self._sent.append(self._link.pool.submit(self._send, len(self._sent) + 1, data))

    def wait(self, count: int) -> None:
        """Wait until at most the last `count` parts are still being sent.

        Raises:
            Unreachable: an earlier part failed.
        """
        while len(self._sent) - self._done > count:
            self._sent[self._done].result()
            self._done += 1

    def complete(self) -> None:
        """Make the object appear, with all parts sent.

        Raises:
            ObjectExists: the name was taken meanwhile.
            Unreachable: a part failed, or the upload was discarded; nothing is stored.
        """
        parts = [{"PartNumber": i, "ETag": sent.result()} for i, sent in enumerate(self._sent, 1)]
        failure: SiltstoneError | None = None
        try:
            self._ask("complete_multipart_upload", MultipartUpload={"Parts": parts}, IfNoneMatch="*", **self._upload)
        except Unreachable as error:
            failure = error
        # An answer may be lost, and a server may report success although another writer has the name.
        owner = self._owner()
        if owner == self._mark:
            return
        if owner is not None:
            raise ObjectExists(f"{self._what} already exists: objects are written once") from failure
        raise failure or Unreachable(
            f"cannot write {self._what}: it is missing after all its parts were sent; start it again"
        )

    def abort(self) -> None:
        """Free the space of the parts; if the server does not answer, `list_unfinished` lists the upload.

        This is tried no longer than the store's options say, even for an upload that is tried for longer.
        """
        self._aborted = True
        for future in self._sent:
            future.cancel()
        wait(self._sent)
        with suppress(SiltstoneError):
            ask = partial(self._link.ask, "write", self._what, "abort_multipart_upload", **self._upload)
            self._link.options.policy.call(ask)

    def _owner(self) -> str | None:
        """Return the mark of the write that made the object; None if there is no object, "" if it has no mark."""
        try:
            return self._ask("head_object", "read", **self._object).get("Metadata", {}).get(_WRITE, "")
        except CorruptObject:
            return None

    def _send(self, number: int, data: memoryview) -> str:
        def attempt() -> dict[str, Any]:  # each attempt needs a new body
            if self._aborted:
                raise Unreachable(f"cannot write {self._what}: the upload was aborted; start it again")
            return self._link.ask(
                "write", self._what, "upload_part", PartNumber=number, Body=Body(data), **self._upload
            )

        return self._link.with_retries(attempt)["ETag"]

    def _ask(self, operation: str, verb: str = "write", **parameters: Any) -> dict[str, Any]:
        return self._link.with_retries(lambda: self._link.ask(verb, self._what, operation, **parameters))


@contextmanager
def multipart(link: S3Link, bucket: str, key: str, what: str, metadata: dict[str, str]) -> Iterator[Multipart]:
    """Begin a multipart upload; complete it when the block succeeds, abort it on any error."""
    upload = Multipart(link, bucket, key, what, metadata)
    try:
        yield upload
        upload.complete()
    except BaseException:
        upload.abort()
        raise


class S3Writer:
    """`ObjectWriter` that keeps one part in memory; the first part that is not the last begins a multipart upload."""

    def __init__(self, link: S3Link, bucket: str, key: str, what: str, checksums: str) -> None:
        self.stored: StoredObject | None = None
        self.closed = False
        self.bytes = 0
        self.checksum = Checksum(checksums)
        self.rest = bytearray()
        """bytes that are not in a part yet"""
        self.upload: Multipart | None = None
        self._place = link, bucket, key, what
        self._parts = 0

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes; Unreachable if a part could not be sent."""
        if self.closed:
            raise ValueError(f"{self._place[3]} is already closed")
        view = memoryview(data).cast("B")
        self.checksum.update_beside(view)
        self.bytes += len(view)
        done = 0
        while done < len(view):
            limit = part_bytes(self._place[0].options.part_bytes, self._parts)
            if len(self.rest) == limit:
                self._hand_over()
                continue
            piece = view[done : done + limit - len(self.rest)]
            self.rest += piece
            done += len(piece)
        self.checksum.join()
        return len(view)

    def flush(self) -> None:
        """Do nothing: data is durable only once the block ends."""

    def complete(self) -> None:
        """Send the last part and make the object appear; an upload must have begun."""
        assert self.upload is not None
        self._hand_over()
        self.upload.complete()

    def abort(self) -> None:
        """Abort the upload, if one has begun."""
        self.closed = True
        if self.upload is not None:
            self.upload.abort()

    def _hand_over(self) -> None:
        if self.upload is None:
            self.upload = Multipart(*self._place, metadata={})
        self.upload.wait(_IN_FLIGHT - 1)
        self.upload.add(memoryview(self.rest))
        self.rest = bytearray()
        self._parts += 1
