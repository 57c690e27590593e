"""The base of every section: unknown keys are errors, values are frozen, and field docstrings become the reference page."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings. Never assigned to after it is loaded; derive a changed copy with `model_copy(update=...)`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # JSON, in which a run keeps its configuration, has neither
    )
