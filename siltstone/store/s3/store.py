"""Objects in a bucket of S3 or a compatible server: `s3://bucket/prefix?region=...`.

An object is put on the condition that its name is free (`If-None-Match: *`), so exactly one of several writers of a
name wins; S3 shows an object completely or not at all (objects are written once: promise 6). Large objects are sent and
fetched in concurrent parts. Parts of an unfinished write take space until they are discarded: `list_unfinished` lists
them.

The URL's query is `S3Options`; credentials come from boto3's own chain and are never part of it.
"""

import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.base import Remark, Store, Unfinished
from siltstone.store.checksums import Checksum, checksum_of, compare, start_hash
from siltstone.store.paths import check_object_name, check_prefix
from siltstone.store.retry import Retrying, RetryPolicy
from siltstone.store.s3.client import ERRORS, MIB, Gone, S3Link, S3Options, link
from siltstone.store.s3.multipart import CHECKSUM, PARTS, Body, S3Writer, multipart
from siltstone.store.url import options_of, redact_url, split

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_DELETED_AT_ONCE = 1000  # S3's own limit
_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


def open_s3(url: str) -> Store:
    """Open the store at `s3://bucket[/prefix][?option=value&...]`, with retries and without I/O.

    Raises:
        UsageError: the URL, bucket, prefix or an option is not valid.
    """
    parts = split(url)
    if "@" in parts.netloc:
        raise UsageError("an s3:// URL has no credentials: set AWS_PROFILE, or the other variables that boto3 reads")
    options = options_of(url, S3Options)
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise UsageError(f"{redact_url(url)} names no bucket: write s3://BUCKET or s3://BUCKET/PREFIX")
    store = S3Store(url, parts.netloc, check_prefix(parts.path.strip("/")), options)
    return Retrying(store, options.policy)


class S3Store:
    """A `Store` of one bucket's objects below `prefix`; it holds only plain values, so that it can be sent to other
    processes."""

    ranged = True

    def __init__(
        self, url: str, bucket: str, prefix: str, options: S3Options, policy: RetryPolicy | None = None
    ) -> None:
        self.url = url
        self.label = redact_url(url)
        self.bucket = bucket
        self.prefix = prefix
        self.options = options
        self.policy = policy or options.policy
        self.checksums = options.checksums

    def __repr__(self) -> str:
        return f"S3Store({self.label!r})"

    def with_policy(self, policy: RetryPolicy) -> "S3Store":
        """Return the same store, with another policy for the requests within a call, such as parts of an object."""
        return S3Store(self.url, self.bucket, self.prefix, self.options, policy)

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        """Store a new object; if it is larger than `put_bytes`, in parts, each with its own retries."""
        key, what, view = self._key(check_object_name(name)), self._describe(name), memoryview(data).cast("B")
        checksum = checksum_of(view, self.checksums)
        if len(view) <= self.options.put_most_bytes:
            self._link().ask(
                "write",
                what,
                "put_object",
                Bucket=self.bucket,
                Key=key,
                Body=Body(view) if len(view) > MIB else bytes(view),  # bytes are sent with the request's headers
                IfNoneMatch="*",
                # The server checks this one; without it, it would compute a slower one itself.
                ChecksumCRC32=b64encode(zlib.crc32(view).to_bytes(4, "big")).decode(),
                Metadata={CHECKSUM: checksum},
                **self.options.stored_with,
            )
        else:
            size = max(self.options.part_bytes, -(-len(view) // PARTS))
            with multipart(self._link(), self.bucket, key, what, {CHECKSUM: checksum}) as upload:
                for start in range(0, len(view), size):
                    upload.add(view[start : start + size])
        return StoredObject(name, len(view), checksum)

    @contextmanager
    def create(self, name: str) -> Iterator[S3Writer]:
        """Write a new object piece by piece, with a few parts in memory; a small one is put in one request."""
        writer = S3Writer(
            self._link(), self.bucket, self._key(check_object_name(name)), self._describe(name), self.checksums
        )
        try:
            yield writer
            writer.closed = True
            if writer.upload is None:
                self.policy.put(self, name, memoryview(writer.rest))
            else:
                writer.complete()
        except BaseException:
            writer.abort()
            raise
        writer.stored = StoredObject(name, writer.bytes, writer.checksum.text())

    def read(self, stored: StoredObject) -> pa.Buffer:
        """Read a whole object and verify it; large ones in concurrent parts, hashed in order as they arrive."""
        what = self._describe(stored.name)
        checksum = start_hash(stored.checksum, what)
        data = self._fetch(stored.name, 0, stored.bytes, checksum)
        compare(checksum, stored.checksum, what)
        return data

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Read exactly `length` bytes at `offset`, in concurrent parts if they are many, without verifying them."""
        if length:
            return self._fetch(name, offset, length, None)
        key = self._key(check_object_name(name))
        found = self._link().ask("read", self._describe(name), "head_object", Bucket=self.bucket, Key=key)
        self._check_holds(name, found["ContentLength"], offset)
        return pa.py_buffer(b"")

    def _fetch(self, name: str, offset: int, length: int, checksum: Checksum | None) -> pa.Buffer:
        """Fetch bytes of an object into one buffer. With a checksum, `length` is the whole object, and bytes are added
        to the checksum."""
        what, asked = self._describe(name), {"Bucket": self.bucket, "Key": self._key(check_object_name(name))}
        connection = self._link()
        step = self.options.part_bytes if length > 2 * self.options.part_bytes else max(length, 1)
        ranges = [(start, min(start + step, length)) for start in range(0, length, step)] or [(0, 0)]

        def get(piece: tuple[int, int], **condition: str) -> dict[str, Any]:
            within = f"bytes={offset + piece[0]}-{offset + piece[1] - 1}"
            extra = {} if piece == (0, length) and checksum is not None else {"Range": within}
            return connection.ask("read", what, "get_object", **asked, **extra, **condition)

        def fill(piece: tuple[int, int]) -> None:
            answer = get(piece, IfMatch=etag)
            self._receive(answer, view[slice(*piece)], what)

        first = get(ranges[0])
        etag = first["ETag"]
        with closing(first["Body"]):
            self._check_holds(name, _total(first), length if checksum is not None else offset + length, checksum)
            data = pa.allocate_buffer(length)
            view = memoryview(data).cast("B")
            rest = [
                connection.pool.submit(connection.with_retries, lambda piece=piece: fill(piece)) for piece in ranges[1:]
            ]
            try:
                self._receive(first, view[slice(*ranges[0])], what)
                for piece, arrived in zip(ranges, [None, *rest], strict=True):
                    if arrived is not None:
                        arrived.result()
                    if checksum is not None:
                        checksum.update(view[slice(*piece)])
            finally:
                for future in rest:
                    future.cancel()
                wait(rest)
        return data

    def _receive(self, answer: dict[str, Any], into: memoryview, what: str) -> None:
        """Read an answer's body to its end, in steps that need no large copy."""
        body, done = answer["Body"], 0
        with closing(body):
            try:
                while done < len(into):
                    count = body.readinto(into[done : done + MIB])
                    if not count:
                        break
                    done += count
            except ERRORS as error:
                raise self._link().translate(error, "read", what, self.bucket) from None
        if done < len(into):
            raise Unreachable(f"cannot read {what}: the answer was cut; it may pass: try again", transient=True)

    def _check_holds(self, name: str, found: int, wanted: int, checksum: Checksum | None = None) -> None:
        """Raise CorruptObject unless `found` bytes are enough; with a checksum, they must equal `wanted`."""
        if checksum is not None and found != wanted:
            raise CorruptObject(f"{self._describe(name)} has {found} bytes instead of {wanted}")
        if found < wanted:
            raise CorruptObject(f"{self._describe(name)} has {found} bytes and should have {wanted}")

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every object whose name starts with `prefix`, in name order, page by page."""
        at, more = {}, True
        while more:
            page = self._page("list_objects_v2", prefix, **at)
            for found in page.get("Contents", ()):
                if (name := self._name(found["Key"])) is not None:
                    yield name, found["Size"]
            more = page.get("IsTruncated", False)
            at = {"ContinuationToken": page.get("NextContinuationToken")}

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """Return when each object was stored, by one HEAD request each, several at a time."""
        connection = self._link()

        def ask(name: str) -> datetime | None:
            place = {"Bucket": self.bucket, "Key": self._key(name)}
            with suppress(CorruptObject):  # missing
                found = connection.with_retries(
                    lambda: connection.ask("read", self._describe(name), "head_object", **place)
                )
                return found["LastModified"].astimezone(UTC)
            return None

        futures = {name: connection.pool.submit(ask, name) for name in map(check_object_name, names)}
        wait(futures.values())
        return {name: time for name, future in futures.items() if (time := future.result()) is not None}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, a thousand per request; a missing object is no error."""
        keys = [self._key(check_object_name(name)) for name in names]
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            batch = {"Objects": [{"Key": key} for key in keys[start : start + _DELETED_AT_ONCE]], "Quiet": True}
            answer = self._link().ask("delete from", self.label, "delete_objects", Bucket=self.bucket, Delete=batch)
            for refused in answer.get("Errors", ()):
                code = str(refused.get("Code", ""))
                if code != "NoSuchKey":
                    name = self._name(str(refused.get("Key", ""))) or "?"
                    raise Unreachable(
                        f"cannot delete {self._describe(name)}: the server answers {code}; check its permissions",
                        transient=code in ("InternalError", "SlowDown", "ServiceUnavailable"),
                    )

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """List multipart uploads that were neither completed nor aborted.

        At most a page (a thousand) of one name is listed; the next ones follow when these are discarded.
        """
        at, more = {}, True
        while more:
            page = self._page("list_multipart_uploads", prefix, **at)
            uploads, more = page.get("Uploads", []), page.get("IsTruncated", False)
            if more:  # a page must begin after a name's last upload: not every server supports UploadIdMarker
                uploads = [found for found in uploads if found["Key"] != uploads[-1]["Key"]] or uploads
                at = {"KeyMarker": uploads[-1]["Key"]}
            for found in uploads:
                if (name := self._name(found["Key"])) is not None:
                    yield Unfinished(f"{name} {found['UploadId']}", name, found["Initiated"].astimezone(UTC))

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Abort multipart uploads; a writer that still has one can no longer complete it."""
        for write in unfinished:
            name, _, upload = write.token.partition(" ")
            key = self._key(check_object_name(name))
            with suppress(Gone):
                self._link().ask(
                    "discard",
                    self._describe(name),
                    "abort_multipart_upload",
                    Bucket=self.bucket,
                    Key=key,
                    UploadId=upload,
                )

    def check(self, *, writable: bool) -> None:
        """Check that the bucket answers and, if `writable`, that an upload can begin, which is aborted at once.

        It uses a listing, not HEAD, since refusals of HEAD give no reason.
        """
        self._link().ask("use", self.label, "list_objects_v2", Bucket=self.bucket, Prefix=self._key(""), MaxKeys=1)
        if writable:
            place = {"Bucket": self.bucket, "Key": self._key("check")}
            begun = self._link().ask(
                "write", self.label, "create_multipart_upload", **place, **self.options.stored_with
            )
            self._link().ask("write", self.label, "abort_multipart_upload", **place, UploadId=begun["UploadId"])

    def remarks(self) -> Sequence[Remark]:
        """Return none: S3 does not report its space."""
        return ()

    def _page(self, operation: str, prefix: str, **at: Any) -> dict[str, Any]:
        """Return one page of a listing, with retries."""
        connection, under = self._link(), self._key(check_prefix(prefix))
        return connection.with_retries(
            lambda: connection.ask("list", self.label, operation, Bucket=self.bucket, Prefix=under, **at)
        )

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _name(self, key: str) -> str | None:
        """Return the object's name for a key; None for a key that no store made, such as a console's `folder/`."""
        name = key.removeprefix(self._key(""))
        try:
            return check_object_name(name)
        except UsageError:
            return None

    def _describe(self, name: str) -> str:
        return f"object {name} in {self.label}"

    def _link(self) -> S3Link:
        return replace(link(self.options, self.label), policy=self.policy)


def _total(answer: dict[str, Any]) -> int:
    """Return the size of the whole object from an answer for it or for a range of it."""
    found = _RANGE.fullmatch(answer.get("ContentRange", ""))
    return int(found[1]) if found else answer["ContentLength"]
