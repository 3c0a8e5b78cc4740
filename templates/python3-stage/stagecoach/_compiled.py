"""Keeps the code that torch.compile and Triton have compiled.

A zygote and its replicas compile into one folder, below the temporary folder. After the load hook,
the zygote copies the compiled code into the image's folder on the node's disk, unless a copy
exists. Nothing writes to the copy later. The next zygotes of the image begin with links to the
copied code, and do not compile it again. Code that a replica compiles later is only in the zygote's
folder. Other replicas of the zygote find it there until the zygote ends.
"""
from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile

ENV_FOLDER = "STAGECOACH_PREPACKED"  # folder of the image, on the node's disk
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
KEPT = "compiled"  # start of the copy's name in the image's folder
LOCKS = "locks"  # folder of Inductor's lock files, which it does not open through links
MOST = 900  # files and folders that are kept; the platform takes 1000 in the image's folder


def prepare() -> str:
    """Make this process and its children compile into one folder, and return it.

    The folder begins with links to the code that earlier zygotes of the image have compiled. Return
    "" if the function has set a compile folder itself, if the platform gives no image folder, or if
    the folder cannot be made.
    """
    image = os.environ.get(ENV_FOLDER, "")
    if not image or INDUCTOR in os.environ:
        return ""
    folder = os.path.join(tempfile.gettempdir(), f"stagecoach-compiled-{os.getuid()}-{os.path.basename(image)}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if os.lstat(folder).st_uid != os.getuid() or os.path.islink(folder):
            folder = tempfile.mkdtemp(prefix="stagecoach-compiled-")
        _link(_kept(image), folder)
    except OSError as err:
        logging.getLogger("stagecoach").warning("the code that torch.compile makes is not kept: %s", err)
        return ""
    os.environ[INDUCTOR] = folder
    os.environ.setdefault(TRITON, os.path.join(folder, "triton"))
    return folder


def keep(folder: str) -> None:
    """Copy the folder that prepare returned into the image's folder, unless that has a copy."""
    if not folder or not any(files for _, _, files in os.walk(folder)):
        return
    kept = _kept(os.environ[ENV_FOLDER])
    half = f"{kept}.{os.getpid()}"  # the platform removes it if this process ends during the copy
    if os.path.exists(kept) or not os.access(os.path.dirname(kept), os.W_OK):
        return
    count = sum(len(folders) + len(files) for _, folders, files in os.walk(folder))
    log = logging.getLogger("stagecoach")
    if count > MOST:
        log.warning("the code that torch.compile has made is not kept: %d files and folders, want at most %d", count, MOST)
        return
    try:
        shutil.copytree(folder, half, ignore=lambda at, names: [LOCKS] if at == folder else [])
        os.rename(half, kept)
        log.info("the code that torch.compile has made is kept for later zygotes of the image: %d files and folders", count)
    except OSError as err:
        shutil.rmtree(half, ignore_errors=True)
        if not os.path.exists(kept):  # otherwise, another zygote was faster
            log.warning("the code that torch.compile has made is not kept: %s", err)


def _kept(image: str) -> str:
    """Return the path of the copy in the image's folder.

    The path depends on the processor. Inductor compiles for the local processor (-march=native),
    and a disk may move to another machine.
    """
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        processor = next((line for line in f if line.startswith(("flags", "Features"))), "")
    return os.path.join(image, f"{KEPT}-{hashlib.sha256(processor.encode()).hexdigest()[:16]}")


def _link(kept: str, folder: str) -> None:
    """Make links in folder to all files in kept, which may not exist."""
    # Remove links to files of an earlier folder that no longer exists.
    for at, _, files in os.walk(folder):
        for path in (os.path.join(at, name) for name in files):
            if not os.path.exists(path):
                os.unlink(path)
    for at, _, files in os.walk(kept):
        to = os.path.normpath(os.path.join(folder, os.path.relpath(at, kept)))
        os.makedirs(to, exist_ok=True)
        for name in files:
            with contextlib.suppress(FileExistsError):
                os.symlink(os.path.join(at, name), os.path.join(to, name))
