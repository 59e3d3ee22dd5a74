"""Coverage-guided fuzzing of one target for a given time, in its own process, because libFuzzer ends the process.

Run as ``python -m tests.fuzz.guided TARGET SECONDS SEED FILE``; the findings are written to the file as JSON. If
atheris is not installed, inputs are mutated as well, but without coverage to select the interesting ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed.checkpoint  # noqa: F401 - first, so that it is not instrumented, which takes a minute

try:
    import atheris
except ImportError:
    atheris = None
instrumented: Any = contextlib.nullcontext()
if atheris is not None:
    instrumented = atheris.instrument_imports(include=["aiockpt"], enable_loader_override=False)
with instrumented:
    import aiockpt.checkpointer
    import aiockpt.sync_checkpointer  # noqa: F401

from tests.fuzz.judge import Judge  # noqa: E402
from tests.fuzz.targets import Target, make_targets  # noqa: E402
from tests.fuzz.watch import Watch  # noqa: E402

MOST_INPUT = 64 << 10
_FOUND_SHOWN = 20
_WRITTEN_EVERY = 100


class Run:
    """Trials of inputs on one target.

    Attributes:
        tried: the number of inputs.
        found: the distinct problems, each with the shortest input that shows it.
    """

    def __init__(self, target: Target, judge: Judge, report: Path) -> None:
        self._target = target
        self._judge = judge
        self._report = report
        self.tried = 0
        self.found: dict[str, tuple[str, bytes]] = {}

    def one(self, data: bytes) -> None:
        """Try one input."""
        self.tried += 1
        wrong = self._judge.wrong_with(self._target, data)
        if wrong:
            kind = re.sub(r"\d+", "N", wrong)[:120]
            if kind not in self.found or len(self.found[kind][1]) > len(data):
                self.found[kind] = wrong, data
                self.write()
        elif self.tried % _WRITTEN_EVERY == 0:
            self.write()

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """Return a mutation that suits the format of the input."""
        rng = Random(seed)
        return self._target.mutate(data, rng, rng.choice(self._target.seeds))[:most]

    def blindly(self, seconds: float, seed: int) -> None:
        """Try mutations of the seeds and of recent mutations, without coverage."""
        rng, until = Random(seed), time.monotonic() + seconds
        pool = list(self._target.seeds)
        while time.monotonic() < until:
            data = self.mutate(rng.choice(pool), MOST_INPUT, rng.getrandbits(32))
            self.one(data)
            pool = [*self._target.seeds, *pool[len(self._target.seeds) :][-100:], data]
        self.write()

    def write(self) -> None:
        """Write the findings so far to the report."""
        found = [(wrong, data.hex()) for wrong, data in list(self.found.values())[:_FOUND_SHOWN]]
        self._report.write_text(json.dumps({"tried": self.tried, "outcomes": self._judge.outcomes, "found": found}))


def main(name: str, seconds: str, seed: str, report: str) -> None:
    """Fuzz one target; with atheris, never return."""
    warnings.simplefilter("ignore")
    top = Path(tempfile.mkdtemp(prefix="fuzz-", dir=Path(report).parent))
    target = make_targets(top / "checkpoints")[name]
    run = Run(target, judge := Judge(Watch()), Path(report))
    if atheris is None:
        run.blindly(float(seconds), int(seed))
        judge.close()
        return
    corpus = top / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(data)
    options = [
        *(f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MOST_INPUT}", f"-artifact_prefix={top}/"),
        *("-timeout=60", "-rss_limit_mb=8000", str(corpus)),
    ]
    atheris.Setup([sys.argv[0], *options], run.one, custom_mutator=run.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
