"""The sizes of the house. Lower one when it has shrunk; only an issue that names it may raise one."""

PACKAGE_LINES = 28020
PACKAGE_FILES = 198
TEST_LINES = 34127
ORCHESTRATOR_LINES, AGENTS_LINES = 1200, 2810
FILES_IN_A_FOLDER = 16  # without __init__.py
FILE_LINES = 300
CLASS_LINES = 200
FUNCTION_LINES = 56
PARAMETERS = 8  # without self and cls
ATTRIBUTES = 14  # that methods of a class give to self
OPTIONS = 206  # of one command
STEP_FILES = 40  # of the package that a default PPO step executes
STEP_FILE_LINES = 300  # of each of them
