"""What Spark writes into its offset log for one batch: a version, a line with its options, an offset per source."""

import json

OFFSETS = "\n".join(
    [
        "v1",
        json.dumps(
            {
                "batchWatermarkMs": 0,
                "batchTimestampMs": 1700000000000,
                "conf": {f"spark.sql.streaming.some.option{n:02d}": f"org.apache.spark.Value{n}" for n in range(20)},
            },
            separators=(",", ":"),
        ),
        '{"logOffset":0}',
    ]
)
