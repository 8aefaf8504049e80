"""Other people's client libraries against `nightmill serve`: `make clients`, `python -m tests.clients`.

Each client is installed from the index into an environment of its own, and its cases run in the interpreter
of that environment, with the settings that its users have by default. `catalogue.py` lists clients and
versions, `environments.py` installs them, `service.py` starts servers and workers, `running.py` runs cases
and collects what they report. The cases stand in `scripts/`, which imports nothing of Nightmill. Cases that
fail are listed, with the reason, in docs/http.md; `test_clients.py` compares the list with what happens.
"""
