"""Load the user's modules: by path, or, if they are installed, by name.

The working directory is not searched: a file there could shadow an installed module.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from siltstone.errors import UsageError


def load_module(name: str) -> ModuleType:
    """Import `./streams`, `streams/flights.py` or an installed `my_streams.flights`.

    The directory that contains the path goes last on the module search path, where worker processes search too.

    Raises:
        UsageError: the path is not a module, or another module of its name is found before it.
        Exception: the module raised it.
    """
    if "/" in name or name.endswith(".py"):
        return _by_path(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = Path(*name.split("."))
        beside = next((path for path in (here.with_suffix(".py"), here) if path.exists()), None)
        if error.name is None or beside is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"no module {name} is installed: to use the one here, name its path, ./{beside}") from None


def _by_path(name: str) -> ModuleType:
    path = Path(name).resolve()
    package = path / "__init__.py"
    if not (package.is_file() or (path.suffix == ".py" and path.is_file())):
        raise UsageError(f"{name} is not a module: name a .py file, or a directory with an __init__.py")
    root, parts = path.parent, [path.stem if path.suffix == ".py" else path.name]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{name} cannot be a module's name: use letters, digits and _")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    module = importlib.import_module(".".join(parts))
    found = Path(module.__file__ or "").resolve()
    if found not in (path, package):
        raise UsageError(f"{name} is hidden by another module of its name, {found}: rename it")
    return module
