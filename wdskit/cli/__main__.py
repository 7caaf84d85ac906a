"""`python -m wdskit.cli`: the command line without its script."""

from wdskit.cli import main

if __name__ == "__main__":
    main()
