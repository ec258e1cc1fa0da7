"""A Slurm of one machine: `sbatch`, `scontrol` and `scancel` as HELM's Slurm runner calls them.

As a script it is one of them: `fake_slurm.py sbatch|scontrol|scancel FOLDER ARGUMENTS`. A job runs
at once, in a process of its own; its script and its state are in `FOLDER/<number>`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "scontrol", "scancel")


def install(folder: Path) -> dict[str, str]:
    """Write the commands into `folder/bin`; return the environment that has them in its PATH."""
    programs, jobs = folder / "bin", folder / "jobs"
    programs.mkdir(parents=True)
    jobs.mkdir()
    for command in COMMANDS:
        program = programs / command
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {command} "{jobs}" "$@"\n'
        )
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def option(script: str, name: str) -> str:
    """Return the value of `#SBATCH --name value` in a job's script."""
    found = re.search(rf"^#SBATCH --{name}\s+(.*)$", script, re.MULTILINE)
    return found[1].strip().strip("'\"") if found else ""


def sbatch(jobs: Path) -> None:
    script = sys.stdin.read()
    number = len(list(jobs.iterdir())) + 1
    job = jobs / str(number)
    job.mkdir()
    (job / "script").write_text(script)
    (job / "state").write_text("RUNNING")
    output = Path(option(script, "chdir"), option(script, "output"))
    ran = f'/bin/sh "{job}/script" && echo COMPLETED > "{job}/state" || echo FAILED > "{job}/state"'
    with output.open("w") as log:
        subprocess.Popen(["/bin/sh", "-c", ran], cwd=option(script, "chdir"), stdout=log, stderr=log,
                         stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    print(f"Submitted batch job {number}")


def main() -> None:
    command, jobs, *arguments = sys.argv[1:]
    if command == "sbatch":
        sbatch(Path(jobs))
    elif command == "scontrol":  # show job NUMBER
        number = arguments[-1]
        print(
            f"JobId={number}\n   JobState={(Path(jobs) / number / 'state').read_text().strip()} "
            "Reason=None"
        )
    else:
        (Path(jobs) / arguments[-1] / "state").write_text("CANCELLED")


if __name__ == "__main__":
    main()
