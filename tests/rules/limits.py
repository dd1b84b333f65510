"""Fixed sizes of one file, class or function, without totals: a reason to stop and think, never one to pack."""

FILE_LINES = 400
CLASS_LINES = 250
FUNCTION_LINES = 60
PARAMETERS = 8  # without self and cls
