"""Requests to S3: the URL's options, one pooled client per process, and translation of errors.

Credentials come from boto3's own chain (environment, profile, instance) and are never part of a URL.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.parsers import ResponseParserError
from pydantic import Field, field_validator
from urllib3.exceptions import HTTPError

from siltstone.errors import CorruptObject, ObjectExists, SiltstoneError, Unreachable, UsageError
from siltstone.store.retry import RetryPolicy
from siltstone.store.url import StoreOptions, redact_url

MIB = 1 << 20
PARALLEL = 8
"""parts sent at a time, by one process to one store"""

_CREDENTIALS = "check AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and their permissions"
_HINTS = {
    "PermanentRedirect": "the bucket is in another region: name it with ?region=",
    "AuthorizationHeaderMalformed": "the bucket is in another region: name it with ?region=",
    "IllegalLocationConstraintException": "the bucket is in another region: name it with ?region=",
    "RequestTimeTooSkewed": "set this machine's clock",
    "NotImplemented": "the server lacks what this needs: conditional writes and multipart uploads",
    "InvalidBucketName": "check the bucket's name",
    "InvalidStorageClass": "check the option storage_class",
    "InvalidObjectState": "it is archived: restore it first",
}
_PASSING = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequestsException"}
_PASSING_STATUS = {409, 429}  # 409: a concurrent request for the name or its folder
_REFUSALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "XAdminUserNotFound"}
_LASTING_5XX = {501, 505, 507}
_CONNECTION_ERRORS = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, HTTPError, OSError)
ERRORS = (boto.BotoCoreError, boto.ClientError, ResponseParserError, *_CONNECTION_ERRORS)
"""errors that boto3 raises"""

Answer = TypeVar("Answer")


class S3Options(StoreOptions):
    """The query of an `s3://` URL."""

    endpoint: str | None = Field(None, description="URL of a server other than AWS's own")
    region: str | None = Field(None, description="region of the bucket")
    profile: str | None = Field(None, description="profile of the AWS configuration files")
    sse: Literal["AES256", "aws:kms"] | None = Field(None, description="server-side encryption")
    kms_key: str | None = Field(None, description="id of the key for sse=aws:kms")
    storage_class: str | None = Field(None, description="storage class of new objects")
    part_bytes: int = Field(8 * MIB, ge=5 * MIB, le=1024 * MIB, description="bytes of a part of a large object")
    put_bytes: int | None = Field(
        None, ge=0, le=5120 * MIB, description="largest object put in one request: two parts, with an endpoint 100 MiB"
    )
    path_style: bool | None = Field(None, description="bucket in the path, not the host; default with an endpoint")

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        parts = urlsplit(endpoint or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
            raise ValueError("write http://HOST:PORT or https://HOST:PORT, without credentials")
        return endpoint

    @property
    def put_most_bytes(self) -> int:
        """The largest object that is put in one request, in bytes.

        Many concurrent parts make AWS fast, but cost another server more than they gain.
        """
        if self.put_bytes is not None:
            return self.put_bytes
        return 2 * self.part_bytes if self.endpoint is None else 100 * MIB

    @property
    def stored_with(self) -> dict[str, str]:
        """Request parameters for new objects."""
        wanted = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.kms_key,
            "StorageClass": self.storage_class,
        }
        return {name: value for name, value in wanted.items() if value is not None}


@dataclass(frozen=True)
class S3Link:
    """One process's client with its pooled connections, its threads for parts, and the policy of requests in a call."""

    client: Any
    pool: ThreadPoolExecutor
    options: S3Options
    policy: RetryPolicy

    def ask(self, verb: str, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Send one request; `verb` and `what`, such as "read" and "object a in s3://b", go into its errors.

        Raises:
            CorruptObject: the object is missing, too short, or not the one of `IfMatch`.
            ObjectExists: the condition `IfNoneMatch` failed.
            UsageError: the bucket is missing, or an option is not valid.
            Unreachable: anything else.
        """
        try:
            return getattr(self.client, operation)(**parameters)
        except ERRORS as error:
            raise self.translate(error, verb, what, parameters["Bucket"]) from None

    def translate(self, error: Exception, verb: str, what: str, bucket: str) -> SiltstoneError:
        """Translate an error of boto3; the message contains no key, secret, query, or text from the server."""
        server = redact_url(self.client.meta.endpoint_url)
        cannot = f"cannot {verb} {what}"
        if isinstance(error, boto.ClientError):
            return _refused_error(error, verb, what, bucket, server)
        if isinstance(error, ResponseParserError):
            return Unreachable(f"{cannot}: {server} does not answer as S3 does; check the endpoint")
        if isinstance(error, boto.SSLError):
            return Unreachable(f"{cannot}: no TLS with {server}; check its scheme and certificate")
        if isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError)):
            return Unreachable(f"{cannot}: {server} does not answer in time; check it", transient=True)
        if isinstance(error, _CONNECTION_ERRORS):
            message = f"{cannot}: {server} cannot be reached; check the endpoint and the network"
            return Unreachable(message, transient=True)
        return _unusable_error(error, cannot)

    def with_retries(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` with the link's retry policy, within a larger call; the final error is not transient."""
        try:
            return self.policy.call(function)
        except Unreachable as error:
            if not error.transient:
                raise
            raise Unreachable(f"{error}; gave up after {self.policy.attempts} attempts") from None


class Gone(Unreachable):
    """The multipart upload does not exist: it was aborted, or is complete."""


def _unusable_error(error: Exception, cannot: str) -> SiltstoneError:
    """Make the error for what this machine's configuration lacks."""
    if isinstance(error, boto.ProfileNotFound):
        name = error.kwargs.get("profile")
        return UsageError(f"{cannot}: AWS profile {name!r} does not exist; check ?profile= and AWS_PROFILE")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return Unreachable(
            f"{cannot}: no credentials were found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, (boto.ParamValidationError, boto.NoRegionError, boto.InvalidRegionError, ValueError)):
        return UsageError(f"{cannot}: the bucket's name, the region or the endpoint is not valid; check the URL")
    return Unreachable(f"{cannot}: {type(error).__name__}; check the AWS configuration")


def _refused_error(error: boto.ClientError, verb: str, what: str, bucket: str, server: str) -> SiltstoneError:
    """Make the error for the server's answer."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    cannot = f"cannot {verb} {what}"
    if code in _REFUSALS or (status in (401, 403) and code not in _HINTS):
        return Unreachable(f"{cannot}: {server} refuses the credentials ({code})", advice=_CREDENTIALS)
    if code == "NoSuchBucket":
        return UsageError(f"bucket {bucket} at {server} does not exist: make it, or check --warehouse and the endpoint")
    if code == "NoSuchUpload":
        return Gone(f"{cannot}: its parts were discarded meanwhile; start it again")
    if verb == "read" and status == 404:
        return CorruptObject(f"{what} is missing")
    if status == 416:
        return CorruptObject(f"{what} ends before the bytes to be read")
    if status == 412 and verb == "read":
        return CorruptObject(f"{what} was altered while it was read")
    if status == 412:
        return ObjectExists(f"{what} already exists: objects are written once")
    transient = status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_5XX) or code in _PASSING
    hint = _HINTS.get(code, "it may pass: try again" if transient else "check the server and the options of the URL")
    return Unreachable(f"{cannot}: {server} answers {status} {code}", advice=hint, transient=transient)


_links: dict[tuple[S3Options, frozenset[tuple[str, str]]], S3Link] = {}
_guard = threading.Lock()
_KEPT = 16


def link(options: S3Options, what: str) -> S3Link:
    """Return this process's link for the options and the current `AWS_` environment.

    Raises:
        UsageError: the profile is unknown, or the endpoint or region is not valid.
        Unreachable: the AWS configuration cannot be used.
    """
    key = options, frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))
    found = _links.get(key)
    if found is not None:
        return found
    with _guard:
        if key not in _links:
            if len(_links) >= _KEPT:  # for example because session tokens in the environment are renewed
                _links.clear()
            try:
                client = _client(options)
            except (boto.BotoCoreError, boto.ClientError, ValueError) as error:
                raise _unusable_error(error, f"cannot use {what}") from None
            pool = ThreadPoolExecutor(PARALLEL, "siltstone-s3")
            _links[key] = S3Link(client, pool, options, options.policy)
        return _links[key]


def _forget() -> None:
    """Reset in a forked child, which must not share connections, threads or locks with its parent."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _links.clear()


os.register_at_fork(after_in_child=_forget)


def _send_small_at_once(params: dict[str, Any], **_: Any) -> None:
    """Send a small body together with its headers.

    boto3 would ask for permission first (`Expect`), which costs a round trip, and a second of waiting if the server
    does not answer.
    """
    if isinstance(params.get("body"), BytesIO):  # boto3 converts bytes to this
        params["headers"].pop("Expect", None)


def _client(options: S3Options) -> Any:
    session = boto3.Session(profile_name=options.profile, region_name=options.region)

    def make(addressing: str) -> Any:
        config = Config(
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.timeout_s,
            max_pool_connections=32,
            tcp_keepalive=True,
            retries={"total_max_attempts": 1, "mode": "standard"},  # only `store.retry` retries
            # Our checksum is verified at each read, so boto3's would only cost time.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": addressing},
        )
        client = session.client("s3", endpoint_url=options.endpoint, config=config)
        client.meta.events.register_last("before-call.s3", _send_small_at_once)
        return client

    if options.path_style is not None:
        return make("path" if options.path_style else "virtual")
    client = make("path" if options.endpoint else "auto")
    named = options.endpoint is None and ".amazonaws.com" not in client.meta.endpoint_url
    return make("path") if named else client  # an endpoint from the environment or a profile
