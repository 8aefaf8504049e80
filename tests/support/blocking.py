"""Finds the calls of a module that may block a thread, and whether the call itself says for how long.

What is looked for, by its usual name: joins of threads, waits for events, conditions, processes and futures,
queues, locks, pipes, sockets, file locks, subprocesses, and the making of clients of databases, Redis and
HTTP. Not looked for: what is awaited (it holds no thread), files on disks, and arithmetic.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Calls that wait for ever unless they are given an argument: method -> place of the one that bounds it.
_BOUNDED_BY = {
    "join": 0,
    "wait": 0,
    "wait_for": 1,
    "result": 0,
    "exception": 0,
    "acquire": 1,
    "communicate": 1,
}
_ALWAYS = {
    "recv",
    "recv_bytes",
    "recv_into",
    "sendall",
    "synchronize",
    "waitpid",
    "as_completed",
    "getaddrinfo",
}
_NEED_TIMEOUT = {
    *("run", "check_output", "check_call", "call"),  # of subprocess
    *("create_connection", "HTTPConnection", "HTTPSConnection", "urlopen"),
}
_CLIENTS = {"Redis", "from_url", "create_engine"}
_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}
_FILE_LOCKS = {"flock", "lockf", "WeakFileLock", "FileLock"}
_POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
_TIMEOUTS = {"timeout", "socket_timeout"}
_OTHERS = {"Thread", "read", "select", "get", "shutdown", "accept", "poll"}
_NAMES = (
    _BOUNDED_BY.keys() | _ALWAYS | _NEED_TIMEOUT | _CLIENTS | _LOCKS | _FILE_LOCKS | _POOLS | _OTHERS
)  # of whatever is judged at all


@dataclass(frozen=True, slots=True, order=True)
class Blocking:
    """A call that may block, and where it is."""

    place: str
    """Module and function, as `jobs/server/job_service.py Desk.close`."""
    call: str
    """What is called, as it stands there, without the arguments."""


def blocking_calls(root: Path, path: Path) -> Iterator[Blocking]:
    """The calls of a module that may block and are given no time limit."""
    tree = ast.parse(path.read_text())
    variables = _context_variables(tree)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    name = path.relative_to(root).as_posix()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Blocking]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            if (
                isinstance(child, ast.Call)
                and id(child) not in awaited
                and _may_block(child)
                and ast.unparse(child.func) not in variables
            ):
                yield Blocking(f"{name} {'.'.join(scope) or '-'}", ast.unparse(child.func))
            yield from visit(child, inner)

    yield from visit(tree, ())


def _context_variables(tree: ast.Module) -> set[str]:
    """How the values of a module's context variables are asked for, which blocks nobody."""
    return {
        f"{target.id}.get"
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(target := node.target, ast.Name)
        if "ContextVar" in ast.unparse(node.annotation)
    }


def _may_block(call: ast.Call) -> bool:
    if getattr(call.func, "attr", getattr(call.func, "id", None)) not in _NAMES:
        return False
    whole = ast.unparse(call.func)
    of, _, name = whole.rpartition(".")
    if of.startswith("asyncio") or whole in ("os.path.join", "super().join"):
        return False
    given = {one.arg: one.value for one in call.keywords}
    if name in _LOCKS:
        return of in ("threading", "")
    if name in _FILE_LOCKS and "timeout" in given:
        return not _is_bounded(given["timeout"])
    if name in _FILE_LOCKS:
        return not any("LOCK_NB" in ast.unparse(one) or "LOCK_UN" in ast.unparse(one) for one in call.args)
    if name in _POOLS or name in _ALWAYS:
        return True
    if name in _CLIENTS:
        return not (_TIMEOUTS & given.keys()) and (bool(of) or name == "create_engine")
    if name == "Thread":
        return "daemon" not in given
    if whole in ("os.read", "sys.stdin.read"):
        return True
    if whole == "select.select":
        return len(call.args) < 4 or not _is_bounded(call.args[3])
    if name == "get":
        return not call.args and not _is_bounded(given.get("timeout"))
    if name == "shutdown":  # of an executor; of a socket it has a number
        return not call.args and not _says_no(given.get("wait"))
    if name in _NEED_TIMEOUT:
        if of != "subprocess" and name in ("run", "call"):
            return False
        bound = given.get("timeout") or (
            call.args[1] if name == "create_connection" and len(call.args) > 1 else None
        )
        return not _is_bounded(bound)
    if name == "accept":  # of a listening socket
        return not call.args and not call.keywords
    if name == "poll":
        return bool(call.args) and _is_none(call.args[0])
    if name not in _BOUNDED_BY:
        return False
    if _says_no(given.get("blocking")) or _says_no(call.args[0] if call.args and name == "acquire" else None):
        return False
    place = _BOUNDED_BY[name]
    bound = given.get("timeout") or (call.args[place] if len(call.args) > place else None)
    return not _is_bounded(bound)


def _is_bounded(timeout: ast.expr | None) -> bool:
    return timeout is not None and not _is_none(timeout)


def _is_none(value: ast.expr) -> bool:
    """Whether it is None, or may be by what is said here."""
    if isinstance(value, ast.IfExp):
        return _is_none(value.body) or _is_none(value.orelse)
    if isinstance(value, ast.UnaryOp):  # acquire(timeout=-1)
        return isinstance(value.op, ast.USub)
    return isinstance(value, ast.Constant) and value.value is None


def _says_no(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False
