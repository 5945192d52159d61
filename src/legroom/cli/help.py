"""`legroom help [VERB]`: what --help says, for whoever types it the other way round."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from legroom.words import say


def _below(context: click.Context, words: list[str]) -> click.Context:
    """The context of the command that the words lead to; UsageError where there is none."""
    while words:
        group = context.command
        if not isinstance(group, click.Group):
            context.fail(say("Got unexpected extra argument ({args})", args=" ".join(words)))
        name, command, words = group.resolve_command(context, words)
        assert command is not None  # a name that stands for nothing was refused
        context = click.Context(command, context, name, **command.context_settings)
    return context


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The commands below those that are there already."""
    try:
        found = _below(ctx.find_root(), list(ctx.params.get("verb") or ()))
    except click.UsageError:
        return []
    names = found.command.list_commands(found) if isinstance(found.command, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("verb", nargs=-1, metavar="[VERB]", shell_complete=_names)
@click.pass_context
def command(ctx: click.Context, verb: tuple[str, ...]) -> None:
    """What a verb does and its options, as --help says it."""
    found = _below(ctx.find_root(), list(verb))
    click.echo(found.get_help(), color=ctx.color)
