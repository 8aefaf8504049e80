"""The command: installs clients, starts servers, runs the cases, prints the table. Exits with 1 on a failure
that docs/http.md does not list, 2 if nothing could be tried."""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.demo import installed_model
from tests.clients.catalogue import CLIENTS
from tests.clients.documented import unexpected
from tests.clients.environments import NotInstalledError, environment_folder
from tests.clients.running import ClientResult, run_client, table
from tests.clients.service import REAL, TINY, serving


def main() -> int:
    """Try the clients that are named, or all."""
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; without: all")
    parser.add_argument("--only", nargs="+", default=[], help="run only these cases")
    parser.add_argument("--model", choices=(REAL, TINY), help="only with this model; without: with both")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    results: list[ClientResult] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightmill-clients-")))
        files = {TINY: demo_model(), REAL: installed_model()}
        if files[REAL] is None:
            print(
                "The real model is not installed (make fetched): the bundled one alone is served.",
                file=sys.stderr,
            )
        services = [
            stack.enter_context(serving(scratch / name, path, name))
            for name, path in files.items()
            if path is not None and options.model in (None, name)
        ]
        for client in chosen:
            try:
                folder = environment_folder(client.environment)
            except NotInstalledError as error:
                print(f"{client.name} is not tried: {error}", file=sys.stderr)
                continue
            results.append(run_client(client, folder, services, scratch / "homes", options.only))
            print(table(results[-1:]), file=sys.stderr, flush=True)
    print(table(results))
    surprises = [] if options.only or options.model else unexpected(results)
    for surprise in surprises:
        print(surprise)
    if not results:
        return 2
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
