"""The ground of every other folder: errors, values as JSON, text, files, seeds and forks."""
