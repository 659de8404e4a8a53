# SPDX-License-Identifier: Apache-2.0
"""A launcher of grids under test: run a script in a process forked by the tests' server, instead of a new one.

Arguments: the folder of the servers, the script, and its own. `tests` must be on the search path.
"""

import sys
from pathlib import Path

import processes


if __name__ == "__main__":
    processes.FOLDER = Path(sys.argv[1])
    done = processes.run(processes.script(sys.argv[2], *sys.argv[3:]))
    print(done.output, end="")
    sys.exit(done.returncode)
