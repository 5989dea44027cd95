"""Starts Ray on this machine with what Seedance needs in its environment.

All arguments are those of `ray start`: `python deploy/multi_node/start_node.py --head …`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app.launcher import serve_environment


def main() -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    os.execve(ray, [ray, "start", *sys.argv[1:]], serve_environment(os.environ))


if __name__ == "__main__":
    main()
