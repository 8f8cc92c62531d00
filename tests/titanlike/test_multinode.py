"""Two hosts: network namespaces of this machine, joined by a cable of their own. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.ranks import launching
from tests.titanlike.runs import FLOAT64, arguments, run_on
from tests.titanlike.test_faults import ELASTIC, PATH, assert_same_run
from tests.titanlike.test_run_errors import logged, ours, wait_for
from titanlike.metrics import files

PORT = 29400


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Host:
    """A network namespace, and how torchrun is started in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.namespace = f"titanlike-{os.getpid()}-{number}"
        self.cable = f"tl{os.getpid() % 10**8}h{number}"
        self.address = f"10.83.0.{number + 1}"
        self.prefix = ["ip", "netns", "exec", self.namespace]
        self.environment = {**PATH, "GLOO_SOCKET_IFNAME": self.cable}

    def options(self, nodes: str) -> list[str]:
        """torchrun's: the rendezvous is on host 0, and its times suit a test."""
        conf = f"is_host={int(self.number == 0)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        return [
            "--nnodes", nodes, "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts",
            "--rdzv-endpoint", f"10.83.0.1:{PORT}", "--rdzv-conf", conf, "--local-addr", self.address,
        ]  # fmt: skip

    def unplug(self) -> None:
        """Nothing goes out any more: not even the word that a connection is closed."""
        ip("-n", self.namespace, "link", "set", self.cable, "down")


@pytest.fixture
def hosts() -> Generator[list[Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two hosts are made of network namespaces, which needs root and iproute2")
    made = [Host(0), Host(1)]
    with contextlib.ExitStack() as stack:
        try:
            for host in made:
                ip("netns", "add", host.namespace)
                stack.callback(ip, "netns", "del", host.namespace)
            ip("link", "add", made[0].cable, "type", "veth", "peer", "name", made[1].cable)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for host in made:
            ip("link", "set", host.cable, "netns", host.namespace)
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.namespace, "link", "set", host.cable, "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made


def test_two_hosts_train_the_run_of_one(tmp_path: Path, hosts: list[Host]) -> None:
    """Symptom: the ranks of the second host wait for the name, or the loopback address, of the first."""
    command = arguments(tmp_path / "run", **FLOAT64)
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(launching(command, 1, host.environment, host.options("2"), host.prefix))
            for host in hosts
        ]
        for run in runs:
            assert run.wait(120.0).returncode == 0, runs[0].stderr + runs[1].stderr
    run_on(1, tmp_path / "whole", **FLOAT64)
    assert_same_run(tmp_path / "run", tmp_path / "whole", 4)


@pytest.mark.slow
def test_when_a_host_dies_the_other_goes_on_alone(tmp_path: Path, hosts: list[Host]) -> None:
    run_dir = tmp_path / "run"
    command = arguments(run_dir, **ELASTIC)
    with (
        launching(command, 1, hosts[0].environment, hosts[0].options("1:2"), hosts[0].prefix) as first,
        launching(command, 1, hosts[1].environment, hosts[1].options("1:2"), hosts[1].prefix) as second,
    ):
        wait_for(logged(run_dir, 20), first)
        second.kill()
        done = first.wait(300.0)
    assert done.returncode == 0, done.stderr
    worlds = [event["world_size"] for event in files.read_events(run_dir) if event["event"] in ("start", "resume")]
    assert worlds == [2, 1]
    run_on(1, tmp_path / "whole", **ELASTIC)
    assert_same_run(run_dir, tmp_path / "whole", 300)


@pytest.mark.slow
def test_when_a_host_loses_its_power_it_is_named_and_the_other_goes_on_alone(tmp_path: Path, hosts: list[Host]) -> None:
    """Symptom: no connection is closed, so the other ranks wait in a collective for ever. Only the watchdog ends it."""
    run_dir = tmp_path / "run"
    command = arguments(run_dir, **ELASTIC | {"run.hang_timeout": 4})
    with (
        launching(command, 1, hosts[0].environment, hosts[0].options("1:2"), hosts[0].prefix) as first,
        launching(command, 1, hosts[1].environment, hosts[1].options("1:2"), hosts[1].prefix) as second,
    ):
        wait_for(logged(run_dir, 20), first)
        hosts[1].unplug()
        second.kill()
        done = first.wait(300.0)
    assert done.returncode == 0, done.stderr
    assert any("rank 1 (process" in line and "does not answer" in line for line in ours(done.stderr)), done.stderr
    run_on(1, tmp_path / "whole", **ELASTIC)
    assert_same_run(run_dir, tmp_path / "whole", 300)
