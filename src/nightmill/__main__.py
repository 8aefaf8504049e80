"""`python -m nightmill` is `nightmill`, where the script is not on the PATH."""

from nightmill.jobs.commands.main import main

main()
