"""Cases of the S3 store: a fresh bucket on each server."""

import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3

from tests import servers

if TYPE_CHECKING:
    from tests.store_cases import Case


@cache
def raw_client(server: servers.S3Server) -> Any:
    """A plain boto3 client, to reach behind the store."""
    return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")


def fresh_bucket(server: servers.S3Server) -> tuple[Any, str]:
    """A client and a bucket that holds nothing."""
    client, bucket = raw_client(server), f"test-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    return client, bucket


def _case(server: servers.S3Server) -> "Case":
    from tests.store_cases import Case  # which names the cases made here

    client, bucket = fresh_bucket(server)

    def alter(name: str, data: bytes | None) -> None:
        behind = {"Bucket": bucket, "Key": f"warehouse/one/{name}"}
        if data is None:
            client.delete_object(**behind)
        else:
            client.put_object(**behind, Body=data)

    return Case(f"s3://{bucket}/warehouse/one?endpoint={server.endpoint}&region=us-east-1", alter)


def moto(_tmp_path: Path) -> "Case":
    return _case(servers.moto())


def versitygw(_tmp_path: Path) -> "Case":
    return _case(servers.versitygw())


def factories() -> dict[str, Any]:
    """The cases this machine can have: without Go and without the binary there is no versitygw."""
    found = {"s3-moto": moto}
    if servers.versitygw_binary() is not None or shutil.which("go"):
        found["s3-versitygw"] = versitygw
    return found
