"""Several commands of the real command line, one after the other in one process, on one JVM.

    python -m tests.fault.series '[["run", "small", "--batches", "1"], ["materialize", "small"]]'

Tells on standard error, before each, that it has begun. Ends with the exit code of the first that failed.
"""

import json
import sys

from siltstone import cli
from tests.fault.pruning import prune_early

BEGUN = "begun: "


def main() -> None:
    """All of them."""
    prune_early()
    for arguments in json.loads(sys.argv[1]):
        print(BEGUN + " ".join(arguments), file=sys.stderr, flush=True)
        sys.argv = ["siltstone", *arguments]
        try:
            cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            if end.code:
                raise


if __name__ == "__main__":
    main()
