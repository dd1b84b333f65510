"""``python -m openppo COMMAND``, and ``torchrun ... -m openppo COMMAND``: the same as the program ``openppo``."""

from openppo.cli.shell.commands import main

if __name__ == "__main__":
    main()
