"""Print the home of a Java that Spark can run on; download one into .jdk if there is none.

It searches, in this order: JAVA_HOME, `java` on PATH, Homebrew's keg-only openjdk@17, .jdk next to this folder.
Standard output has only the home, so that a shell can use it; everything else goes to standard error.
If no Java is found or downloaded, it prints the command that installs one and exits with code 1.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = 17
LOCAL = Path(__file__).resolve().parent.parent / ".jdk"
HOMEBREW = (Path("/opt/homebrew/opt/openjdk@17"), Path("/usr/local/opt/openjdk@17"))
FETCH_TIMEOUT_S = 60
PROBE_TIMEOUT_S = 30
HELP = f"""\
Spark needs Java {OLDEST} or newer. Install it and run the same command again:
  Debian:  sudo apt-get install -y openjdk-17-jre-headless
  macOS:   brew install openjdk@17
or set JAVA_HOME to an installed one."""


def say(message: str) -> None:
    print(message, file=sys.stderr)


def candidates(local: Path) -> Iterator[Path]:
    """List paths of possible `java` executables, best first."""
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)
    for keg in HOMEBREW:
        yield keg / "bin" / "java"
    yield from sorted(local.glob("*/bin/java"))
    yield from sorted(local.glob("*/Contents/Home/bin/java"))


def ask(java: Path) -> tuple[str, int] | None:
    """Run a `java` and return its home and major version; None if it is missing or does not run.

    Links, shims and the macOS stub hide the true home, so its path does not tell.
    """
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", shown, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", shown, re.MULTILINE)
    return (home[1].strip(), int(version[1])) if home and version else None


def find(local: Path) -> str | None:
    """Return the home of the first Java that is new enough; report each one that is too old."""
    for java in candidates(local):
        answer = ask(java)
        if answer and answer[1] >= OLDEST:
            return answer[0]
        if answer:
            say(f"{java} is Java {answer[1]}, too old for Spark")
    return None


def fetch(local: Path) -> str | None:
    """Download a JDK into `local` and return its home; None, with the reason printed, if that fails."""
    say(f"No Java {OLDEST} or newer found; downloading one into {local.name}")
    socket.setdefaulttimeout(FETCH_TIMEOUT_S)
    part = local / ".part"  # unpacked here, then moved, so that an interrupted download leaves nothing that looks whole
    try:
        import jdk

        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        jdk.install(str(OLDEST), path=str(part))
        for unpacked in part.iterdir():
            shutil.rmtree(local / unpacked.name, ignore_errors=True)
            unpacked.rename(local / unpacked.name)
    except Exception as error:  # the user must install Java, whatever failed
        say(f"Could not download it: {error}")
        return None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return find(local)


def main(local: Path = LOCAL) -> int:
    home = find(local) or fetch(local)
    if home is None:
        say(HELP)
        return 1
    print(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
