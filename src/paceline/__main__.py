"""`python -m paceline`, and what torchrun starts."""

from paceline.cli import main

main()
