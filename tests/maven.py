"""Fetch what tests need from Maven, with all that it needs in turn: each kind once, into a directory of its own."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>siltstone</groupId><artifactId>jars-for-tests</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>
  </dependency></dependencies>
</project>
"""


def fetch_jars(coordinates: str, to: Path, what: str, only: Sequence[str] = ()) -> None:
    """Fetch an artifact's jar and those that it needs from where Maven is set up to look, unless they are there.

    Exits with one line if that is impossible.

    Args:
        coordinates: `group:artifact:version`.
        to: the directory, which is made or replaced.
        what: what needs the jars, to begin a sentence: "Kafka's tests".
        only: the artifacts to keep; by default all.
    """
    group, artifact, version = coordinates.split(":")
    if (to / f"{artifact}-{version}.jar").exists():
        return
    maven = shutil.which("mvn")
    if maven is None:
        sys.exit(f"{what} need Maven once, to fetch {artifact}: install it (Debian: apt-get install maven)")
    with tempfile.TemporaryDirectory() as scratch:
        pom, jars = Path(scratch) / "pom.xml", Path(scratch) / "jars"
        pom.write_text(_POM.format(group=group, artifact=artifact, version=version))
        command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        command += ["-DincludeScope=runtime", *([f"-DincludeArtifactIds={','.join(only)}"] if only else [])]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            said = next((line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line), "no message")
            sys.exit(f"{what} are not run: Maven cannot fetch {artifact} {version} ({said})")
        shutil.rmtree(to, ignore_errors=True)
        shutil.move(jars, to)
