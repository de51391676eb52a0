"""Why a request was refused (RFC 9457)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One invalid field."""

    field: str
    """Name of the field; a part of it is `field.part`."""
    message: str
    """What is wrong."""
    remedy: str | None = None
    """What to do about it. None or empty: no remedy is known."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request was refused (RFC 9457). Fields that are None are omitted."""

    type: str
    title: str
    """Name of the status code."""
    status: int
    """HTTP status code."""
    detail: str
    """What is wrong, in one line."""
    errors: tuple[FieldProblem, ...] | None = None
    """The invalid fields. None: no field is invalid."""
    quota: str | None = None
    """Name of the exhausted quota. None: no quota is the reason."""
    used: float | None = None
    """The used amount of the quota."""
    limit: float | None = None
    """The limit of the quota."""
