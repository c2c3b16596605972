"""What a user with nothing but pip has: the wheel in virtual environments outside the repository."""

import fcntl
import os
from collections.abc import Callable, Iterable

import pytest

from tests.wheel import activated, build_wheel, make_environment

Environments = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """Gives the variables of a shell in an environment with the wheel, Spark, some extras, and further distributions.

    The wheel and each environment are made once, for all processes of this run.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(*extras: str, further: Iterable[str] = ()) -> dict[str, str]:
        home = shared / "-".join(["environment", *extras])
        with (shared / "wheel.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wheel = next(shared.glob("siltstone-*.whl"), None) or build_wheel(shared)
            ready = home / "ready"
            if not ready.exists():
                make_environment(wheel, home, ("spark", *extras), further)
                ready.touch()
        return activated(home)

    return made
