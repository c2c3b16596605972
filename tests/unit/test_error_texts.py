"""A walk over every error that the code raises: it names the thing, shows no secret, and people learn what to do."""

import ast
import copy
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
from siltstone.errors import SiltstoneError

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
"""where what people type is judged"""
SAY_IT_THEMSELVES = (errors.Unreachable, errors.WrongWarehouse, errors.Fenced, errors.NewerFormat, errors.LossRefused)
"""classes without general advice, of which every message says what to do"""
PASS_ON = (
    "siltstone/catalog/identity.py",
    "siltstone/catalog/database/transactions.py",
    "siltstone/store/s3/client.py",
)
"""where a message ends with that of another of our errors, which says it"""
VERBS = (
    "accept|add|allow|ask|begin|bring|call|cast|change|check|choose|commit|correct|create|declare|define|delete|"
    "drop|edit|end|export|fill|fix|free|give|go|grow|import|install|keep|leave|let|list|log|look|lower|make|"
    "materialize|mount|move|name|open|pass|pip install|put|raise|read|recover|reinstall|remove|rename|repeat|"
    "replace|replay|report|reset|restore|resume|roll|round|run|see|set|start|stop|take|try|update|upgrade|use|"
    "verify|wait|write"
)
INSTRUCTION = re.compile(rf"(?:^|[:;,.] |\(|\b(?:or|and|then|only|first) )`?(?:{VERBS})\b", re.IGNORECASE)
WHAT_THERE_IS = re.compile(r"\b(?:it has|they have|there are|there is only|has only|must|needs)\b|\bdefined: ")
MAY_BE_SECRET = re.compile(r"\b(?:url|settings|options|password|token|webhook|environ|storage|credentials)\b")
"""in lower case: a name in capitals is a constant of the code"""
HIDES = re.compile(
    r"^(?:redact_url\(|redacted_url\(|label\(|hide\(|redact\(|len\()"  # functions that leave out what is secret
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
    is_advised: bool
    """whether it has an argument `advice`"""

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
                advised = any(keyword.arg == "advice" for keyword in node.keywords)
                yield Raised(where, CLASSES[name], text, tuple(literal(each) for each in filled), advised)


def says_what_to_do(text: str) -> bool:
    """Whether a text has an instruction (a clause that begins with a verb: "use 1 to 128"), or lists the choices ("it
    has aircraft, airports"), as far as a rule of thumb can tell."""
    return bool(INSTRUCTION.search(text) or WHAT_THERE_IS.search(text))


@pytest.mark.slow
def test_all_are_found() -> None:
    found = all_raised()
    assert len(found) > 400 and {each.kind.__name__ for each in found} >= CLASSES.keys() - {"SiltstoneError"}


def test_a_class_says_in_general_what_to_do_and_a_raise_may_know_better() -> None:
    general = {name: kind for name, kind in CLASSES.items() if kind.general_advice}
    for name, kind in general.items():
        assert says_what_to_do(f"x; {kind.general_advice}"), f"{name}: {kind.general_advice}"
        assert (
            kind("it broke.").full_text == f"it broke; {kind.general_advice}" and str(kind("it broke.")) == "it broke."
        )
        known = kind("it broke", advice="mend it")
        assert str(known) == known.full_text == copy.copy(known).full_text == "it broke; mend it"
    others = CLASSES.keys() - general.keys() - {"Stopped"}
    assert others >= {"UsageError", *(kind.__name__ for kind in SAY_IT_THEMSELVES)}
    assert {name for name in others if CLASSES[name]("it broke").full_text != "it broke"} == set()


def test_general_advice_follows_no_other() -> None:
    double = [
        each
        for each in all_raised()
        if each.kind.general_advice and not each.is_advised and re.search(rf"[:;] `?(?:{VERBS})\b", each.text)
    ]
    assert double == [], "give it as advice="


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
    say_it = [
        each for each in all_raised() if issubclass(each.kind, SAY_IT_THEMSELVES) and not each.kind.general_advice
    ]
    assert len(say_it) > 100
    assert [each for each in say_it if not says_how(each) and not each.where.startswith(PASS_ON)] == []


def says_how(each: Raised) -> bool:
    filled_in = any(shown.strip("{}") in WORKS_OUT for shown in each.filled)
    return each.opaque or each.is_advised or filled_in or says_what_to_do(each.text)


WORKS_OUT = {"use", "there", "_FORMS", "ways[0].upper()"}
"""what holds the instruction, filled in"""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_ends_a_command_with_one_line_that_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = CLASSES[name]
    message = "it broke" if kind.general_advice else "it broke: use another"
    error = errors.Stopped("s", "SIGTERM", 3) if kind is errors.Stopped else kind(message)

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
