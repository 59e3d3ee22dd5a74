"""Two hosts in namespaces: each has a network of its own, and sees no directory of the other.

This is also the program of each host's rank: ``python -m tests.manager.test_namespaces RANK STEP...``, with the disk of
its host as the working directory. It restores, and saves these steps; while it saves one called 0, rank 1 is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import aiockpt
from tests.manager.test_ranks import LIMITS, state_of, step_in

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 240
# In an outer namespace, which has the links of both hosts: the disk of each is a directory that others can't reach.
_HOSTS = """
mount -t tmpfs tmpfs /run
for host in 0 1; do ip netns add host$host; ip -n host$host link set lo up; done
ip link add eth0 netns host0 type veth peer name eth0 netns host1
for host in 0 1; do ip -n host$host address add 10.9.0.$((host + 1))/24 dev eth0; ip -n host$host link set eth0 up; done
for host in 0 1; do
  ip netns exec host$host unshare --mount --uts sh -ec '
    hostname host'$host'; mount --bind "$0/host'$host'" "$0/disk"; mount -t tmpfs tmpfs "$0/host0"
    mount -t tmpfs tmpfs "$0/host1"; '"$2" "$1" >"$1/out$host" 2>&1 &
  pids="$pids $!"
done
for pid in $pids; do wait $pid && echo 0 || echo $?; done
"""


def on_both_hosts(folder: Path, command: str) -> list[tuple[int, str]]:
    """Run a command in a shell on each host, as ``host0`` or ``host1``; return its statuses and outputs."""
    for name in ("host0", "host1", "disk"):
        (folder / name).mkdir(exist_ok=True)
    outer = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [*outer, "--mount-proc", "sh", "-ec", _HOSTS, "sh", str(folder), command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise OSError(done.stderr)
    return [(int(rc), (folder / f"out{host}").read_text()) for host, rc in enumerate(done.stdout.split())]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Return a directory for two hosts."""
    try:
        found = on_both_hosts(tmp_path, 'touch "$0/disk/$(hostname)"; ls "$0/host0" "$0/host1"')
    except OSError as exc:
        pytest.skip(f"namespaces can't be made here: {exc}")
    assert [rc for rc, _ in found] == [0, 0], found
    assert not any("host0\n" in text.replace(f"{tmp_path}/host0:", "") for _, text in found)
    assert sorted(os.listdir(tmp_path / "host0")) == ["host0"]
    return tmp_path


def run_ranks(folder: Path, *steps: int) -> list[tuple[int, str]]:
    """Run a rank on each host; return the statuses, and what each has restored, or else all that it has written."""
    command = f'cd "$0/disk"; exec {sys.executable} -m tests.manager.test_namespaces $rank {" ".join(map(str, steps))}'
    found = on_both_hosts(folder, f"rank=$(hostname | tail -c 2); {command}")
    return [(rc, re.findall("^restored: (.*)$", text, re.MULTILINE)[-1] if rc == 0 else text) for rc, text in found]


@pytest.mark.slow
def test_each_host_reads_what_the_other_one_has(hosts: Path) -> None:
    """Over the network of both; a host that is lost is named."""
    assert run_ranks(hosts, 1, 2) == [(0, "None")] * 2
    (rc, text), (killed, _) = run_ranks(hosts, 0)
    assert killed == 128 + signal.SIGKILL
    assert (rc, "CoordinationError" in text) == (1, True), text
    assert run_ranks(hosts, 3) == [(0, "2 2 0")] * 2
    assert run_ranks(hosts) == [(0, "3 3 0")] * 2
    shutil.rmtree(hosts / "host1")
    for rc, text in run_ranks(hosts):  # with an empty disk
        assert (rc, "host host1 (disk" in text, "is not in this job" in text) == (1, True, True), text


def main(rank: int, steps: Sequence[int]) -> None:
    address = "tcp://10.9.0.1:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    state: dict[str, Any] = state_of(rank, 0)
    with aiockpt.SyncCheckpointManager("run", own_disks=True, **LIMITS) as run:
        start = run.restore(state)
        found = None if start is None else f"{start.step} {step_in(state, rank)} {len(start.repaired)}"
        for step in steps:
            save = run.submit(step or 9, state_of(rank, step))
            if rank == 1 and step == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            save.written.result(60)
    dist.destroy_process_group()
    sys.stdout.write(f"restored: {found}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(step) for step in sys.argv[2:]])
