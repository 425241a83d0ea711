"""The commands of boxctl, and the border where every failure becomes three lines and an exit code: nobody ever sees a stack trace."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from node.cli import boxes, connect, doctor, down, images, keys, nodes, show, status, up
from node.cli.failure import as_failure


class Bordered(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            if leads_out(error):
                raise
            failure = as_failure(error)
            show.print_failure(failure)
            raise typer.Exit(failure.exit_code) from error


def leads_out(error: BaseException) -> bool:
    """What typer itself ends with the right code: exits, wrong usage (2), Ctrl-C (130), a reader of our output that has gone."""
    told_by_typer = hasattr(error, "format_message")  # its usage errors, of no public name
    return told_by_typer or isinstance(error, typer.Exit | typer.Abort | KeyboardInterrupt | BrokenPipeError)


app = typer.Typer(
    name="boxctl",
    cls=Bordered,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Boxes for coding agents: the operator's command for this host and its coordinator.",
)
app.add_typer(boxes.app, name="box")
app.add_typer(images.app, name="image")
app.add_typer(keys.app, name="key")
app.add_typer(nodes.app, name="node")
for command in (up.up, down.down, status.status, doctor.doctor, connect.connect):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("boxfleet"))
        raise typer.Exit


@app.callback()
def boxctl(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


def main() -> None:
    app()


if __name__ == "__main__":
    main()
