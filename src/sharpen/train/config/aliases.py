"""Second names of settings: the specification's documents call some of our settings differently.

A field with a second name declares it as `validation_alias=AliasChoices(our_name, second_name)`.
YAML files, `key=value` overrides and Python keyword arguments accept both.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from sharpen.config import Config


class AliasedConfig(Config):
    """A config whose fields may have second names."""

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_contradictions(cls, values: Any) -> Any:
        """Keep one name of each setting; two names with different values are an error."""
        if not isinstance(values, dict):
            return values
        remaining = dict(values)
        for field_name, field in cls.model_fields.items():
            names = [name for name in (field_name, *second_names(field)) if name in remaining]
            for name in names[1:]:
                value = remaining.pop(name)
                if value != remaining[names[0]]:
                    raise ValueError(
                        f"{names[0]} ({remaining[names[0]]!r}) and {name} ({value!r}) are two "
                        "names of one setting; give one"
                    )
        return remaining


def second_names(field: FieldInfo) -> list[str]:
    """Returns the names of a setting besides its own."""
    if not isinstance(field.validation_alias, AliasChoices):
        return []
    _, *others = field.validation_alias.choices
    return [name for name in others if isinstance(name, str)]
