"""The base class of operations' results: frozen values that print as one JSON object."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What one operation did or found. Field names carry their units, as `seconds` and `bytes` do."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, nested ones too."""
        return asdict(self)

    def to_json(self) -> str:
        """Return one JSON object on one line, which `--json` prints."""
        return json.dumps(self.to_dict())
