"""Small jobs of one idea each, and the command that runs any plan over any part of them: `python -m tests.corpus`."""
