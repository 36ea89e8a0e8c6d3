"""Settings: an argument beats the environment, which beats the default; errors name the setting."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.settings import PER_RANK_FIELDS, PREFIX, CoordinatorSettings, differences
from device_comm.cuda_settings import MIN_ARENA_BYTES, PER_RANK_CUDA_FIELDS, CudaSettings
from shm_broadcast.endpoint import RemoteSettings
from shm_broadcast.errors import SettingsError
from shm_broadcast.settings import MIN_RING_BYTES, BroadcastSettings

ROOT = Path(__file__).parents[3]

SETTINGS = st.builds(
    CoordinatorSettings,
    timeout_s=st.floats(0.001, 1e6),
    create_timeout_s=st.floats(0.001, 1e6),
    destroy_timeout_s=st.floats(0.001, 1e6),
    interface=st.sampled_from([None, "eth0", "ib1"]),
    host_id=st.sampled_from([None, "rack1.n3"]),
    remote_ports=st.sampled_from([None, "29600-29699", "1-65535"]),
    broadcast=st.builds(
        BroadcastSettings,
        wait=st.sampled_from(["adaptive", "spin", "park"]),
        ring_bytes=st.integers(MIN_RING_BYTES, 2**40),
        warn_after_s=st.floats(0.001, 1e6),
    ),
    remote=st.builds(
        RemoteSettings,
        high_water_bytes=st.integers(64 << 10, 2**40),
        heartbeat_s=st.floats(0.001, 30.0),
        lost_after_s=st.floats(90.0, 1e6),
    ),
    cuda=st.builds(
        CudaSettings,
        custom_all_reduce=st.booleans(),
        deterministic=st.booleans(),
        dependent_launch=st.booleans(),
        multimem=st.booleans(),
        multimem_one_shot_bytes=st.sampled_from([0, 256 << 10, 1 << 20]),
        arena_bytes=st.integers(16, 1 << 18).map(lambda pages: pages * 4096),
        staging_bytes=st.integers(0, 1 << 18).map(lambda pages: pages * 4096),
        expert_arena_bytes=st.integers(0, 1 << 18).map(lambda pages: pages * 4096),
        nccl_window_bytes=st.integers(0, 1 << 18).map(lambda pages: pages * 4096),
        deadline_s=st.one_of(st.none(), st.floats(0.001, 1e6)),
        policy_file=st.sampled_from([None, "/etc/policy.json", "policy.json"]),
        nccl_library=st.sampled_from([None, "/opt/libnccl.so.2"]),
        kernel_cache=st.sampled_from([None, "/var/cache/kernels"]),
    ),
)


def variables_of(settings: CoordinatorSettings) -> dict[str, str]:
    """Return the environment variables that express `settings`."""
    variables = {}
    for field, value in msgspec.to_builtins(settings).items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        for name, each in inner:
            if each is not None:
                variables[PREFIX + "__".join(part.upper() for part in (field, name) if part)] = str(each)
    return variables


def test_defaults() -> None:
    """Without arguments and variables the documented defaults hold."""
    settings = CoordinatorSettings.from_env({})
    assert settings == CoordinatorSettings()
    assert (settings.timeout_s, settings.create_timeout_s, settings.destroy_timeout_s) == (600.0, 300.0, 5.0)
    assert settings.interface is None
    assert settings.broadcast == BroadcastSettings(wait="adaptive", ring_bytes=4 << 20, warn_after_s=60.0)
    assert settings.remote == RemoteSettings(high_water_bytes=64 << 20, heartbeat_s=0.2, lost_after_s=0.8)
    assert (settings.remote_ports, settings.remote_port_range) == (None, None)
    assert settings.cuda == CudaSettings(
        custom_all_reduce=True, deterministic=False, arena_bytes=16 << 20, staging_bytes=32 << 20
    )
    cuda = settings.cuda
    assert (cuda.deadline_s, cuda.policy_file, cuda.nccl_library, cuda.kernel_cache) == (None,) * 4


@given(SETTINGS)
def test_every_field_has_a_variable(settings: CoordinatorSettings) -> None:
    """`from_env` reads a variable for every field and ignores other programs' variables."""
    environ = {"PATH": "/bin", "VLLM_X": "1", **variables_of(settings)}
    assert CoordinatorSettings.from_env(environ) == settings


@given(SETTINGS, SETTINGS)
def test_an_argument_beats_the_environment(
    given_settings: CoordinatorSettings, env: CoordinatorSettings
) -> None:
    """Arguments beat variables, and a whole section replaces the environment's."""
    arguments = {field: getattr(given_settings, field) for field in given_settings.__struct_fields__}
    assert CoordinatorSettings.resolve(variables_of(env), **arguments) == given_settings


def test_a_section_may_be_given_in_part() -> None:
    """A mapping for a section beats the variables of its own fields only."""
    environ = {
        "GROUP_COORDINATOR_BROADCAST__WAIT": "spin",
        "GROUP_COORDINATOR_BROADCAST__RING_BYTES": "65536",
    }
    settings = CoordinatorSettings.resolve(environ, timeout_s=7, broadcast={"wait": "park"})
    assert settings.broadcast == BroadcastSettings(wait="park", ring_bytes=65536)
    assert settings.timeout_s == 7.0
    assert type(settings.timeout_s) is float


def test_fields_of_a_section_may_limit_each_other() -> None:
    """Variables that depend on each other are accepted together, in any order, and refused alone."""
    lost, beat = "GROUP_COORDINATOR_REMOTE__LOST_AFTER_S", "GROUP_COORDINATOR_REMOTE__HEARTBEAT_S"
    for environ in ({lost: "9", beat: "3"}, {beat: "3", lost: "9"}):
        remote = CoordinatorSettings.from_env(environ).remote
        assert (remote.lost_after_s, remote.heartbeat_s) == (9.0, 3.0)
    with pytest.raises(SettingsError, match=f"{beat}='3': remote.lost_after_s is 0.8, .* three times"):
        CoordinatorSettings.from_env({beat: "3"})
    with pytest.raises(
        SettingsError, match=f"environment variables {beat}, {lost}: remote.lost_after_s is 0.7"
    ):
        CoordinatorSettings.from_env({beat: "0.26", lost: "0.7"})
    mixed = CoordinatorSettings.resolve({lost: "9"}, remote={"heartbeat_s": 2})
    assert (mixed.remote.lost_after_s, mixed.remote.heartbeat_s) == (9.0, 2.0)


def test_ports_are_a_range() -> None:
    """The text gives the first and last port that queues may use."""
    settings = CoordinatorSettings.from_env({"GROUP_COORDINATOR_REMOTE_PORTS": "29600-29699"})
    assert settings.remote_port_range == (29600, 29699)
    assert CoordinatorSettings(remote_ports="7000-7000").remote_port_range == (7000, 7000)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the process's environment is read, when called."""
    monkeypatch.setenv("GROUP_COORDINATOR_TIMEOUT_S", "12.5")
    assert CoordinatorSettings.from_env().timeout_s == 12.5
    assert CoordinatorSettings.resolve().timeout_s == 12.5
    assert CoordinatorSettings().timeout_s == 600.0


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("GROUP_COORDINATOR_TIMEOUT", "GROUP_COORDINATOR_TIMEOUT_S"),
        ("GROUP_COORDINATOR_BROADCAST_WAIT", "GROUP_COORDINATOR_BROADCAST__WAIT"),
        ("GROUP_COORDINATOR_RING_BYTES", "GROUP_COORDINATOR_BROADCAST__RING_BYTES"),
        ("GROUP_COORDINATOR_INTERFAC", "GROUP_COORDINATOR_INTERFACE"),
        ("GROUP_COORDINATOR_BROADCAST", "GROUP_COORDINATOR_BROADCAST__WAIT"),
        ("GROUP_COORDINATOR_REMOTE_PORT", "GROUP_COORDINATOR_REMOTE_PORTS"),
        ("GROUP_COORDINATOR_REMOTE_HEARTBEAT_S", "GROUP_COORDINATOR_REMOTE__HEARTBEAT_S"),
    ],
)
def test_an_unknown_variable_is_refused(name: str, suggestion: str) -> None:
    """An unknown variable with our prefix raises and suggests the closest name."""
    with pytest.raises(
        SettingsError, match=f"unknown environment variable '{name}'; did you mean '{suggestion}'"
    ):
        CoordinatorSettings.from_env({name: "1"})


def test_an_unknown_argument_is_refused() -> None:
    """An unknown argument raises and suggests the closest name."""
    with pytest.raises(SettingsError, match="unknown setting 'timeout'; did you mean 'timeout_s'"):
        CoordinatorSettings.resolve({}, timeout=3)
    with pytest.raises(SettingsError, match="section 'broadcast' 'ring_byte'; did you mean 'ring_bytes'"):
        CoordinatorSettings.resolve({}, broadcast={"ring_byte": 3})
    with pytest.raises(SettingsError, match="section 'remote' 'heartbeat'; did you mean 'heartbeat_s'"):
        CoordinatorSettings.resolve({}, remote={"heartbeat": 3})


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("TIMEOUT_S", "abc"),
        ("TIMEOUT_S", ""),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "-1"),
        ("TIMEOUT_S", "nan"),
        ("TIMEOUT_S", "inf"),
        ("TIMEOUT_S", "1e999"),
        ("TIMEOUT_S", "1_0"),
        ("CREATE_TIMEOUT_S", "5 minutes"),
        ("DESTROY_TIMEOUT_S", "true"),
        ("INTERFACE", ""),
        ("INTERFACE", "eth 0"),
        ("INTERFACE", "../eth0"),
        ("INTERFACE", "a-name-that-is-too-long"),
        ("BROADCAST__WAIT", "sleep"),
        ("BROADCAST__WAIT", "SPIN"),
        ("BROADCAST__RING_BYTES", "4MiB"),
        ("BROADCAST__RING_BYTES", "65536.5"),
        ("BROADCAST__RING_BYTES", "65535"),
        ("BROADCAST__RING_BYTES", "-4194304"),
        ("BROADCAST__WARN_AFTER_S", "0"),
        ("REMOTE_PORTS", "29600"),
        ("REMOTE_PORTS", "29600-29599"),
        ("REMOTE_PORTS", "0-10"),
        ("REMOTE_PORTS", "1-65536"),
        ("REMOTE_PORTS", "1 - 2"),
        ("REMOTE__HIGH_WATER_BYTES", "65535"),
        ("REMOTE__HIGH_WATER_BYTES", "64MiB"),
        ("REMOTE__HEARTBEAT_S", "0"),
        ("REMOTE__HEARTBEAT_S", "nan"),
        ("REMOTE__LOST_AFTER_S", "0.5"),
        ("CUDA__CUSTOM_ALL_REDUCE", "perhaps"),
        ("CUDA__DETERMINISTIC", "2"),
        ("CUDA__ARENA_BYTES", "16MiB"),
        ("CUDA__ARENA_BYTES", "61440"),
        ("CUDA__ARENA_BYTES", "65537"),
        ("CUDA__STAGING_BYTES", "-4096"),
        ("CUDA__STAGING_BYTES", "1099511627776"),
        ("CUDA__DEADLINE_S", "0"),
        ("CUDA__POLICY_FILE", ""),
    ],
)
def test_a_malformed_variable_is_refused(field: str, text: str) -> None:
    """The error names the variable and its value, even where an argument beats it."""
    environ = {PREFIX + field: text}
    with pytest.raises(SettingsError, match=f"environment variable {PREFIX}{field}='{text}'"):
        CoordinatorSettings.from_env(environ)
    with pytest.raises(SettingsError, match=f"environment variable {PREFIX}{field}="):
        CoordinatorSettings.resolve(
            environ, timeout_s=1, create_timeout_s=1, destroy_timeout_s=1, interface="lo"
        )


def test_an_argument_may_name_the_secret_that_a_variable_requires() -> None:
    """Without one the settings are refused; and no other variable is blamed for it."""
    environ = {f"{PREFIX}SECURITY": "required"}
    assert CoordinatorSettings.resolve(environ, secret_file="/x").security == "required"
    assert CoordinatorSettings.resolve(environ, security="optional").security == "optional"
    with pytest.raises(SettingsError, match="security is 'required', and there is no secret"):
        CoordinatorSettings.resolve(environ, timeout_s=1.0)
    wrong = {**environ, f"{PREFIX}SECRET_FILE": "/x", f"{PREFIX}TIMEOUT_S": "-1"}
    with pytest.raises(SettingsError, match=f"^environment variable {PREFIX}TIMEOUT_S='-1'"):
        CoordinatorSettings.resolve(wrong)


def test_a_choice_lists_its_values() -> None:
    """The error of a choice lists the valid values."""
    with pytest.raises(SettingsError, match="'adaptive', 'spin', 'park'"):
        CoordinatorSettings.from_env({"GROUP_COORDINATOR_BROADCAST__WAIT": "sleep"})


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "3", None, True])
@pytest.mark.parametrize("field", ["timeout_s", "create_timeout_s", "destroy_timeout_s"])
def test_a_malformed_duration_is_refused(field: str, value: Any) -> None:
    """The error names the field and the value."""
    with pytest.raises(SettingsError, match=f"^{field} is {value!r}, but must be a positive, finite number"):
        CoordinatorSettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wait", "sleep"),
        ("wait", None),
        ("ring_bytes", MIN_RING_BYTES - 1),
        ("ring_bytes", 4e6),
        ("ring_bytes", True),
        ("warn_after_s", -1),
    ],
)
def test_a_malformed_broadcast_setting_is_refused(field: str, value: Any) -> None:
    """The error names the section, the field and the value."""
    with pytest.raises(SettingsError, match=f"broadcast.{field} is {value!r}"):
        BroadcastSettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_all_reduce", 1),
        ("deterministic", "yes"),
        ("arena_bytes", MIN_ARENA_BYTES - 4096),
        ("arena_bytes", MIN_ARENA_BYTES + 16),
        ("arena_bytes", True),
        ("arena_bytes", 2 << 30),
        ("staging_bytes", 4096.0),
        ("nccl_window_bytes", 100),
        ("multimem_one_shot_bytes", 4096),
        ("multimem_one_shot_bytes", False),
        ("deadline_s", float("inf")),
        ("policy_file", Path("policy.json")),
        ("nccl_library", ""),
        ("kernel_cache", "a\0b"),
    ],
)
def test_a_malformed_cuda_setting_is_refused(field: str, value: Any) -> None:
    """The error names the section, the field and the value."""
    with pytest.raises(SettingsError, match=re.escape(f"cuda.{field} is {value!r}")):
        CudaSettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interface", 3),
        ("interface", ""),
        ("host_id", 3),
        ("host_id", ""),
        ("host_id", "a b"),
        ("host_id", "n" * 65),
        ("broadcast", {"wait": "spin"}),
        ("remote", BroadcastSettings()),
        ("cuda", {"deterministic": True}),
        ("remote_ports", (29600, 29699)),
        ("remote_ports", "²-³"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: Any) -> None:
    """The constructor checks types too."""
    with pytest.raises(SettingsError, match=f"^{field} is "):
        CoordinatorSettings(**{field: value})


def test_settings_cannot_be_changed() -> None:
    """Both records are frozen."""
    settings: Any = CoordinatorSettings()
    with pytest.raises(AttributeError):
        settings.timeout_s = 1.0
    with pytest.raises(AttributeError):
        settings.broadcast.wait = "spin"


@given(SETTINGS, SETTINGS)
def test_fingerprints_are_equal_if_what_must_agree_is(
    left: CoordinatorSettings, right: CoordinatorSettings
) -> None:
    """Two fingerprints are equal exactly if all fields but the per-rank ones are."""
    assert (left.fingerprint() == right.fingerprint()) == (left.agreed() == right.agreed())
    paths = msgspec.structs.replace(left.cuda, policy_file="/p", nccl_library="/n", kernel_cache="/k")
    other = msgspec.structs.replace(left, interface="eno7", cuda=paths)
    assert other.fingerprint() == left.fingerprint()


def test_every_field_counts_in_the_fingerprint() -> None:
    """Changing any one field changes the fingerprint, except for the per-rank ones."""
    plain = CoordinatorSettings()
    changed = CoordinatorSettings(
        timeout_s=1,
        create_timeout_s=1,
        destroy_timeout_s=1,
        interface="eth0",
        host_id="n3",
        remote_ports="29600-29699",
        stack_signal=0,
        secret_file="/secret",
        security="required",
        bulk="plaintext",
        broadcast=BroadcastSettings(wait="spin", ring_bytes=MIN_RING_BYTES, warn_after_s=1),
        remote=RemoteSettings(high_water_bytes=1 << 20, heartbeat_s=0.1, lost_after_s=2),
        cuda=CudaSettings(
            custom_all_reduce=False,
            deterministic=True,
            dependent_launch=False,
            multimem=False,
            multimem_one_shot_bytes=1 << 20,
            arena_bytes=1 << 20,
            staging_bytes=0,
            expert_arena_bytes=0,
            nccl_window_bytes=4096,
            deadline_s=1,
            policy_file="/p",
            nccl_library="/n",
            kernel_cache="/k",
        ),
    )
    assert set(plain.agreed()) == {
        "timeout_s",
        "create_timeout_s",
        "destroy_timeout_s",
        "broadcast.wait",
        "broadcast.ring_bytes",
        "broadcast.warn_after_s",
        "remote_ports",
        "security",
        "bulk",
        "remote.high_water_bytes",
        "remote.heartbeat_s",
        "remote.lost_after_s",
        "cuda.custom_all_reduce",
        "cuda.deterministic",
        "cuda.dependent_launch",
        "cuda.multimem",
        "cuda.multimem_one_shot_bytes",
        "cuda.arena_bytes",
        "cuda.staging_bytes",
        "cuda.expert_arena_bytes",
        "cuda.nccl_window_bytes",
        "cuda.deadline_s",
    }
    assert {
        "interface",
        "host_id",
        "record_dir",
        "secret_file",
        "secret_descriptor",
        "stack_signal",
        *(f"cuda.{field}" for field in PER_RANK_CUDA_FIELDS),
    } == PER_RANK_FIELDS
    for field in plain.__struct_fields__:
        base = msgspec.structs.replace(plain, secret_file="/s") if field == "security" else plain
        one = msgspec.structs.replace(base, **{field: getattr(changed, field)})
        assert (one.fingerprint() == plain.fingerprint()) == (field in PER_RANK_FIELDS)
    for name in ("broadcast", "remote", "cuda"):
        section, other = getattr(plain, name), getattr(changed, name)
        for field in section.__struct_fields__:
            one_changed = msgspec.structs.replace(section, **{field: getattr(other, field)})
            one = msgspec.structs.replace(plain, **{name: one_changed})
            assert (one.fingerprint() == plain.fingerprint()) == (f"{name}.{field}" in PER_RANK_FIELDS)


@pytest.mark.slow
def test_a_fingerprint_is_stable() -> None:
    """Equal settings have equal fingerprints in another process, and for int and float values."""
    code = "from coordinator.settings import *; print(CoordinatorSettings(timeout_s=30).fingerprint())"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert output.stdout.strip() == CoordinatorSettings(timeout_s=30.0).fingerprint()
    assert len(output.stdout.strip()) == 16
    whole, parts = RemoteSettings(lost_after_s=2), RemoteSettings(lost_after_s=2.0)
    assert CoordinatorSettings(remote=whole).fingerprint() == CoordinatorSettings(remote=parts).fingerprint()


def test_differences_name_field_value_and_ranks() -> None:
    """Only fields that differ are shown, the majority's value first."""
    usual, other = (
        CoordinatorSettings(),
        CoordinatorSettings(timeout_s=30, broadcast=BroadcastSettings(wait="spin")),
    )
    views: dict[int, dict[str, object]] = {rank: dict(usual.agreed()) for rank in (2, 4, 7)}
    views[0] = dict(other.agreed())
    assert differences(views) == [
        "timeout_s: 600.0 (ranks 2, 4, 7), 30.0 (rank 0)",
        "broadcast.wait: 'adaptive' (ranks 2, 4, 7), 'spin' (rank 0)",
    ]
    del views[4]["create_timeout_s"]
    assert "create_timeout_s: 300.0 (ranks 0, 2, 7), absent (rank 4)" in differences(views)
    assert differences({rank: usual.agreed() for rank in range(3)}) == []


@pytest.mark.slow
def test_nothing_is_read_at_import() -> None:
    """A misspelt variable does not break the import, only the call that reads it."""
    code = "import coordinator.settings as s; s.CoordinatorSettings(); s.CoordinatorSettings.from_env()"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        env={"GROUP_COORDINATOR_X": "1"},
        capture_output=True,
        text=True,
    )
    assert "in from_env" in outcome.stderr
    assert "unknown environment variable 'GROUP_COORDINATOR_X'" in outcome.stderr
