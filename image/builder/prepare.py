"""Checks and compiles the Python files of an image. Package builder runs it with the image's
interpreter.

    prepare.py handler ROOT     checks the handler's files: prints one line per fault, and exits
                                with 1 if there is one
    prepare.py packages ROOT    compiles the SDK and the packages: a file that does not compile
                                stays as it is

Compiled files name their sources relative to ROOT and contain no times. Python loads the compiled
files of packages without a check. It compares the compiled files of the handler with their sources,
because users may edit the sources in an image that is a folder.
"""
from __future__ import annotations

import ast
import os
import py_compile
import sys
import warnings

PACKAGES = ("stagecoach", "site-packages")


def sources(root):
    """Returns the Python files below a folder, relative to it, always in the same order."""
    for at, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(at, name)
            if name.endswith(".py") and os.path.isfile(file) and not os.path.islink(file):
                yield os.path.relpath(file, root)


def compiled(root, name, mode):
    """Compiles a file. Returns an error text, or ""."""
    try:
        py_compile.compile(os.path.join(root, name), dfile=name, doraise=True, invalidation_mode=mode)
    except py_compile.PyCompileError as err:
        return describe(name, err.exc_value)
    except (ValueError, RecursionError, MemoryError) as err:  # NUL bytes; deep nesting
        return describe(name, err)
    return ""


def describe(name, err):
    """Returns an error as NAME:LINE: message, and the line."""
    if not isinstance(err, SyntaxError) or err.lineno is None:
        return "%s: %s" % (name, err)
    line = "\n    " + err.text.strip() if err.text and err.text.strip() else ""
    return "%s:%d: %s%s" % (name, err.lineno, err.msg, line)


def bound(tree):
    """Returns the names that a module binds at its top level, also inside if and try. "*" stands
    for names that it imports from a foreign module."""
    names, left = set(), list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(a.asname or a.name for a in node.names)
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            left.extend(ast.iter_child_nodes(node))
    return names


def handler(root):
    """Compiles the handler's files. Returns the faults."""
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    own = [name for name in sources(root) if name.split(os.sep)[0] not in PACKAGES]
    faults = [fault for fault in (compiled(root, name, mode) for name in own) if fault]
    stdlib = getattr(sys, "stdlib_module_names", frozenset()) - {"test"}  # Python 3.10 and later
    for name in own:
        if name.replace(os.sep + "__init__.py", ".py")[:-3] in stdlib:
            faults.append("%s: it would hide Python's own module of that name, want another name" % name)
    if not faults:
        with open(os.path.join(root, "handler.py"), "rb") as f:
            names = bound(ast.parse(f.read()))
        if not names & {"infer", "*"}:
            faults.append("handler.py: no infer, want def infer(state, calls: list[sc.Call])")
    return faults


def packages(root):
    """Compiles the SDK and the packages."""
    for folder in PACKAGES:
        for name in sources(os.path.join(root, folder)):
            compiled(root, os.path.join(folder, name), py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return []


def main(what, root):
    # These warnings are about foreign code. Those about the handler appear when it runs.
    warnings.simplefilter("ignore")
    faults = {"handler": handler, "packages": packages}[what](root)
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
