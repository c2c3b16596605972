"""Kills, freezes and starves processes of every kind, resumes them, and proves that nothing was lost or doubled.

    python tests/fault/harness.py --kills 200 [--seed N] [--process-kinds all|run,materialize,...]
                                  [--warehouse-kind filesystem|s3|redis|rocksdb|all]  (cassandra with CASSANDRA_JARS)
                                  [--catalog-kind sqlite|postgresql|all] [--shapes all|kill,two,...]

Prints a table of what was done to each kind of process; ends with 1, and the seed to repeat, if a promise was broken.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from tests.fault.campaign import main

    sys.exit(main())
