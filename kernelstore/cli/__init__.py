"""The command line: ``kernelstore COMMAND``, over the public API."""

from __future__ import annotations

import importlib
import sys
import warnings

import click

from kernelstore import __version__
from kernelstore.errors import InvalidArgument, InvalidType, KernelStoreError

__all__ = ["main"]

# Command to (module, what the list of commands says): a module is imported when its command is asked for.
_COMMANDS = {
    "demo": ("demo_command", "Compile a set of real kernels into the store, and show hits on the second run."),
    "compile": ("compile_command", "Compile a CUDA C++ file into the store."),
    "rebuild": ("rebuild_command", "Compile a stored program for another GPU, without its source file."),
    "explain": ("explain_command", "Tell why a compile would miss, or how two artifacts differ."),
    "put": ("put_command", "Store kernels that nvcc or another compiler made."),
    "ls": ("ls_command", "List what is stored, newest use first."),
    "show": ("show_command", "Tell everything about one artifact."),
    "cat": ("cat_command", "Write an artifact's payload, or its source."),
    "sql": ("sql_command", "Run one SELECT over the store."),
    "stats": ("stats_command", "Tell hit rate, time saved and sizes."),
    "upgrade": ("upgrade_command", "Make the file, or bring it to this release's schema."),
    "doctor": ("doctor_command", "Tell what this machine and this store are, and what is wrong with them."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kernelstore.cli.{_COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(_COMMANDS)}"
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kernelstore")
def _group() -> None:
    """Compiled CUDA kernels in one SQLite file.

    The store is --db PATH, else $KERNELSTORE_PATH, else cache.db in your cache directory.

    \b
    Examples:
      kernelstore demo --db cache.db
      kernelstore compile saxpy.cu --arch sm_90 --name-expression 'saxpy<float>'
      kernelstore ls --arch sm_90
      kernelstore sql "SELECT arch, count(*) FROM artifact GROUP BY arch"

    Exit status: 0; 1 when something failed or was found wrong; 2 for wrong usage.
    """


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"kernelstore: warning: {message}", err=True)


def main() -> None:
    """Run the command line: errors and warnings go to stderr in one line, without a traceback."""
    warnings.showwarning = _show_warning
    try:
        status = _group.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.NoSuchOption as error:
        error.show()
        if error.ctx is not None and any(p.name == "options" for p in error.ctx.command.params):
            click.echo("Options of NVRTC stand behind --, as in: -- -lineinfo -DN=8", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (InvalidArgument, InvalidType) as error:
        click.echo(f"kernelstore: {error}", err=True)
        sys.exit(2)
    except KernelStoreError as error:
        click.echo(f"kernelstore: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # `kernelstore ls | head`: nobody reads on. Closing stderr's twin too keeps Python from complaining at exit.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"kernelstore: {where}{error.strerror or error}", err=True)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
