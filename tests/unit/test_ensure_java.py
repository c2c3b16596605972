"""scripts/ensure_java.py against stand-ins for `java` and for the package that fetches one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.jvm  # it runs programs that stand for one

SCRIPT = Path(__file__).parents[2] / "scripts" / "ensure_java.py"


def make_java(home: Path, version: str) -> Path:
    """A `java` below `home` that answers as the real one does."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nprintf "    java.home = {home}\\n    java.specification.version = {version}\\n" >&2\n')
    java.chmod(0o755)
    return java


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, on a machine that has no Java at all and cannot fetch one."""
    spec = importlib.util.spec_from_file_location("ensure_java", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOMEBREW", ())
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    offer_jdk(monkeypatch, None)
    return module


def offer_jdk(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let `jdk.install` unpack a Java of that version, or break off half-way where it is None."""

    def install(wanted: str, path: str) -> None:
        (Path(path) / "half").mkdir()
        if version is None:
            raise OSError("Name or service not known")
        make_java(Path(path) / f"jdk-{wanted}", version)

    monkeypatch.setitem(sys.modules, "jdk", SimpleNamespace(install=install))


def run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = script.main(tmp_path / ".jdk")
    out, err = capsys.readouterr()
    return code, out, err


def test_java_home_comes_before_path(script, tmp_path, capsys, monkeypatch):
    make_java(tmp_path / "home", "21")
    make_java(tmp_path / "other", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
    assert run(script, tmp_path, capsys) == (0, f"{tmp_path / 'home'}\n", "")


def test_an_old_java_home_is_named_and_passed_over(script, tmp_path, capsys, monkeypatch):
    make_java(tmp_path / "old", "1.8")
    make_java(tmp_path / "new", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(tmp_path / "new" / "bin"))
    code, out, err = run(script, tmp_path, capsys)
    assert (code, out) == (0, f"{tmp_path / 'new'}\n")
    assert "is Java 8, too old" in err


def test_a_java_fetched_earlier_is_found_again(script, tmp_path, capsys):
    make_java(tmp_path / ".jdk" / "jdk-17.0.9+9", "17")
    assert run(script, tmp_path, capsys) == (0, f"{tmp_path / '.jdk' / 'jdk-17.0.9+9'}\n", "")


def test_where_there_is_none_one_is_fetched(script, tmp_path, capsys, monkeypatch):
    offer_jdk(monkeypatch, "17")
    code, out, err = run(script, tmp_path, capsys)
    assert code == 0 and out.count("\n") == 1
    assert (tmp_path / ".jdk" / "jdk-17" / "bin" / "java").exists()
    assert "downloading" in err


def test_where_none_can_be_fetched_the_commands_are_printed(script, tmp_path, capsys):
    code, out, err = run(script, tmp_path, capsys)
    assert (code, out) == (1, "")
    assert "Name or service not known" in err
    assert "sudo apt-get install -y openjdk-17-jre-headless" in err
    assert "brew install openjdk@17" in err
    assert list((tmp_path / ".jdk").iterdir()) == [], "a broken fetch leaves nothing behind"


def test_a_java_that_does_not_run_is_passed_over(script, tmp_path, capsys, monkeypatch):
    java = make_java(tmp_path / "broken", "17")
    java.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "broken"))
    assert run(script, tmp_path, capsys)[0] == 1
