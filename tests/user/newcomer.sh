#!/usr/bin/env bash
# From `pip install` to a stream of one's own in Dagster, as a person types it, in an empty directory and an activated
# virtual environment: 8 commands, 3 edits, 21 lines. tests/user/test_newcomer.py runs it and counts.
set -euo pipefail

pip install 'siltstone[spark,dagster]'
siltstone init shop
cd shop
make demo # a stream over sample data, each of its checkpoints proven
make test

# A stream of one's own: what it reads,
mkdir visits
cat > visits/monday.json <<'EDIT'
{"page": "home", "seconds": 4}
{"page": "shop", "seconds": 31}
{"page": "home", "seconds": 7}
EDIT

# what it keeps,
cat > streams/visits.py <<'EDIT'
"""How often and how long each page was looked at."""

import pyarrow as pa

import siltstone as st


def visits(spark, options):
    return spark.readStream.schema("page string, seconds long").json(options["path"])


PAGES = st.Aggregate(
    "pages",
    key={"page": pa.string()},
    aggregates=[st.Count("visits"), st.Sum("seconds", of="seconds")],
)
VISITS = st.Stream("visits", source=visits, operators=[PAGES], options={"path": "visits"})
EDIT

# and that the project has it.
cat >> streams/__init__.py <<'EDIT'
from streams.visits import VISITS
EDIT

siltstone run visits
make ui # http://127.0.0.1:3000: Jobs, visits, Launchpad, Launch
