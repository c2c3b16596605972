"""What may be done to a run between two steps of a `StreamTester`, drawn by laws."""

from hypothesis import strategies as st

from siltstone.testing import StreamTester

ACTIONS = ("none", "none", "restart", "restart lost", "crash", "crash lost", "rescale", "advance")
action = st.sampled_from(ACTIONS)


def act(tester: StreamTester, what: str, number: int, most: int) -> None:
    """Do to the run what may be done to it; a rescale is to at most so many subtasks, by the number of the step."""
    if what.startswith("restart"):
        tester.restart(lost="lost" in what)
    elif what.startswith("crash"):
        tester.crash(lost="lost" in what)
    elif what == "rescale":
        tester.rescale(1 + number % most)
    elif what == "advance":
        tester.advance("1 minute")
