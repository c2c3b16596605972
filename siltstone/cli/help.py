"""The help of commands: each takes its text from the method of the client that it calls.

A method's docstring, up to its first section, describes the operation. A command's own docstring adds what only a
shell needs to know, such as exit codes. An option without a help of its own has that of the method's argument of the
same name, or else that of the setting. There, "; None for all" becomes "[all]", and a name in backticks the option.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from typing import Annotated, Any, TypeVar, get_args, get_origin

from typer.models import OptionInfo

from siltstone.cli.application import app
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.settings import Settings

Command = TypeVar("Command", bound=Callable[..., None])
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_DEFAULT = re.compile(r"; (?:None|empty|default) (?:for )?(.+)$")
_SETTINGS = {**RetentionOptions.model_fields, **Settings.model_fields}


def command(group: str, method: Callable[..., Any] | None = None) -> Callable[[Command], Command]:
    """Add a command to a group of the list of commands.

    Args:
        method: the client's method that the command calls; None if the command's own docstring says all.
    """

    def add(function: Command) -> Command:
        described, arguments = _parse(inspect.getdoc(method) or "") if method else ("", {})
        given = function.__annotations__.items()
        options = {name: get_args(kind) for name, kind in given if get_origin(kind) is Annotated}
        names = {name: _option_name(name, info) for name, (_, info) in options.items()}
        for name, (kind, info) in options.items():
            repeatable = isinstance(info, OptionInfo) and "list[" in str(kind)
            text = info.help or _format(arguments.get(name) or _describe_setting(name), repeatable)
            shown = copy(info)
            shown.help = _name_options(text, names)
            function.__annotations__[name] = Annotated[kind, shown]
        texts = (_name_options(described, names), inspect.getdoc(function))
        return app.command(rich_help_panel=group, help="\n\n".join(filter(None, texts)))(function)

    return add


def _parse(docstring: str) -> tuple[str, Mapping[str, str]]:
    """Return what comes before the first section, and name -> text of the arguments."""
    described, *sections = _SECTION.split(docstring)
    arguments = dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")
    return described.strip(), {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(arguments)}


def _describe_setting(name: str) -> str:
    """Return the description of a setting with its default; "" if there is no such setting."""
    if name not in _SETTINGS:
        return ""
    field = _SETTINGS[name]
    return f"{field.description}{'' if field.default is None else f'; default {field.default}'}"


def _format(text: str, repeatable: bool) -> str:
    """Make a sentence of the text about an argument, with its default in brackets at the end."""
    text, *default = _DEFAULT.split(text.rstrip("."))[:2]
    more = [" Repeatable."] * repeatable + [f" [{each}]" for each in default]
    return f"{text[:1].upper()}{text[1:]}.{''.join(more)}" if text else ""


def _option_name(name: str, info: Any) -> str:
    """Return how a shell user writes a parameter."""
    if isinstance(info, OptionInfo):
        return info.default if isinstance(info.default, str) else f"--{name.replace('_', '-')}"
    return str(info.metavar)


def _name_options(text: str, names: Mapping[str, str]) -> str:
    """Write the names of arguments in backticks as the options of the command."""
    return re.sub(r"`(\w+)`", lambda found: names.get(found[1], found[0]), text)
