"""Accept old names of options with a note; they are absent from the help."""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperGroup
from typer.main import get_group

from autotune.cli.status import print_note
from autotune.request.field_names import OLD_OPTIONS, given_twice, old_name_note

LAZY = frozenset({"sweep", "scale", "submit"})
"""Commands that are defined in `request_app`."""


class PresentNames(TyperGroup):
    """A group whose commands accept the old names of their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """See `TyperGroup.resolve_command`. RequestError: an option is given by both names."""
        if args and args[0] in LAZY:
            self.build()
        name, command, words = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            words = list(_with_present_options(command, words))
        return name, command, words

    def build(self) -> "PresentNames":
        """Build the commands that are only built when they are needed, because a request's declarations take time to load."""
        from autotune.cli.request_app import request_app

        self.commands.update(get_group(request_app).commands)
        return self


def _with_present_options(command: Any, words: Sequence[str]) -> Iterator[str]:
    """The words with old option names replaced by present ones, if the command has the present one and lacks the old one."""
    takes_value = {name: not getattr(option, "is_flag", True) for option in command.params for name in option.opts}
    renamed = {old: new for old, new in OLD_OPTIONS.items() if new in takes_value and old not in takes_value}
    given = {word.partition("=")[0] for word in words}
    noted = set()
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield from (word, *rest)
            return
        option, equals, value = word.partition("=")
        new = renamed.get(option, option)
        if new != option:
            if new in given:
                raise given_twice(new, option)
            if option not in noted:
                print_note(old_name_note(option, new))
                noted.add(option)
        yield new + equals + value
        if not equals and takes_value.get(new):
            yield from (value for value in (next(rest, None),) if value is not None)
