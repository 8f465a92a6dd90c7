"""Packages of PyPI for a test, in a virtual environment of the test's own."""

import pathlib
import subprocess
import sys
import venv

SKIPPED = 77


def use_packages(folder, packages):
    """Installs the packages in the folder, once, and goes on with its Python; ends with 77 where it cannot."""
    folder = pathlib.Path(folder)
    python = folder / "bin" / "python3"
    if pathlib.Path(sys.prefix).resolve() == folder.resolve():
        return
    mark = folder / "complete"
    try:
        if not mark.exists():
            venv.create(folder, with_pip=True, clear=True)
            pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
            install = ["install", "--retries", "1", "--timeout", "20", *packages]
            subprocess.run([*pip, *install], check=True, timeout=240)
            mark.touch()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"skipped: {' and '.join(packages)} cannot be installed: {error}")
        sys.exit(SKIPPED)
    sys.exit(subprocess.run([python, "-B", *sys.argv]).returncode)
