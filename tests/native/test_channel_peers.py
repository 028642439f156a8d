"""Death and silence of every peer are noticed, named, and end the wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpu_worker import attention_process
from native.channel import (
    ITEM_DTYPE,
    ChannelError,
    DevicePort,
    EpochRetired,
    PeerDied,
    PeerHung,
    WaitTimeout,
)
from native.segment import DEVICE, Segment, process_participant
from tests.native.channel_rig import GEOMETRY, Control

NOTICED_S = 2.0


class Processes:
    """A control process (this one) and two attention processes of their own."""

    def __init__(self, directory: Path) -> None:
        self.control = Control(directory, replace(GEOMETRY, n_processes=2))
        self.path = self.control.segment.path
        self.children = [
            subprocess.Popen(attention_process.arguments(self.path, index, 0, [], 0.0, os.getpid()))
            for index in range(2)
        ]
        deadline_s = time.monotonic() + 20
        while any(self._state(index) == "starting" for index in range(2)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        self.control.publish()

    def _state(self, index: int) -> str:
        return self.control.segment.state(process_participant(index)).state

    def close(self) -> None:
        self.control.close()
        for child in self.children:
            child.send_signal(signal.SIGCONT)
            child.wait(timeout=10)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


def decode_for_ever(port: DevicePort, give_up_s: float = 20.0) -> None:
    """Post jobs until a wait raises."""
    port.set_blocks(0, 0, range(64))
    port.prepare(0, np.array([(0, 1000, 1, 0, 0)], ITEM_DTYPE))
    deadline_s = time.monotonic() + give_up_s
    while time.monotonic() < deadline_s:
        port.post(0, 0)
        port.wait(0, timeout_s=10)
    pytest.fail("no wait has raised")


def test_a_killed_attention_process_is_named(processes: Processes) -> None:
    with DevicePort(processes.path) as port:
        # Stopped first, so that a job cannot end without it once it has taken a task.
        for child in processes.children:
            child.send_signal(signal.SIGSTOP)
        port.set_blocks(0, 0, range(64))
        port.prepare(0, np.array([(0, 1000, 1, 0, 0)], ITEM_DTYPE))
        port.post(0, 0)
        with pytest.raises(WaitTimeout):
            port.wait(0, timeout_s=0.3)
        processes.children[1].kill()
        killed_s = time.monotonic()
        with pytest.raises(PeerDied, match="attention process 1") as error:
            port.wait(0, timeout_s=10)
        assert time.monotonic() - killed_s < NOTICED_S
        assert error.value.peer == "attention process 1"
        with pytest.raises(PeerDied, match="attention process 1"):
            port.check_peers()


def test_a_hung_attention_process_is_named_after_the_bound(processes: Processes) -> None:
    with DevicePort(processes.path, peer_timeout_s=1.0) as port:
        port.check_peers()
        processes.children[0].send_signal(signal.SIGSTOP)
        processes.children[1].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(PeerHung, match="attention process 0 hangs"):
            decode_for_ever(port)
        assert 0.7 < time.monotonic() - stopped_s < 1.0 + NOTICED_S


def test_a_busy_peer_is_not_taken_for_hung(processes: Processes) -> None:
    with DevicePort(processes.path, peer_timeout_s=0.5) as port:
        for _ in range(4):
            time.sleep(0.6)
            port.check_peers()


CONTROL_SCRIPT = """
import sys, time
from pathlib import Path
from tests.native.channel_rig import GEOMETRY, Control, LoopThread
control = Control(Path(sys.argv[1]), GEOMETRY)
{loops}
control.publish()
print(control.segment.path, flush=True)
time.sleep(60)
"""


def test_a_killed_control_process_ends_waits_and_processes(tmp_path: Path) -> None:
    # Its attention loops are threads of the control process: all die at once.
    script = CONTROL_SCRIPT.format(loops="LoopThread(control.segment.path, 0)")
    command = [sys.executable, "-c", script, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path = child.stdout.readline().strip()
    with child.stdout, DevicePort(path) as port:
        port.set_blocks(0, 0, range(64))
        child.kill()
        child.wait()
        killed_s = time.monotonic()
        with pytest.raises(PeerDied, match="control process"):
            decode_for_ever(port)
        with pytest.raises(PeerDied, match="control process"):
            port.check_peers()
        assert time.monotonic() - killed_s < NOTICED_S


def test_a_killed_device_frees_its_place(processes: Processes) -> None:
    script = (
        "import sys; from native.channel import DevicePort; from tests.native."
        "test_channel_peers import decode_for_ever; port = DevicePort(sys.argv[1]);"
        "print('in', flush=True); decode_for_ever(port, 60)"
    )
    command = [sys.executable, "-c", script, str(processes.path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "in\n"
    segment = processes.control.segment
    assert segment.alive(DEVICE)
    with pytest.raises(ChannelError, match="has a device already"):
        DevicePort(processes.path)
    child.kill()
    child.wait()
    assert not segment.alive(DEVICE)
    # The attention processes are unharmed.
    assert all(segment.alive(process_participant(index)) for index in range(2))


def test_a_retired_epoch_ends_waits_with_its_cause(tmp_path: Path) -> None:
    causes = (
        ({}, EpochRetired, "configure"),
        ({"died": process_participant(3)}, PeerDied, "attention process 3"),
        ({"hung": process_participant(0)}, PeerHung, "attention process 0"),
    )
    for arguments, kind, text in causes:
        control = Control(tmp_path, GEOMETRY)
        control.publish()
        with DevicePort(control.segment.path) as port:
            control.segment.retire(**arguments)
            with pytest.raises(kind, match=text):
                port.check_peers()
            with pytest.raises(EpochRetired):
                port.post(0, 0)
        control.close()


def test_attention_processes_leave_a_retired_epoch(processes: Processes) -> None:
    processes.control.segment.retire()
    for child in processes.children:
        assert child.wait(timeout=NOTICED_S) == 0
    states = [processes.control.segment.state(process_participant(index)) for index in range(2)]
    assert [state.state for state in states] == ["left", "left"]
    assert "retired" in states[0].reason


def test_only_a_live_segment_gets_a_device(tmp_path: Path) -> None:
    control = Control(tmp_path, GEOMETRY)
    with pytest.raises(EpochRetired):
        DevicePort(control.segment.path)
    control.close()
    with pytest.raises(FileNotFoundError):
        DevicePort(control.segment.path)


def test_a_participants_place_is_taken_once(tmp_path: Path) -> None:
    control = Control(tmp_path, GEOMETRY)
    with Segment.open(control.segment.path) as first, Segment.open(control.segment.path) as second:
        first.participate(process_participant(0))
        with pytest.raises(ChannelError, match=r"attention process 0 of .* exists already"):
            second.participate(process_participant(0))
        assert second.alive(process_participant(0))
    control.close()
