"""Compiles a PyTorch model into a package that Shardwise trains without Python. Used as `shardwise compile`."""

import os
from pathlib import Path

# PyTorch reads this when it is imported. Its own default is in /tmp and is lost at every reboot.
_cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache / "shardwise" / "inductor"))
# PyTorch's profiler, which measures memory for us, announces each start and stop on standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
