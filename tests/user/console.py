"""A process in a user's environment that runs what pages show, one after the other on one JVM.

    python -P console.py SOCKET

It knows the installed `siltstone` and nothing of this repository. Each connection brings one request as a line of JSON
and gets one answer, `{"code": ..., "said": ...}`. The program `siltstone` that `shim` writes asks for what
`siltstone.cli.main` does with its arguments.
"""

import io
import json
import os
import shlex
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

SHIM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({path!r})
    given = {{"kind": "command", "given": sys.argv[1:], "directory": os.getcwd(), "environment": dict(os.environ)}}
    link.sendall(json.dumps(given).encode() + b"\\n")
    answer = json.loads(link.makefile().readline())
sys.stdout.write(answer["said"])
sys.exit(answer["code"])
"""
DEMO = '["siltstone.demo_streams"]'
Variables = dict[str, Any]


def run_command(arguments: list[str], _: Variables) -> None:
    """Do what `siltstone` does with these arguments."""
    from siltstone import cli

    sys.argv = ["siltstone", *arguments]
    cli.main()


def run_python(text: str, variables: Variables) -> None:
    """Run a block of Python; a page's blocks share their variables, and have the session of the process as `spark`."""
    from siltstone.spark.session import spark_session

    if "spark" in text:
        variables.setdefault("spark", spark_session())
    exec(compile(text, "<page>", "exec"), variables)  # noqa: S102 (of this repository)


def load_options(text: str, _: Variables) -> None:
    """Load a siltstone.toml, and the definitions of a project whose it is, schedules among them."""
    from siltstone.dagster import stream_definitions
    from siltstone.settings import load_settings

    with open("siltstone.toml", "w") as file:
        file.write(text)
    os.environ["SILTSTONE_STREAMS"] = DEMO
    load_settings()
    stream_definitions("flights")


def load_component(text: str, _: Variables) -> None:
    """Load a component's YAML, and what it defines."""
    import dagster as dg
    import yaml
    from dagster.components.testing.utils import create_defs_folder_sandbox

    from siltstone import dagster

    os.environ["SILTSTONE_STREAMS"] = DEMO
    given = yaml.safe_load(text)
    room, _, name = given["type"].rpartition(".")
    assert room == dagster.__name__, given["type"]
    with create_defs_folder_sandbox() as sandbox:
        sandbox.scaffold_component(
            component_cls=getattr(dagster, name), defs_path="one", defs_yaml_contents=dict(given)
        )
        with sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)


def check_names(line: str, _: Variables) -> None:
    """Refuse a line with a command or an option that `siltstone` does not have; nothing is run.

    Args:
        line: `siltstone COMMAND --option ...`, or options alone, which some command has to have.
    """
    import typer

    from siltstone.cli.application import app

    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    if line.startswith("--"):
        assert words[0].partition("=")[0] in set().union(*map(_options, (command, *command.commands.values()))), line
        return
    of_option = False
    for word in words[1:]:
        if word.startswith("-"):
            name = word.partition("=")[0]
            assert name in _options(command), f"{line}: {name}"
            of_option = True
        elif hasattr(command, "commands") and not of_option:
            assert word in command.commands, f"{line}: {word}"
            command = command.commands[word]
        else:
            of_option = False


def _options(command: Any) -> set[str]:
    return {"--help", *(name for option in command.params for name in option.opts)}


KINDS: dict[str, Callable[[Any, Variables], None]] = {
    "command": run_command,
    "python": run_python,
    "toml": load_options,
    "yaml": load_component,
    "names": check_names,
}


def answer(request: dict[str, Any], pages: dict[str, Variables]) -> dict[str, Any]:
    """Do what a request asks for, in its directory and with its variables of the environment."""
    said, code, environment = io.StringIO(), 0, dict(os.environ)
    os.chdir(request["directory"])
    os.environ.update(request.get("environment", {}))
    try:
        with redirect_stdout(said), redirect_stderr(said):
            KINDS[request["kind"]](request["given"], pages.setdefault(request.get("page", ""), {}))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception:
        code = 1
        said.write(traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return {"code": code, "said": said.getvalue()}


def main(path: str) -> None:
    """Answer until killed."""
    pages: dict[str, Variables] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen()
        os.rename(f"{path}.new", path)  # who finds it there can connect
        while True:
            link, _ = server.accept()
            with link, link.makefile("rw") as both:
                both.write(json.dumps(answer(json.loads(both.readline()), pages)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
