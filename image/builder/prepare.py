"""Checks and compiles the Python of an image; package builder runs it with the interpreter that the image is for.

    prepare.py handler ROOT     what the handler's folder brought: prints what is wrong with it, a line a fault, and ends with 1
    prepare.py packages ROOT    the SDK and what pip has installed: what does not compile there stays as it is

Compiled files name their sources relative to ROOT, and have no times in them. Those of packages are taken as they are; those
of the handler are compared with their sources, which somebody may edit in an image that is a folder.
"""
from __future__ import annotations

import ast
import os
import py_compile
import sys
import warnings

PACKAGES = ("stagecoach", "site-packages")


def sources(root):
    """The Python files below a folder, relative to it, always in the same order."""
    for at, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(at, name)
            if name.endswith(".py") and os.path.isfile(file) and not os.path.islink(file):
                yield os.path.relpath(file, root)


def compiled(root, name, mode):
    """Compile a file; returns what is wrong with it, or ""."""
    try:
        py_compile.compile(os.path.join(root, name), dfile=name, doraise=True, invalidation_mode=mode)
    except py_compile.PyCompileError as err:
        return told(name, err.exc_value)
    except (ValueError, RecursionError, MemoryError) as err:  # NUL bytes; nesting
        return told(name, err)
    return ""


def told(name, err):
    """An error as NAME:LINE: message, and the line."""
    if not isinstance(err, SyntaxError) or err.lineno is None:
        return "%s: %s" % (name, err)
    line = "\n    " + err.text.strip() if err.text and err.text.strip() else ""
    return "%s:%d: %s%s" % (name, err.lineno, err.msg, line)


def bound(tree):
    """The names that a module binds at its top level, also inside of if and try; "*" for those of somebody else's module."""
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
    """Compile the handler's files; returns what is wrong with them."""
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    own = [name for name in sources(root) if name.split(os.sep)[0] not in PACKAGES]
    faults = [fault for fault in (compiled(root, name, mode) for name in own) if fault]
    stdlib = getattr(sys, "stdlib_module_names", frozenset()) - {"test"}  # from 3.10 on
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
    """Compile what the image's user has not written."""
    for folder in PACKAGES:
        for name in sources(os.path.join(root, folder)):
            compiled(root, os.path.join(folder, name), py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return []


def main(what, root):
    warnings.simplefilter("ignore")  # of others' code; the handler's are seen when it runs
    faults = {"handler": handler, "packages": packages}[what](root)
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
