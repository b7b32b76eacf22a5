"""Writes measured points as docs/results/data/README.md describes them."""

import datetime
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

# What the data call the links and libraries of a benchmark's options.
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "none": "unshaped"}
LIBRARIES = {"gloo": "Gloo", "mpi": "MPI"}


def write(path, units, points, **about):
    """Writes a file of points.

    Args:
        path: The file.
        units: {figure: unit}
        points: {setting: value}, {figure: value} and perhaps what else is said of each point;
            figures that are None are left out.
        about: What else is said of every point, such as its seeds.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    processor = f"{os.cpu_count()} cores, {platform.machine()}"
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{processor}, {platform.system()} {platform.release()}",
        "date": datetime.date.today().isoformat(),
        **({"commit": commit} if commit else {}),
        **about,
    }
    with path.open("w", encoding="utf-8") as file:
        for at, figures, *more in points:
            known = {name: its for name, its in figures.items() if its is not None}
            units_of = {name: units[name] for name in known if name in units}
            point = {"at": at, "figures": known, "units": units_of, **about, **dict(*more)}
            file.write(json.dumps(point, ensure_ascii=False) + "\n")
