"""Text of others, made harmless for a terminal: what would move its cursor or hide characters becomes visible.

Trials print what they like, and jobs are called what their submitters like. A terminal obeys escape sequences in it.
"""

_PICTURES = 0x2400
"""Where Unicode has a picture of each control character of ASCII: ␛ for escape."""
_KEPT = "\t\n"
_BIDIRECTIONAL = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]
"""What shows characters in another order than the one in which they are."""
_VISIBLE = (
    {code: _PICTURES + code for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), 0x2028, 0x2029, *_BIDIRECTIONAL], 0xFFFD)
)


def visible(text: str) -> str:
    """The text with pictures in the place of control characters, but for line breaks and tabs."""
    return text.translate(_VISIBLE)


def visible_line(text: str) -> str:
    """The same, on one line: what follows a break could look like a line of somebody else."""
    return visible(text).replace("\n", "␊")
