"""``python -m legroom``: the command line, for places where its script is not on the path."""

from legroom.cli.main import main

if __name__ == "__main__":
    main()
