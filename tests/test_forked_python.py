"""Programs of `tests.forked_python` run as those of the interpreter would."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_a_program_has_the_files_that_its_command_line_inherits(python: list[str]) -> None:
    """With their numbers, which may be those of files of the server."""
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb", buffering=0) as pipe:
        pipe.write(b"from the parent")
        done = subprocess.run(
            [*python, "-u", "-c", "import os, sys; print(os.read(int(sys.argv[1]), 99), sys.argv)", str(read), "a"],
            pass_fds=[read],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == f"b'from the parent' ['-c', '{read}', 'a']\n"


def test_what_a_program_defines_is_in_its_main_module(python: list[str], tmp_path: Path) -> None:
    code = "import pickle, sys\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, __name__)"
    (tmp_path / "program.py").write_text(code)
    for args in (["-c", code], [str(tmp_path / "program.py")]):
        done = subprocess.run([*python, *args], capture_output=True, text=True, check=True)
        assert done.stdout == "True __main__\n"
