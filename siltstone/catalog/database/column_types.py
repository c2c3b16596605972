"""Column types that every database of a catalog stores alike: times in UTC, JSON as text, and packed text."""

import json
from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, LargeBinary, Text, TypeDecorator

from siltstone.catalog.database.packing import pack, unpack
from siltstone.times import as_utc


class UtcTime(TypeDecorator[datetime]):
    """A time, stored and read in UTC; SQLite stores no zone, PostgreSQL returns the session's."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC."""
        return None if value is None else as_utc(value)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert from UTC."""
        return None if value is None else as_utc(value)


class Json(TypeDecorator[dict[str, Any]]):
    """A JSON object as plain text, the same in every database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Convert to text; NaN and infinity are not JSON and are refused."""
        return None if value is None else json.dumps(value, allow_nan=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, Any] | None:
        """Convert from text."""
        return None if value is None else json.loads(value)


class Packed(TypeDecorator[str]):
    """Compressed text (`packing`)."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """Convert to bytes."""
        return None if value is None else pack(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """Convert from bytes."""
        return None if value is None else unpack(value)


class PackedJson(TypeDecorator[dict[str, Any]]):
    """A compressed JSON object (`packing`)."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        """Convert to bytes; NaN and infinity are not JSON and are refused."""
        return None if value is None else pack(json.dumps(value, allow_nan=False))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> dict[str, Any] | None:
        """Convert from bytes."""
        return None if value is None else json.loads(unpack(value))
