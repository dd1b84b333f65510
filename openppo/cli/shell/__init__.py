"""What the shell sees before a command runs: the program ``openppo`` and ``--version``."""
