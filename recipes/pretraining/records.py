# SPDX-License-Identifier: Apache-2.0
"""`study.json`: the settings of a study and its finished runs, so that it can be continued."""

import json
from pathlib import Path
from typing import Any

from hf_mxfp4.files import write_json


class StudyFile:
    """The finished runs of a study.

    Args:
        path: of the file; runs in one that exists are kept.
        settings: everything that a run's result depends on, but for its arm and seed.

    Raises `ValueError` when the file holds a study with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.runs: list[dict[str, Any]] = []
        if path.is_file():
            stored = json.loads(path.read_text())
            changed = [name for name, value in self.settings.items() if stored["settings"].get(name) != value]
            if changed:
                told = ", ".join(f"{name}={stored['settings'].get(name)!r}" for name in changed)
                raise ValueError(f"{path} holds a study with {told}; choose another output_dir, or the same options")
            self.runs = stored["runs"]

    def finished(self, arm: str, seed: int, scheme: str) -> bool:
        """Whether there is such a run. Raises `ValueError` when it was of another scheme."""
        for run in self.runs:
            if (run["arm"], run["seed"]) == (arm, seed):
                if run["scheme"] != scheme:
                    raise ValueError(
                        f"{self.path} has a run of arm {arm!r} with the scheme {run['scheme']}, not {scheme}; give the "
                        "arm another name"
                    )
                return True
        return False

    def add(self, run: dict[str, Any]) -> None:
        """Append a run; a process killed meanwhile leaves the file as it was."""
        self.runs.append(run)
        write_json(self.path, {"settings": self.settings, "runs": self.runs}, indent=1)
