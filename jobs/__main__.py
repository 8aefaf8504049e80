"""`python -m jobs` is `nightmill`, where the script is not on the PATH."""

from jobs.cli import main

main()
