"""What launchers tell a process."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from deepinfer.cluster.launch import Environment, Started, _connect, environment, rank_device
from deepinfer.cluster.watch import how_it_ended
from deepinfer.errors import ConfigError, RankError

TORCHRUN = {
    "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu01", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "41234",
}  # fmt: skip


@pytest.mark.parametrize(
    "env, wanted",
    [
        ({}, None),
        (TORCHRUN, Environment(11, 16, 3, 8, "gpu01", 29400, True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Environment(1, 2, 1, 2, "127.0.0.1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SLURM, Environment(9, 16, 1, 8, "gpu03", 21234)),
        ({**SLURM, "SLURM_STEP_NODELIST": "big1,gpu[2,5-7]"},
         Environment(9, 16, 1, 8, "big1", 21234)),
        ({**SLURM, "MASTER_ADDR": "ib0", "MASTER_PORT": "7"}, Environment(9, 16, 1, 8, "ib0", 7)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script itself
    ],
)  # fmt: skip
def test_environment(env: dict[str, str], wanted: Environment | None) -> None:
    assert environment(env) == wanted


def test_environment_that_is_half_set() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        environment({**TORCHRUN, "WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        environment({key: value for key, value in TORCHRUN.items() if key != "MASTER_ADDR"})


def test_a_store_that_cannot_be_had() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port, soon = taken.getsockname()[1], timedelta(seconds=1)
    with (
        taken,
        pytest.raises(RankError, match=f"rank 0 of 2 cannot open .*127.0.0.1:{port} .*PORT"),
    ):
        _connect(Environment(0, 2, 0, 2, "127.0.0.1", port), soon, opens=True)
    with pytest.raises(RankError, match="rank 1 of 2 cannot reach rank 0's store"):
        _connect(Environment(1, 2, 1, 2, "127.0.0.1", port), soon)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cpu") == "cpu"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert rank_device("cuda") == "cuda:3"
    assert rank_device("cuda:2") == "cuda:5"
    assert rank_device("npu") == "npu"
    started = Started(rank=2, world=4, port=1, model="m", device="cuda:6", config={})
    assert rank_device("cuda:6", started) == "cuda:6"


def test_how_it_ended() -> None:
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-99) == "was killed by signal 99"
    assert how_it_ended(3) == "ended with exit code 3"
