"""Imports an image's handler as its processes do. Package builder runs it with the image's
interpreter.

    imports.py RESULT    runs in a folder with the image's files. If the import fails, it writes the
                         kind of the error and its text to the file RESULT, as two lines.

Kinds are "missing" (a module is not found), "import" (any other ImportError) and "other" (any other
exception).
"""
from __future__ import annotations

import importlib
import os
import sys
import traceback


def where(err, root):
    """Returns the innermost line of the handler's own files in the traceback of err, or ""."""
    at = ""
    for frame in traceback.extract_tb(err.__traceback__):
        name = os.path.relpath(frame.filename, root)
        if not name.startswith((os.pardir, "stagecoach" + os.sep, "site-packages" + os.sep)) and "<" not in frame.filename:
            at = "%s:%d: " % (name, frame.lineno)
    return at


def main(result):
    root, script = os.getcwd(), os.path.dirname(os.path.abspath(__file__))
    sys.dont_write_bytecode = True
    sys.path[:] = [root, os.path.join(root, "site-packages")] + [p for p in sys.path if os.path.abspath(p or root) != script]
    try:
        importlib.import_module("handler")
        return
    except ModuleNotFoundError as err:
        kind, text = "missing", "%sit needs the module %r" % (where(err, root), err.name)
    except ImportError as err:
        kind, text = "import", "%s%s" % (where(err, root), err)
    # It may need something that exists only at run time, such as a secret.
    except BaseException as err:
        kind, text = "other", "%s%s: %s" % (where(err, root), type(err).__name__, err)
    with open(result, "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(kind + "\n" + " ".join(text.split()))


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # does not wait for threads of the handler
