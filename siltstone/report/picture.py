"""Draw a chain on one page. Pyplot is not used, so that its global state is not touched.

Hue shows the operator, tone the form: full for bases, light for deltas. Colour-blind people can distinguish the hues
(Okabe and Ito); failure is also marked by shape.
"""

from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from siltstone.errors import UsageError
from siltstone.extras import require_extra
from siltstone.report.data import ReportData
from siltstone.store.private import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
_DPI = 150


def check_picture_path(path: Path) -> str:
    """Return the format of a picture's suffix, one of `FORMATS`, after checking that pictures can be drawn here.

    Raises:
        UsageError: the suffix is another, or matplotlib is not installed.
    """
    format = path.suffix.lower().removeprefix(".")
    if format not in FORMATS:
        endings = ", ".join(f".{known}" for known in FORMATS)
        raise UsageError(f"{path} is not the name of a picture: end it in one of {endings}")
    with require_extra("report", "matplotlib", "a picture"):
        import_module("matplotlib")
    return format


def draw_report(data: ReportData, path: Path) -> Path:
    """Draw the chain into the file `path`, whole or not at all; an existing file is replaced.

    If there are more checkpoints than a page can show (`panels.SHOWN_MAX`), the newest are drawn.

    Returns:
        `path`.

    Raises:
        UsageError: the suffix is not a supported format, matplotlib is not installed, or the file cannot be written.
    """
    format = check_picture_path(path)
    drawn = BytesIO()
    # Imported here: matplotlib takes long, and only a picture needs it.
    from siltstone.report.panels import Page

    figure: Figure = Page(data).figure()
    figure.savefig(drawn, format=format, dpi=_DPI, metadata={"Title": f"Chain of stream {data.stream}"})
    _replace(path, drawn.getbuffer())
    return path


def _replace(path: Path, content: memoryview) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(
            f"cannot write the picture {path}: {reason}; name a file in a directory you can write"
        ) from None
