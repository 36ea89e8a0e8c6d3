"""The launch environment: which variables of torchrun are read, which are needed and which are refused."""

import pytest

from coordinator.settings import LaunchEnvironment, launched_local_rank
from shm_broadcast.errors import SettingsError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "run",
}


def test_a_launch_is_read() -> None:
    """The record holds what a rendezvous needs of that which torchrun sets."""
    assert LaunchEnvironment.from_env(TORCHRUN) == LaunchEnvironment(
        rank=5,
        world_size=8,
        master_addr="10.0.0.1",
        master_port=29500,
        use_agent_store=True,
        restart_count=2,
        run_id="run",
    )


def test_a_launch_needs_four_variables() -> None:
    """The variables that torch's own rendezvous needs are enough."""
    four = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launch = LaunchEnvironment.from_env(four)
    assert launch is not None
    assert (launch.use_agent_store, launch.restart_count, launch.run_id) == (False, 0, None)
    assert launched_local_rank(four) is None


def test_no_launch() -> None:
    """Without a launcher's variables there is no launch; the master's address alone does not count."""
    assert LaunchEnvironment.from_env({}) is None
    assert LaunchEnvironment.from_env({"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}) is None


def test_the_launch_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the process's environment is read."""
    assert LaunchEnvironment.from_env() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch = LaunchEnvironment.from_env()
    assert launch is not None
    assert launch.rank == 5


def test_the_number_of_agents_is_read_where_an_agent_serves_the_store() -> None:
    """There is one for each host. Elsewhere the variable may mean anything."""
    launch = LaunchEnvironment.from_env({**TORCHRUN, "GROUP_WORLD_SIZE": "2"})
    assert launch is not None
    assert launch.agents == 2
    odd = {**TORCHRUN, "GROUP_WORLD_SIZE": "x"}
    with pytest.raises(SettingsError, match="GROUP_WORLD_SIZE='x' must be an integer"):
        LaunchEnvironment.from_env(odd)
    plain = LaunchEnvironment.from_env({**odd, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert plain is not None
    assert plain.agents == 1


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_partial_launch_is_refused(missing: str, is_empty: bool) -> None:
    """The error names the missing variables and those that are set."""
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    if is_empty:
        environ[missing] = ""
    with pytest.raises(SettingsError, match=f"incomplete: it lacks {missing}, though it sets .*LOCAL_RANK"):
        LaunchEnvironment.from_env(environ)
    with pytest.raises(
        SettingsError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, though it sets LOCAL_RANK"
    ):
        LaunchEnvironment.from_env({"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "five"),
        ("RANK", "-1"),
        ("RANK", "8"),
        ("RANK", " 5"),
        ("RANK", "1_0"),
        ("RANK", "٣"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 5000),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("TORCHELASTIC_USE_AGENT_STORE", "1"),
        ("TORCHELASTIC_RESTART_COUNT", "-1"),
    ],
)
def test_a_malformed_launch_is_refused(name: str, text: str) -> None:
    """The error names the variable and its value."""
    with pytest.raises(SettingsError, match=f"environment variable {name}='{text}' must be"):
        LaunchEnvironment.from_env({**TORCHRUN, name: text})


@pytest.mark.guarantee("G30")
def test_a_variable_that_is_not_needed_is_not_read() -> None:
    """What the caller knows beats the environment, which an engine may have changed for a purpose of its own."""
    odd = {**TORCHRUN, "RANK": "x", "WORLD_SIZE": "0", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "1"}
    launch = LaunchEnvironment.from_env(odd, rank=9, world_size=10)
    assert launch is not None
    assert (launch.rank, launch.world_size, launch.master_port) == (9, 10, 29500)
    with pytest.raises(SettingsError, match="environment variable RANK='x' must be an integer from 0 to 9"):
        LaunchEnvironment.from_env(odd, world_size=10)
    with pytest.raises(SettingsError, match="environment variable WORLD_SIZE='0'"):
        LaunchEnvironment.from_env(odd, rank=9)
    assert launched_local_rank(odd) == 7


def test_an_address_is_enough_for_a_caller_that_knows_its_rank() -> None:
    """Programs that start their processes themselves set only the master's address."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    launch = LaunchEnvironment.from_env(address, rank=0, world_size=1)
    assert launch is not None
    assert (launch.master_addr, launch.master_port) == ("localhost", 1234)
    with pytest.raises(SettingsError, match="lacks MASTER_ADDR, MASTER_PORT, though it sets none"):
        LaunchEnvironment.from_env({}, rank=0, world_size=1)


@pytest.mark.parametrize("text", ["-1", "x", "9" * 20])
def test_a_malformed_local_rank_is_named_where_it_is_needed(text: str) -> None:
    """The error names the variable and its value."""
    with pytest.raises(SettingsError, match=f"environment variable LOCAL_RANK='{text}' must be"):
        launched_local_rank({"LOCAL_RANK": text})
