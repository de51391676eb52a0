"""Human-readable sizes and durations."""

from search_spaces.quantities import number_text


def bytes_text(count: float | None) -> str:
    """`1.23 GiB`, three digits; a dash for None."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{number_text(count, 3)} {unit}"
        count /= 1024
    return f"{number_text(count, 3)} GiB"


def duration_text(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = max(int(seconds), 0)
    hours, remainder = divmod(whole, 3600)
    return f"{hours}:{remainder // 60:02}:{remainder % 60:02}" if hours else f"{remainder // 60}:{remainder % 60:02}"
