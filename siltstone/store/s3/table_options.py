"""What delta-rs needs to reach the same bucket as boto3: the same server, the same credentials, the same options."""

from typing import Any

import boto3
from botocore import exceptions as boto

from siltstone.errors import Unreachable
from siltstone.store.s3.client import S3Options, link

_regions: dict[tuple[S3Options, str], str] = {}
"""where each bucket is, as this process has found"""
_REGION = "us-east-1"
"""the region that servers other than AWS's own expect where none is named"""


def table_options(options: S3Options, bucket: str, what: str) -> dict[str, str]:
    """Return delta-rs' storage options for one open table; temporary credentials in them expire, so do not keep them.

    Commits to the log put an object only if its name is free (`conditional_put`), as this store does for its own.

    Args:
        bucket: the bucket's name.
        what: the store, as errors call it.

    Raises:
        UsageError: the profile does not exist, or the region or the endpoint is not valid.
        Unreachable: no credentials were found.
    """
    client = link(options, what).client
    try:
        found = boto3.Session(profile_name=options.profile).get_credentials()
        keys = None if found is None else found.get_frozen_credentials()
    except (boto.BotoCoreError, boto.ClientError) as error:
        raise Unreachable(f"cannot use {what}: {type(error).__name__}; check the AWS configuration") from None
    if keys is None or not keys.access_key or not keys.secret_key:
        raise Unreachable(
            f"cannot use {what}: no credentials were found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    endpoint = client.meta.endpoint_url
    own = ".amazonaws.com" not in endpoint
    style = client.meta.config.s3["addressing_style"]
    given = {
        "aws_access_key_id": keys.access_key,
        "aws_secret_access_key": keys.secret_key,
        "aws_session_token": keys.token,
        "aws_region": _find_region(options, bucket, what),
        "aws_endpoint_url": endpoint if own else None,
        "aws_allow_http": "true" if endpoint.startswith("http://") else None,
        "aws_virtual_hosted_style_request": "false" if style == "path" else "true",
        "aws_conditional_put": "etag",
        "aws_server_side_encryption": options.sse,
        "aws_sse_kms_key_id": options.kms_key,
        "max_retries": str(0 if options.retry == "none" else options.attempts - 1),
        "retry_timeout": f"{options.policy.total_s:g}s",
        "timeout": f"{options.timeout_s:g}s",
        "connect_timeout": f"{options.connect_timeout_s:g}s",
    }
    return {name: value for name, value in given.items() if value is not None}


def _find_region(options: S3Options, bucket: str, what: str) -> str:
    """Return the region of a bucket. boto3 follows a server to it, whatever the URL names; delta-rs does not."""
    key = options, bucket
    if key not in _regions:
        found = link(options, what)
        signed_for: list[str] = []

        def note(request: Any, region_name: str, **_: Any) -> None:
            signed_for.append(request.context.get("signing", {}).get("region") or region_name)

        events = found.client.meta.events
        events.register_last("before-sign.s3.ListObjectsV2", note)
        try:
            found.ask("list", what, "list_objects_v2", Bucket=bucket, MaxKeys=1)
        finally:
            events.unregister("before-sign.s3.ListObjectsV2", note)
        _regions[key] = signed_for[-1] if signed_for else found.client.meta.region_name or _REGION
    return _regions[key]
