"""Libraries without content in the place of NVIDIA's that torch is linked with: any call of them ends the process."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_PREFIXES = ("cu", "nccl", "nvshmem", "nvrtc", "nvJit", "nvtx", "nvml", "nvperf")
"""How the symbols begin that torch's libraries need without saying of which library."""


def _readelf(path: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout


@dataclass
class _Library:
    """What a library needs and defines."""

    needed: list[str]
    defined: set[str] = field(default_factory=set)
    undefined: dict[str, tuple[str, str]] = field(default_factory=dict)  # symbol -> library and version, or ""

    @classmethod
    def read(cls, path: Path) -> _Library:
        made = cls(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf(path, "-d")))
        libraries, library = {}, ""
        for line in _readelf(path, "-V").splitlines():
            if match := re.search(r"Version: \d+  File: (\S+)", line):
                library = match[1]
            elif match := re.search(r"Name: (\S+)  Flags: .*Version: \d+", line):
                libraries[match[1]] = library
        for line in _readelf(path, "--dyn-syms").splitlines():
            columns = line.split()
            if len(columns) < 8 or not columns[0].rstrip(":").isdigit():
                continue
            name, _, version = columns[7].partition("@")
            if columns[6] != "UND":
                made.defined.add(name)
            elif columns[4] != "WEAK":
                version = version.lstrip("@")
                made.undefined[name] = libraries.get(version, ""), version
        return made


def _symbols(folder: Path, present: set[str]) -> dict[str, dict[str, str]]:
    """Return the symbols, with their versions, of each library that torch's need and that is not ``present``."""
    paths = {path.name: path for path in folder.glob("*.so*")}
    read = [_Library.read(path) for path in paths.values()]
    wanted: dict[str, dict[str, str]] = {}
    for library in read:
        for name in library.needed:
            if name not in paths and re.match(r"lib(cu|nv|nccl)", name):
                wanted.setdefault(name, {})
    defined = {name for library in read for name in library.defined}
    rest: dict[str, str] = {}
    for library in read:
        for name, (file, version) in library.undefined.items():
            if file in wanted:
                wanted[file][name] = version
            elif not version and name not in defined and name.startswith(_PREFIXES):
                rest[name] = ""
    wanted = {name: symbols for name, symbols in wanted.items() if name not in present}
    first = min(wanted)
    wanted[first] = rest | wanted[first]
    return wanted


def _source(symbols: dict[str, str]) -> str:
    """Return an assembler's source: each function calls `fakecuda_missing` with its name."""
    lines = [".text"]
    for number, name in enumerate(sorted(symbols)):
        lines += [f".globl {name}", f".type {name},@function", f"{name}:", f"leaq .Lname{number}(%rip), %rdi"]
        lines.append("jmp fakecuda_missing@PLT")
    lines.append(".section .rodata")
    lines += [f'.Lname{number}: .asciz "{name}"' for number, name in enumerate(sorted(symbols))]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _versions(symbols: dict[str, str]) -> str:
    """Return a linker's script with the versions of the symbols; empty if they have none."""
    lines = []
    for version in sorted(set(symbols.values()) - {""}):
        names = [name for name in sorted(symbols) if symbols[name] in (version, "")]
        lines.append(f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n")
    return "".join(lines)


def make_stubs(torch_libraries: Path, runtime: Path, work: Path) -> None:
    """Make each library that torch's need beside ``runtime``, which has the rest."""
    folder = runtime.parent
    for name, symbols in _symbols(torch_libraries, {path.name for path in folder.iterdir()}).items():
        source, script = work / f"{name}.s", work / f"{name}.map"
        source.write_text(_source(symbols))
        script.write_text(_versions(symbols))
        command: list[str | Path] = ["g++", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", source]
        command += [runtime, "-o", folder / name, f"-Wl,-soname,{name}"]
        if script.stat().st_size:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)
