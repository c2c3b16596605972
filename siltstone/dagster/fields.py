"""Types of the fields that a launch fills in.

Dagster gives a field of type `str`, `int` or `bool` a second form, `{"env": NAME}`, and puts the value of that
environment variable in its place. So anyone who may launch could read the environment in a run's errors and events. A
field of a type below has no second form: Dagster refuses an object before it creates the run.
"""

from typing import TYPE_CHECKING, Annotated, Any

import dagster as dg
from pydantic import GetPydanticSchema

if TYPE_CHECKING:
    Text = str
    Number = int
    Flag = bool
else:

    def _without_variables(kind: type) -> Any:
        return Annotated[dg.Field(kind).config_type, GetPydanticSchema(lambda _, handler: handler(kind))]

    Text, Number, Flag = (_without_variables(kind) for kind in (str, int, bool))
