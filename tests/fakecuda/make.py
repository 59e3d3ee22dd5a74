"""Put the fake CUDA device into this Python's environment, which has a CUDA build of torch without NVIDIA's libraries.

``python -m tests.fakecuda.make`` compiles what is not in ~/.cache yet, copies it to where torch looks for NVIDIA's
libraries, and makes torch load the operators when it is imported. Torch itself is not imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fakecuda.stubs import make_stubs

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "source"
OPERATORS = {"operators.cpp", "registration.cpp"}
"""The sources of the library that is linked with torch."""
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall"]


class Environment:
    """Where this Python has torch, and where torch looks for NVIDIA's libraries."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.submodule_search_locations
        self.torch = Path(next(iter(spec.submodule_search_locations)))
        self.version = (self.torch / "version.py").read_text()
        match = re.search(r"^cuda.*= '(\d+)", self.version, re.MULTILINE)
        self.cuda = match[1] if match else ""
        self.site = Path(sysconfig.get_path("purelib"))
        self.nvidia = self.site / "nvidia" / f"cu{self.cuda}"

    def missing(self) -> str | None:
        """Return why the fake device can't be made here; None if it can."""
        if platform.machine() != "x86_64" or sys.platform != "linux":
            return "the fake device is made for Linux on x86-64"
        if shutil.which("g++") is None:
            return "there is no C++ compiler"
        if not self.cuda:
            return "this torch is no CUDA build"
        if not (self.nvidia / "include" / "cuda_runtime_api.h").exists():
            return f"CUDA's headers are not in {self.nvidia}"
        real = [path.name for path in (self.nvidia / "lib").glob("libcublas.so*") if path.stat().st_size > 1 << 20]
        return f"NVIDIA's own libraries are installed: {real[0]}" if real else None


def _cache(environment: Environment) -> Path:
    """Return the folder of libraries made of these sources, compiler and torch, which may not exist yet."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    made_of = [environment.version, compiler, *_FLAGS]
    made_of += [path.read_text() for path in sorted([*SOURCE.iterdir(), HERE / "make.py", HERE / "stubs.py"])]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "aiockpt-fakecuda" / name


def build(environment: Environment) -> Path:
    """Return a folder with all libraries, made unless they are in the cache. Several processes may do so at once."""
    made = _cache(environment)
    if made.exists():
        return made
    work = made.with_name(f"{made.name}.{os.getpid()}")
    libraries = work / "lib"
    libraries.mkdir(parents=True)
    try:
        _compile(environment, work, libraries)
        with contextlib.suppress(OSError):  # another process was faster
            libraries.rename(made)
    finally:
        shutil.rmtree(work)
    return made


def _compile(environment: Environment, work: Path, libraries: Path) -> None:
    includes = [environment.torch / "include", environment.torch / "include/torch/csrc/api/include"]
    flags = [*_FLAGS, "-DUSE_CUDA", *(f"-I{folder}" for folder in [*includes, environment.nvidia / "include"])]
    # The largest first; the compiler's processes do the work.
    sources = sorted(SOURCE.glob("*.cpp"), key=lambda path: path.name not in OPERATORS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path: _run("g++", *flags, "-c", path, "-o", work / f"{path.stem}.o"), sources))
    name = f"libcudart.so.{environment.cuda}"
    versions = work / "versions.txt"
    versions.write_text(f"{name} {{ global: *; }};\n")
    own = [work / f"{path.stem}.o" for path in sources if path.name not in OPERATORS]
    script = f"-Wl,--version-script={versions}"
    _run("g++", "-shared", *own, "-o", libraries / name, f"-Wl,-soname,{name}", script, "-lpthread", "-ldl")
    for driver in ("libcuda.so.1", "libnvidia-ml.so.1"):  # without content: what they need has it
        command = ["g++", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", libraries / name]
        _run(*command, "-o", libraries / driver, f"-Wl,-soname,{driver}")
    make_stubs(environment.torch / "lib", libraries / name, work)
    theirs = [work / f"{Path(source).stem}.o" for source in sorted(OPERATORS)]
    linked = [f"-L{environment.torch / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", libraries / name]
    options = ["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", "-Wl,-rpath,$ORIGIN:$ORIGIN/../../../torch/lib"]
    _run("g++", "-shared", *theirs, "-o", libraries / "libfakecuda_operators.so", *options, *linked)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def install(environment: Environment, libraries: Path) -> None:
    """Copy the libraries to where torch looks for NVIDIA's, and have torch load the operators."""
    folder = environment.nvidia / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    for path in libraries.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        shutil.copy(path, folder / path.name)
    _add_module(environment.site, folder / "libfakecuda_operators.so")


def _add_module(site: Path, operators: Path) -> None:
    """Add the package ``fakecuda``, whose function `load` torch calls when it is imported."""
    lines = ['"""The fake CUDA device: torch calls `load` when it is imported."""', "", "", "def load() -> None:"]
    lines += ["    import torch", "", f"    torch.ops.load_library({str(operators)!r})", ""]
    (site / "fakecuda.py").write_text("\n".join(lines))
    package = site / "fakecuda-0.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fakecuda\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nfakecuda = fakecuda:load\n")
    (package / "RECORD").write_text("")


def main() -> int:
    """Make and install the device; return 3 if that is impossible here."""
    environment = Environment()
    if reason := environment.missing():
        sys.stdout.write(f"+ the fake CUDA device can't be made: {reason}\n")
        return 3
    install(environment, build(environment))
    return 0


if __name__ == "__main__":
    sys.exit(main())
