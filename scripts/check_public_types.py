"""Check that type checkers know the type of every public name of siltstone (`pyright --verifytypes`)."""

import json
import subprocess
import sys
from pathlib import Path

import siltstone
from siltstone import StreamClient


def main() -> int:
    """Print the names whose types are unknown or ambiguous; return 1 if there are any."""
    pyright = Path(sys.executable).with_name("pyright")
    command = [
        pyright,
        "--pythonpath",
        sys.executable,
        "--verifytypes",
        "siltstone",
        "--ignoreexternal",
        "--outputjson",
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    symbols = json.loads(report)["typeCompleteness"]["symbols"]
    public = [getattr(siltstone, name) for name in siltstone.__all__]
    names = {f"{each.__module__}.{each.__qualname__}" for each in (*public, *StreamClient.__bases__)}
    ours = [each for each in symbols if any(each["name"] == n or each["name"].startswith(f"{n}.") for n in names)]
    if not names <= {each["name"] for each in ours}:
        print(f"pyright does not report {', '.join(sorted(names - {each['name'] for each in ours}))}")
        return 1
    unknown = [each for each in ours if not each["isTypeKnown"] or each["isTypeAmbiguous"]]
    for each in unknown:
        print(each["name"], *(found["message"] for found in each["diagnostics"]), sep=": ")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
