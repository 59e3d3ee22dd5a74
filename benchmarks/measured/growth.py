"""Growth: CPU time and extra memory of a save by size and by number of tensors, each in a clean process.

``python -m benchmarks.measured.growth [--gib 1 2 4] [--tensors 50000 100000 200000] [--rounds N] [--dir DIRECTORY]``
prints the least and the median CPU time of a durable save, of the call, and what the process grew by at most. The state
of the sizes has 168 tensors; that of the numbers tensors of 1 KiB. Flat is what does not change per GiB or per tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_KIB = 1 << 10


def worker(kind: str, amount: float, directory: str) -> None:
    """Save once in this process, and print the CPU seconds of the save and of its call, and the extra bytes."""
    import aiockpt
    from benchmarks.harness.states import small_state, transformer_state

    state = transformer_state(int(amount * (1 << 30)), 168) if kind == "gib" else small_state(int(amount), _KIB)
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"warm": 1}, f"{directory}/warm")
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory counts from here
        before, began = _memory("VmRSS"), _used()
        save = checkpointer.submit(state, f"{directory}/checkpoint")
        called = _used()
        save.written.result()
        figures = _used() - began, called - began, _memory("VmHWM") - before
    print(json.dumps(figures), flush=True)
    os._exit(0)  # its threads need not end


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * _KIB for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tensors", type=int, nargs="*", default=[50_000, 100_000, 200_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir")
    options = parser.parse_args()
    rows = [("gib", amount) for amount in options.gib] + [("tensors", amount) for amount in options.tensors]
    found: dict[tuple[str, float], list[list[float]]] = {row: [] for row in rows}
    for _ in range(options.rounds):
        for kind, amount in rows:
            with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                code = f"from benchmarks.measured import growth; growth.worker({kind!r}, {amount!r}, {directory!r})"
                done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            found[kind, amount].append(json.loads(done.stdout.splitlines()[-1]))
    for (kind, amount), runs in found.items():
        saves, calls, extra = zip(*runs, strict=True)
        per, unit = (amount, "GiB") if kind == "gib" else (amount / 1000, "1,000 tensors")
        print(
            f"{amount:>10,.6g} {kind:<8} CPU ms per {unit}: {min(saves) * 1e3 / per:.1f} least, "
            f"{statistics.median(saves) * 1e3 / per:.1f} median; the call {min(calls) * 1e3:.1f} ms; "
            f"extra memory {statistics.median(extra) / (1 << 20):.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
