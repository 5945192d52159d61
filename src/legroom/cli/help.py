"""`legroom help [COMMAND]`: the same text as `legroom COMMAND --help`."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from legroom.messages import say


def _below(context: click.Context, words: list[str]) -> click.Context:
    """The context of the command that the arguments name; UsageError if there is none."""
    while words:
        group = context.command
        if not isinstance(group, click.Group):
            context.fail(say("Got unexpected extra argument ({args})", args=" ".join(words)))
        name, command, words = group.resolve_command(context, words)
        assert command is not None  # resolve_command refuses unknown names
        context = command.context_class(command, context, name, **command.context_settings)
    return context


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the next subcommand."""
    try:
        found = _below(ctx.find_root(), list(ctx.params.get("names") or ()))
    except click.UsageError:
        return []
    names = found.command.list_commands(found) if isinstance(found.command, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]", shell_complete=_complete)
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command."""
    found = _below(ctx.find_root(), list(names))
    click.echo(found.get_help(), color=ctx.color)
