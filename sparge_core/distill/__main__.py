"""`python -m sparge_core.distill`, as torchrun starts it."""

from .cli import run

run()
