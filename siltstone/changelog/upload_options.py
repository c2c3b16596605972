"""Options of uploads: batches, threads, retries, hedging. Names and defaults are those of Flink's `dstl.dfs.*`.

[upload]
persist_delay_s = 0.05
hedging = false
"""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class UploadOptions(BaseModel):
    """Options of one process's `Uploader`; unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    persist_delay_s: float = Field(
        default=0.01, ge=0, le=60, description="how long a request waits for others of its process to share an object"
    )
    size_threshold_bytes: int = Field(
        default=10 << 20, ge=1, description="requests that wait are sent at once when they are so large together"
    )
    preemptive_persist_bytes: int = Field(
        default=5 << 20, ge=1, description="changes not yet stored that make a writer store them before it is asked"
    )
    in_flight_bytes: int = Field(
        default=100 << 20, ge=1, description="bytes that may wait or be under way; more make their writer wait"
    )
    upload_threads: int = Field(default=5, ge=1, le=256, description="objects that are sent at a time")
    compression: bool = Field(default=True, description="compress the blocks of changes with zstd")
    inline_bytes: int = Field(
        default=16 << 10, ge=0, description="smaller segments go to the driver, which stores them together"
    )
    checkpoint_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds for which an upload that a checkpoint needs is tried again while the store is away; after "
        "that, the run goes back to its newest checkpoint",
    )
    hedging: bool = Field(default=True, description="send a slow request again, and take the first answer")
