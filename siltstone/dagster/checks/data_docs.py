"""Write the outcome of checks as Great Expectations' Data Docs, pages for a browser."""

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import SUITES, Suite
from siltstone.dagster.checks.validation import expectation_suite, quiet_context
from siltstone.errors import Unreachable
from siltstone.store.private import make_private_directory

_SITE = "local_site"


def build_data_docs(subject: Subject, directory: Path, suites: Iterable[Suite] = SUITES) -> Path:
    """Check some properties and write their pages below `directory`, next to those of earlier checks.

    Returns:
        The path of the start page.

    Raises:
        SiltstoneError: the facts cannot be read, or the directory cannot be written.
    """
    import great_expectations as gx

    try:
        make_private_directory(directory)
    except OSError as error:
        raise Unreachable(f"cannot make {directory}: {error.strerror}; check permissions and free space") from error
    context = quiet_context(str(directory))
    source = context.data_sources.add_or_update_pandas(subject.name)
    for suite in suites:
        facts = suite.gather(subject)
        if facts.empty:
            continue
        facts = facts.map(_as_text)
        batch = source.add_dataframe_asset(suite.name).add_batch_definition_whole_dataframe("all")
        name = f"{subject.name}.{suite.name}"
        expected = expectation_suite(suite)
        expected.name = name
        expected = context.suites.add_or_update(expected)
        definition = gx.ValidationDefinition(name=name, data=batch, suite=expected)
        definition = context.validation_definitions.add_or_update(definition)
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=[definition],
            result_format={"result_format": "COMPLETE", "unexpected_index_column_names": list(suite.row)},
        )
        context.checkpoints.add_or_update(checkpoint).run(batch_parameters={"dataframe": facts})
    context.build_data_docs(site_names=[_SITE])
    [site] = context.get_docs_sites_urls()
    return Path((site["site_url"] or "").removeprefix("file://"))


def _as_text(value: Any) -> Any:
    """Escape text for HTML: Great Expectations does not, and anybody may choose the keys."""
    return html.escape(value) if isinstance(value, str) else value
