"""A walk over every error that the code raises: it names the thing, shows no secret, and people learn what to do."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from siltstone import errors
from siltstone.catalog.open import NoCatalog
from siltstone.cli import main
from siltstone.errors import SiltstoneError, says_what_to_do

ROOT = Path(__file__).parents[2]
PACKAGES = ("siltstone", "jobs", "assets", "resources", "checks", "orchestration")
CLASSES = {
    name: each
    for name, each in {**vars(errors), "NoCatalog": NoCatalog}.items()
    if isinstance(each, type) and issubclass(each, SiltstoneError)
}
FOR_PEOPLE = (
    "siltstone/cli/",
    "siltstone/settings.py",
    "siltstone/secret.py",
    "siltstone/modules.py",
    "siltstone/stream.py",
    "siltstone/ui.py",
    "siltstone/store/open.py",
    "siltstone/store/url.py",
    "siltstone/change/edit.py",
    "siltstone/change/fork.py",
    "siltstone/retention/savepoints.py",
    "siltstone/retention/retention_rules.py",
    "siltstone/spark/datasource.py",
    "siltstone/spark/operations/",
    "jobs/",
    "siltstone/dagster/jobs.py",
    "siltstone/dagster/schedules.py",
    "siltstone/dagster/project.py",
    "siltstone/dagster/resources/",
    "siltstone/dagster/sensors/",
    "siltstone/dagster/page/",
)
"""where what people type is judged: the general advice about bad input is not enough there"""
MAY_BE_SECRET = re.compile(r"\b(?:url|settings|options|password|token|webhook|environ|storage|credentials)\b")
"""in lower case: a name in capitals is a constant of the code"""
HIDES = re.compile(
    r"^(?:redacted\(|redacted_url\(|label\(|hide\(|redact\(|len\()"  # functions that leave out what is secret
    r"|\.(?:label|keys\(\))$"
    r"|(?:catalog|self|found)\.url$"  # of catalogs (`Transactions.url`) and of directories: without passwords
)
NO_SECRETS = {
    "{url.partition(':')[0]}": "its scheme",
    "{url.partition('://')[0]}": "its scheme",
    "{url!r}": "in _local_path: a file:// URL",
    "{url}": "of a source's file (spark/logged.py)",
    "{unfinished.token}": "the name of a write that has not ended",
}


@dataclass(frozen=True)
class Raised:
    """A call that makes an error: where, of which class, its text with {expressions} in it, and these."""

    where: str
    kind: type[SiltstoneError]
    text: str
    filled: tuple[str, ...]

    @property
    def opaque(self) -> bool:
        """Whether the text is made elsewhere."""
        return re.fullmatch(r"<.*>", self.text) is not None


def literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}{'!r' if node.conversion == ord('r') else ''}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return f"<{ast.unparse(node)}>"


@cache  # no test's parameter: every worker would walk the code to collect tests that another one runs
def all_raised() -> list[Raised]:
    """Every call of an error's class in the code that is not the tests'."""
    return list(raised())


def raised() -> Iterator[Raised]:
    """The same, one by one."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in CLASSES:
                filled = [f for arg in node.args[:1] for f in ast.walk(arg) if isinstance(f, ast.FormattedValue)]
                text = literal(node.args[0]) if node.args else ""
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Raised(where, CLASSES[name], text, tuple(literal(each) for each in filled))


@pytest.mark.slow
def test_all_are_found() -> None:
    found = all_raised()
    assert len(found) > 400 and {each.kind.__name__ for each in found} >= CLASSES.keys() - {"SiltstoneError"}


def test_each_class_says_in_general_what_to_do() -> None:
    for name, kind in CLASSES.items():
        assert says_what_to_do(f"x; {kind.advice}"), f"{name}: {kind.advice}"
        assert kind("it broke").full_text == f"it broke; {kind.advice}" if name != "Stopped" else True
    assert errors.UsageError("parallelism is 0: use 1 to 128").full_text == "parallelism is 0: use 1 to 128"
    assert not says_what_to_do("object a/b was altered: its checksum does not match")


def test_an_error_says_what_is_wrong_in_one_line() -> None:
    assert [each for each in all_raised() if not each.text or "\n" in each.text] == []
    assert [each for each in all_raised() if not names_something(each)] == [], "they name nothing"


def names_something(each: Raised) -> bool:
    plain = re.sub(r"\{[^}]*\}", "", each.text)
    return bool(each.filled) or each.opaque or len(plain.split()) >= 5 or each.kind is errors.Stopped


def test_an_error_shows_no_url_option_or_setting_but_through_what_hides_secrets() -> None:
    shown = [(each.where, filled) for each in all_raised() for filled in each.filled if may_be_secret(filled)]
    assert {filled for _, filled in shown} >= {"{url}"}, "it sees what looks like a secret"
    assert [each for each in shown if each[1] not in NO_SECRETS] == [], "hide what may be secret in them"


def may_be_secret(filled: str) -> bool:
    inside = filled.strip("{}").removesuffix("!r")
    return bool(MAY_BE_SECRET.search(inside)) and not HIDES.search(inside)


def test_what_people_gave_wrong_comes_with_how_to_give_it_right() -> None:
    for_people = [
        each for each in all_raised() if each.where.startswith(FOR_PEOPLE) and issubclass(each.kind, errors.UsageError)
    ]
    assert len(for_people) > 80
    assert [each for each in for_people if not says_how(each)] == []


def says_how(each: Raised) -> bool:
    filled_in = any(shown.strip("{}") in WORKS_OUT for shown in each.filled)
    return each.opaque or filled_in or says_what_to_do(each.text)


WORKS_OUT = {"use", "there", "hint", "explain(error, 'edit')", "_FORMS"}
"""what holds the instruction, filled in"""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_ends_a_command_with_one_line_that_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = CLASSES[name]
    error = errors.Stopped("s", "SIGTERM", 3) if kind is errors.Stopped else kind("it broke")

    def fail() -> None:
        raise error

    for level, form in (("info", "text"), ("info", "json"), ("debug", "text")):
        monkeypatch.setenv("SILTSTONE_LOG_LEVEL", level)
        monkeypatch.setenv("SILTSTONE_LOG_FORMAT", form)
        with pytest.raises(SystemExit) as end:
            main(fail)
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (error.exit_code, "") and error.exit_code
        lines = [json.loads(err)["event"]] if form == "json" else err.splitlines()
        told = [line.removeprefix("siltstone: ") for line in lines]
        assert told[-1] == error.full_text and says_what_to_do(told[-1])
        if level == "debug":
            assert "Traceback (most recent call last):" in told
        else:
            assert len(told) == 1
