"""A campaign of freshly drawn problems: `make fuzz`, or `python -m tests.fuzz --seed 1 --count 1000`.

The property tests draw the same problems everywhere, so that a suite that is green here is green elsewhere; this draws
new ones every time. What it finds is shrunk, printed with the command that repeats it, and ends the run with status 1.
"""
