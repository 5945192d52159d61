"""``legroom`` and ``python -m legroom``: the command line.

Covers: ending quietly on a Ctrl-C that comes before there is anything to stop. Does not cover: anything the command
line does (cli).
"""

STOPPED = 130  # what a shell shows for a program that Ctrl-C ended


def main() -> None:
    """Import the command line, run it and exit."""
    try:
        from legroom.cli.main import main as door

        door()
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None


if __name__ == "__main__":
    main()
