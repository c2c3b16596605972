"""NEXMark: 23 queries over an online auction house (`events`), as streams `nexmark-q0` to `nexmark-q22`.

They follow the Flink version (`docs/nexmark.md` tells where they differ). Where rows are equal in what they are ranked
by, a further column decides, so that an answer does not depend on micro-batches. In `siltstone.toml`:

    streams = ["./streams/nexmark"]
"""

from .joins import Q3, Q4, Q6, Q9, Q13, Q20
from .ranks import Q18, Q19
from .stateless import Q0, Q1, Q2, Q10, Q14, Q21, Q22
from .windows import Q5, Q7, Q8, Q11, Q12, Q15, Q16, Q17

QUERIES = (
    Q0, Q1, Q2, Q3, Q4, Q5, Q6, Q7, Q8, Q9, Q10, Q11, Q12, Q13, Q14, Q15, Q16, Q17, Q18, Q19, Q20, Q21, Q22
)  # fmt: skip
"""by number"""
