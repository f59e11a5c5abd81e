"""Everything around a training run that knows nothing of the method: from a command line to a finished run folder.

Launch, checks, checkpoints, faults, the CPU platform and export, for a recipe on verl 0.9.1. It
imports neither :mod:`recipe.fspo` nor a loss. Importing this package loads nothing heavy.
"""

#: The one verl release whose hooks this is written against; checked at start (:mod:`recipe.runner.launch.checks`).
SUPPORTED_VERL = "0.9.1"
