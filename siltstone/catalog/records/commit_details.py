"""What a commit adds to the catalog besides stored objects, as bytes that the checkpoint's manifest carries.

The catalog can be lost. The manifests then say what each commit recorded: the steps of its interval, the outputs that
it staged, its edit, definition and parallelism. `previous` names the manifest of the checkpoint before. A run writes a
manifest only once the checkpoint before is committed, so the true history is the chain back from the newest manifest,
and a manifest whose commit failed has no successor.

The bytes are JSON, packed (`catalog.packing`) in parts of at most `_PART_CHARACTERS`. Spark repeats a thousand
characters of options in the offsets of each step; they are stored once.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from siltstone.catalog.database.packing import pack, unpack
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.outbox import Output, staged_object
from siltstone.catalog.records.steps import Step, StepKind
from siltstone.decoding import (
    check_flag,
    check_integer,
    check_object,
    check_text,
    check_time,
    decoded_bytes_max,
    parse_json,
    translate_decode_errors,
)
from siltstone.errors import StateError
from siltstone.format.manifest_decoding import decode_variables
from siltstone.model import MAX_ID, MAX_MAX_PARALLELISM, SinkFile, StoredObject, check_name
from siltstone.operator import SOURCE
from siltstone.store.checksums import algorithm_of
from siltstone.store.paths import check_object_name

_PART_CHARACTERS = 4 << 20
_CONF = '"conf":'
_MAX = (1 << 63) - 1
INPUTS = "inputs"
"""key of a definition with what is recorded of each source, of a stream that names them"""


@dataclass(frozen=True, slots=True)
class PreviousCheckpoint:
    """The checkpoint that another follows: its manifest, and when the catalog committed it."""

    manifest: StoredObject
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class CommitDetails:
    """What one commit adds to the catalog besides stored objects.

    Attributes:
        steps: its steps of the input log.
        edit: the edit by hand that the checkpoint contains.
        parallelism: from this checkpoint on, the parallelism of runs that name none.
        definition: the definition, if this checkpoint is the first made under it; `dropped` (`OPERATOR` or
            `OPERATOR.VARIABLE`, or `source.NAME`) was given up with it.
        outputs: what sinks get once the checkpoint exists.
        repeats: the checkpoint was given up, and its steps must be those logged for it, whose output is decided already
            (`catalog.outbox`).
        previous: the checkpoint it follows; None for the first.
        outstanding: (checkpoint, output) of the earlier outputs that sinks did not have yet when the manifest was
            written; None if the writer had not looked.
    """

    steps: Sequence[Step] = ()
    edit: Edit | None = None
    parallelism: int | None = None
    definition: Mapping[str, Any] | None = None
    dropped: Sequence[str] = ()
    outputs: Sequence[Output] = ()
    repeats: bool = False
    previous: PreviousCheckpoint | None = None
    outstanding: Sequence[tuple[int, str]] | None = None


def encode_details(details: CommitDetails) -> tuple[bytes, ...]:
    """Encode the details of a commit for its manifest."""
    previous, edit = details.previous, details.edit
    values = {
        **encode_steps(details.steps),
        "edit": None if edit is None else asdict(edit),
        "parallelism": details.parallelism,
        "definition": None if details.definition is None else dict(details.definition),
        "dropped": list(details.dropped),
        "outputs": [
            [o.name, base64.b64encode(o.arrow_schema).decode(), o.rows, [_staged_to_json(each) for each in o.objects]]
            for o in details.outputs
        ],
        "repeats": details.repeats,
        "previous": None
        if previous is None
        else [stored_to_json(previous.manifest), previous.committed_at.isoformat()],
        "outstanding": None if details.outstanding is None else [list(each) for each in details.outstanding],
    }
    return pack_parts(json.dumps(values, separators=(",", ":"), allow_nan=False))


def decode_details(parts: Sequence[bytes], name: str) -> CommitDetails:
    """Decode the details in the manifest `name`.

    Raises:
        CorruptObject: they are damaged.
    """
    with translate_decode_errors(name, "the details of a commit"):
        values = check_object(parse_json(unpack_parts(parts)), "the details")
        parallelism, definition = values["parallelism"], values["definition"]
        if parallelism is not None:
            check_integer(parallelism, 1, MAX_MAX_PARALLELISM, "parallelism")
        outstanding = values["outstanding"]
        return CommitDetails(
            steps=_decode_new_steps(values),
            edit=None if values["edit"] is None else _decode_edit(check_object(values["edit"], "the edit")),
            parallelism=parallelism,
            definition=None if definition is None else decode_definition(definition),
            dropped=tuple(check_text(each, "what was dropped") for each in values["dropped"]),
            outputs=tuple(_decode_output(*each) for each in values["outputs"]),
            repeats=check_flag(values["repeats"], "repeats"),
            previous=None if values["previous"] is None else _decode_previous(*values["previous"]),
            outstanding=None if outstanding is None else tuple(_decode_outstanding(*each) for each in outstanding),
        )


def encode_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """Return steps as JSON values, with repeated options of Spark's stored once."""
    options: dict[str, int] = {}
    rows = []
    for step in steps:
        before, conf, rest = step.offsets.partition(_CONF)
        line, newline, after = rest.partition("\n")
        which = options.setdefault(conf + line, len(options))
        batch = step.kind if step.batch_id is None else step.batch_id
        rows.append([step.step, batch, before, which, newline + after, step.sources, step.digests, step.clock])
    return {"options": list(options), "steps": rows}


def decode_steps(values: Mapping[str, Any]) -> tuple[Step, ...]:
    """Decode what `encode_steps` returned.

    Raises:
        ValueError, TypeError, KeyError: the values are damaged.
    """
    options = [check_text(each, "an option") for each in values["options"]]
    steps = []
    for number, batch, before, which, after, *texts in values["steps"]:
        check_integer(which, 0, len(options) - 1, "the number of an option")
        offsets = check_text(before, "offsets") + options[which] + check_text(after, "offsets")
        _check_column(offsets, "offsets")
        check_integer(number, 0, MAX_ID, "a step")
        named = zip(texts, ("sources", "digests", "a clock"), strict=True)
        sources, digests, clock = (_check_column(text, what) for text, what in named)
        if not isinstance(batch, str):
            batch_id = check_integer(batch, -2, MAX_ID, "a batch")
            steps.append(Step(number, batch_id, offsets, sources, digests=digests, clock=clock))
            continue
        step = Step(number, None, offsets, sources, StepKind(batch), digests, clock)
        if replace(step, digests="", clock="") != Step.without_rows(number, step.kind) or step.kind is StepKind.BATCH:
            raise ValueError(f"step {number} has no batch, and yet has read something")
        steps.append(step)
    return tuple(steps)


def decode_definition(value: object) -> Mapping[str, Any]:
    """Check that a stream's definition (`run.definition`) has everything that is looked up in it; return it unchanged.

    Raises:
        ValueError, KeyError, SiltstoneError: the value is not one.
    """
    definition = check_object(value, "the definition")
    operators = check_object(definition["operators"], "operators of the definition")
    decode_variables(operators)
    for operator, of in operators.items():
        for variable, shape in of["variables"].items():
            check_text(shape["kind"], f"the kind of {check_name('operator', operator)}.{variable}")
    for option, text in check_object(definition["options"], "options of the definition").items():
        check_text(text, f"option {option}")
    check_inputs(definition)
    for option in definition.get("secret", ()):
        check_text(option, "a secret option")
    return definition


def check_inputs(definition: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return source -> what a definition records of it: the columns that operators read, and what tells Spark's sources
    from each other. A stream that gives its source no name has both beside its operators.

    Raises:
        ValueError, UsageError: it is damaged.
    """
    given = check_object(definition.get(INPUTS, {SOURCE: definition}), "the sources of the definition")
    found: dict[str, Mapping[str, Any]] = {}
    for name, of in given.items():
        shape = check_object(of, f"source {check_name('source', name)} of the definition")
        columns = check_object(shape.get("columns", {}), "columns of the definition")
        sources = shape.get("sources", [])
        if not isinstance(sources, list):
            raise ValueError("the sources of the definition are not a list")
        told = [check_text(each, "a source of the definition") for each in sources]
        found[name] = {"columns": columns, "sources": told}
    return found


def pack_parts(text: str) -> tuple[bytes, ...]:
    """Pack a text in parts."""
    return tuple(pack(text[at : at + _PART_CHARACTERS]) for at in range(0, len(text), _PART_CHARACTERS))


def unpack_parts(parts: Sequence[bytes]) -> str:
    """Return the text that `pack_parts` packed.

    Raises:
        ValueError: the parts are damaged, or unpack to more than their length pays for.
    """
    limit, total, texts = decoded_bytes_max(sum(map(len, parts))), 0, []
    for part in parts:
        try:
            texts.append(unpack(part))
        except StateError as error:
            raise ValueError(f"{error}") from error
        total += len(texts[-1])
        if total > limit:
            raise ValueError(f"it unpacks to more than {limit} characters")
    return "".join(texts)


def _check_column(value: object, what: str) -> str:
    """Return `value` if it is a text that every catalog holds: UTF-8 without a null character.

    Raises:
        ValueError: it is not; the message calls it `what`.
    """
    text = check_text(value, what)
    if b"\0" in text.encode():
        raise ValueError(f"{what} has a null character")
    return text


def check_stored(name: object, size: object, checksum: object) -> StoredObject:
    """Return the stored object that decoded values describe.

    Raises:
        ValueError, UsageError: they do not describe one.
    """
    algorithm_of(check_text(checksum, "a checksum"))
    name = check_object_name(check_text(name, "an object's name"))
    return StoredObject(name, check_integer(size, 0, _MAX, "bytes"), str(checksum))


def stored_to_json(stored: StoredObject) -> list[Any]:
    """Return a plain list of what names and verifies a stored object; `check_stored` turns it back."""
    return [stored.name, stored.bytes, stored.checksum]


def _staged_to_json(staged: StoredObject) -> list[Any]:
    return [*stored_to_json(staged), *([staged.statistics] if isinstance(staged, SinkFile) else ())]


def _decode_staged(name: object, size: object, checksum: object, statistics: object = None) -> StoredObject:
    stored = check_stored(name, size, checksum)
    if statistics is not None:
        check_object(parse_json(check_text(statistics, "statistics")), "statistics")
    return staged_object(stored.name, stored.bytes, stored.checksum, None if statistics is None else str(statistics))


def _decode_previous(manifest: Sequence[object], committed_at: object) -> PreviousCheckpoint:
    name, size, checksum = manifest
    return PreviousCheckpoint(check_stored(name, size, checksum), check_time(committed_at))


def _decode_new_steps(values: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the steps of one checkpoint, of which each is later than the one before."""
    steps = decode_steps(values)
    numbers = [0, *(step.step for step in steps)]
    if any(before >= after for before, after in pairwise(numbers)):
        raise ValueError(f"its steps are {numbers[1:]}")
    return steps


def _decode_edit(values: Mapping[str, Any]) -> Edit:
    checksum = values["source_checksum"]
    return Edit(
        operator=check_name("operator", values["operator"]),
        variable=check_name("variable", values["variable"]),
        upserts=check_integer(values["upserts"], 0, _MAX, "upserts"),
        deletes=check_integer(values["deletes"], 0, _MAX, "deletes"),
        source=_check_column(values["source"], "the source of an edit"),
        source_checksum=None if checksum is None else _check_column(checksum, "a checksum"),
        who=_check_column(values["who"], "who edited"),
    )


def _decode_output(name: object, schema: object, rows: object, objects: Sequence[Sequence[object]]) -> Output:
    output = Output(
        name=check_text(name, "the name of an output"),
        arrow_schema=base64.b64decode(check_text(schema, "a schema"), validate=True),
        rows=check_integer(rows, 0, _MAX, "rows"),
        objects=tuple(_decode_staged(*each) for each in objects),
    )
    if output.sink_files and len(output.sink_files) != len(output.objects):
        raise ValueError(f"the output {output.name} has objects of two kinds")
    return output


def _decode_outstanding(checkpoint: object, name: object) -> tuple[int, str]:
    return check_integer(checkpoint, 1, MAX_ID, "a checkpoint"), check_text(name, "the name of an output")
