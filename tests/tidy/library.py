"""What the library never does: one function a rule, each yielding what breaks it."""

import ast
from collections.abc import Iterator

from tests.tidy.source import called, imports

_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_LOG_SETUP = {"basicConfig", "addHandler", "setLevel", "disable", "dictConfig", "fileConfig"}
_ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
_RISKY = {"shell=True", "trust_remote_code=True"}
_UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


def reads_environment(tree: ast.AST) -> Iterator[str]:
    """Settings are data: nothing is read from, or written to, the process's environment."""
    for node in ast.walk(tree):
        if called(node) in _ENVIRONMENT:
            yield f"{getattr(node, 'lineno', 0)}: uses {called(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if f"os.{alias.name}" in _ENVIRONMENT:
                    yield f"{node.lineno}: imports os.{alias.name}"


def formats_log_eagerly(tree: ast.AST) -> Iterator[str]:
    """A log call has a constant text and its values as arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = called(node.func.value).split(".")[-1].lstrip("_")
        if owner not in {"logger", "log", "logging"} or node.func.attr not in _LOG_METHODS:
            continue
        text = node.args[node.func.attr == "log"] if node.args else None
        if not isinstance(text, ast.Constant):
            yield f"{node.lineno}: logs a text that is put together before the level is known"


def sets_up_logging(tree: ast.AST) -> Iterator[str]:
    """Handlers and levels are the application's; loggers are named by their module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name in _LOG_SETUP and not isinstance(node.func.value, ast.Call | ast.Constant):
            yield f"{node.lineno}: sets logging up with {name}"
        named = [ast.unparse(value) for value in node.args]
        if called(node.func) == "logging.getLogger" and named != ["__name__"]:
            yield f"{node.lineno}: a logger is named __name__"


def prints(tree: ast.AST) -> Iterator[str]:
    """A library logs; only commands print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node.func) == "print":
            yield f"{node.lineno}: prints"


def unpickles(tree: ast.AST) -> Iterator[str]:
    """What another process sent is never run."""
    for target, line in imports(tree):
        if target.split(".")[0] in _UNSAFE:
            yield f"{line}: imports {target}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node.func) in {"eval", "exec", "os.system"}:
            yield f"{node.lineno}: calls {called(node.func)}"
        if isinstance(node, ast.keyword) and ast.unparse(node) in _RISKY:
            yield f"{node.value.lineno}: {ast.unparse(node)}"


def catches_everything(tree: ast.AST) -> Iterator[str]:
    """No bare ``except``, and no handler of BaseException that does not pass it on."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"{node.lineno}: bare except"
        silent = all(isinstance(inner, ast.Pass | ast.Continue) for inner in node.body)
        if node.type is not None and silent and called(node.type) in {"Exception", "BaseException"}:
            yield f"{node.lineno}: swallows {called(node.type)}"


def works_in_assert(tree: ast.AST) -> Iterator[str]:
    """``python -O`` removes an assert and all that is called inside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for inner in ast.walk(node.test):
                if isinstance(inner, ast.Call) and called(inner.func) not in {"isinstance", "len"}:
                    yield f"{node.lineno}: calls {ast.unparse(inner.func)} inside an assert"


def raises_foreign(tree: ast.AST) -> Iterator[str]:
    """Failures are of the tree in kvpool.errors; builtins are for the language's own protocols."""
    foreign = {"Exception", "RuntimeError", "OSError", "IOError", "BaseException"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if called(raised) in foreign:
                yield f"{node.lineno}: raises {called(raised)}, which is not of kvpool.errors"
