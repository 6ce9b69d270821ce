"""The lane in a process with the environment of an engine, which libgomp reads when torch is loaded."""

import subprocess
import sys

from tiercel.system.openmp import engine_environment

_IDLE = """
import time
import torch
from tiercel.device.cpu import CpuDevice

def multiply():
    a = torch.ones(512, 512)
    for _ in range(20):
        a = a @ a / 512
    return torch.get_num_threads()

lane = CpuDevice(threads=2).open_lane()
assert lane.run(multiply).result() == 2
used_s = time.process_time()
time.sleep(2)
print(time.process_time() - used_s)
lane.close()
"""


def test_an_idle_team_uses_no_core() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _IDLE], env=engine_environment(), capture_output=True, text=True, check=True
    )
    assert float(answer.stdout) < 0.1  # CPU seconds, of two
