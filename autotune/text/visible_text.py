"""Makes untrusted text harmless for a terminal: characters that would move the cursor or hide text become visible.

The output of trials and the names of jobs are arbitrary. A terminal would obey escape sequences in them.
"""

_VISIBLE = (
    # The Unicode block with a picture of each ASCII control character, such as ␛ for escape.
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), 0x2028, 0x2029], 0xFFFD)
    # Characters that change the display order of other characters.
    | dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C], 0xFFFD)
)


def visible(text: str) -> str:
    """The text with pictures in place of control characters, except line breaks and tabs."""
    return text.translate(_VISIBLE)


def visible_line(text: str) -> str:
    """The same on one line: text after a line break could pass for a line of another origin."""
    return visible(text).replace("\n", "␊")
