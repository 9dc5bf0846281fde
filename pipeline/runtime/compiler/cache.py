"""Where torch keeps what it has compiled: code and pickles, which it runs when it finds them again.

By itself it takes a folder of a known name in the temporary one, which whoever was there first may have made.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@cache
def own_cache_folder() -> None:
    """Once in a process: the folder is this user's alone, or another one is taken. One that was named is as it is."""
    if os.environ.get(CACHE):
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    if not is_own(folder):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="torchinductor-")
        logging.getLogger("shardwright.runtime").warning(
            "%s belongs to somebody else: compiled blocks are kept in %s; set %s to a folder of yours",
            folder,
            os.environ[CACHE],
            CACHE,
        )


def is_own(folder: Path) -> bool:
    """Made if it is not there; others may not write into it from now on."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if found.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    return True
