"""How much memory is free, from trees of files as kernels and container engines lay them out."""

from pathlib import Path

import pytest

from shm_broadcast.free_memory import free_memory_bytes

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # what version 1 says without a limit
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


def machine(root: Path, member: str, mount: str) -> None:
    """Lay out a machine with 1,000 MiB available and a process in the cgroup `member`."""
    files = {"meminfo": f"MemTotal: 9999 kB\nMemAvailable: {1000 * 1024} kB\n"}
    files |= {"self/cgroup": f"9:name=systemd:/\n{member}\n", "self/mountinfo": f"{mount}\n"}
    for name, text in files.items():
        path = root / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v2(folder: Path, limit_mib: int | None, usage_mib: int, cache_mib: int = 0) -> None:
    """Write the files of a cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit_mib is None else f"{limit_mib * MIB}\n")
    (folder / "memory.current").write_text(f"{usage_mib * MIB}\n")
    (folder / "memory.stat").write_text(
        f"anon {usage_mib * MIB}\nactive_file 77\ninactive_file {cache_mib * MIB}\n"
    )


def v1(folder: Path, limit: int, usage_mib: int, cache_mib: int = 0) -> None:
    """Write the files of a cgroup of version 1, whose own counter does not include the cgroups inside of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {cache_mib * MIB}\n")


def test_this_machine_has_some_memory_and_not_more_than_it_has() -> None:
    """The real files of the kernel that runs this test can be read."""
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert MIB < free_memory_bytes() <= total


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    """A kernel without cgroups has none of their files; a process in no memory cgroup has no limit."""
    machine(tmp_path, "0::/", V2_MOUNT.format(top="/"))
    assert free_memory_bytes(tmp_path) == 1000 * MIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_memory_bytes(tmp_path) == 1000 * MIB


def test_clean_page_cache_counts_as_free(tmp_path: Path) -> None:
    """Reading files fills a container's memory with cache, which the kernel drops when memory is needed."""
    machine(tmp_path, "0::/", V2_MOUNT.format(top="/"))
    v2(tmp_path / "sys/fs/cgroup", 512, 500, 480)
    assert free_memory_bytes(tmp_path) == 492 * MIB
    machine(tmp_path, "4:memory:/", V1_MOUNT.format(top="/"))
    v1(tmp_path / "sys/fs/cgroup/memory", 512 * MIB, 500, 480)
    assert free_memory_bytes(tmp_path) == 492 * MIB


def test_a_limit_counts_without_the_counters(tmp_path: Path) -> None:
    """Some sandboxes show the limit and the use of a cgroup, and nothing else."""
    machine(tmp_path, "0::/", V2_MOUNT.format(top="/"))
    v2(tmp_path / "sys/fs/cgroup", 512, 500)
    (tmp_path / "sys/fs/cgroup/memory.stat").unlink()
    assert free_memory_bytes(tmp_path) == 12 * MIB


def test_a_used_up_limit_leaves_nothing(tmp_path: Path) -> None:
    """For a moment a cgroup may use more than its limit."""
    machine(tmp_path, "0::/", V2_MOUNT.format(top="/"))
    v2(tmp_path / "sys/fs/cgroup", 512, 513)
    assert free_memory_bytes(tmp_path) == 0


@pytest.mark.parametrize("tightest", ["pod", "pod/app", "pod/app/worker"])
def test_every_cgroup_around_the_process_counts(tmp_path: Path, tightest: str) -> None:
    """The kernel kills a process also for the limit of an outer cgroup."""
    machine(tmp_path, "0::/pod/app/worker", V2_MOUNT.format(top="/"))
    for name in ("pod", "pod/app", "pod/app/worker"):
        v2(tmp_path / "sys/fs/cgroup" / name, 64 if name == tightest else None, 32)
    assert free_memory_bytes(tmp_path) == 32 * MIB
    machine(tmp_path, "4:cpu,memory:/pod/app/worker", V1_MOUNT.format(top="/"))
    for name in ("pod", "pod/app", "pod/app/worker"):
        v1(tmp_path / "sys/fs/cgroup/memory" / name, 64 * MIB if name == tightest else UNLIMITED, 16)
    assert free_memory_bytes(tmp_path) == 48 * MIB


@pytest.mark.parametrize("top", ["/docker/1f", "/docker/1f/inner", "/../other"])
def test_a_container_sees_its_own_cgroups_only(tmp_path: Path, top: str) -> None:
    """The mount begins at the container's cgroup, whose path on the host says nothing about the folders seen inside.

    It may begin above the process, at the process, or at a cgroup of which the process is no member.
    """
    machine(tmp_path, "4:memory:/docker/1f/inner", V1_MOUNT.format(top=top))
    seen = tmp_path / "sys/fs/cgroup/memory"
    v1(seen, 100 * MIB, 40)
    if top == "/docker/1f":
        v1(seen / "inner", 50 * MIB, 20)
    assert free_memory_bytes(tmp_path) == (30 if top == "/docker/1f" else 60) * MIB


def test_both_versions_can_be_mounted(tmp_path: Path) -> None:
    """A hybrid machine has the memory controller in version 1, and version 2 without it."""
    mounts = V2_MOUNT.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    machine(tmp_path, "4:memory:/a\n0::/a", f"{mounts}\n{V1_MOUNT.format(top='/')}")
    (tmp_path / "sys/fs/cgroup/unified/a").mkdir(parents=True)
    v1(tmp_path / "sys/fs/cgroup/memory/a", 80 * MIB, 70)
    v1(tmp_path / "sys/fs/cgroup/memory", UNLIMITED, 900)
    assert free_memory_bytes(tmp_path) == 10 * MIB
