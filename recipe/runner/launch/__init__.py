"""From a command line to a finished run: configuration, checks, start, progress lines and the run folder."""
