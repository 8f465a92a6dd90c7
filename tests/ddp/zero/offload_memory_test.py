"""offload_memory_test.py WORLD FOLDER: a state that does not fit into the memory trains in a file.

A first run in a group of processes (cgroup) measures its peak of memory without a file. With three quarters
of the state less, the same run is killed, and with a file it ends with the same parameters. FOLDER is on a
disk. Exit code: 0 as expected, 1 not, 77 skipped because this user cannot limit memory.
"""
import os
import signal
import subprocess
import sys
import tempfile

STATE_MIB = 192
STEPS = 3


class MemoryGroup:
    """Processes whose memory is limited together, over either version of cgroups."""

    def __init__(self):
        paths = dict(line.rstrip().split(":", 2)[1:] for line in open("/proc/self/cgroup"))
        self.is_first = "memory" in paths
        base = "/sys/fs/cgroup/memory" if self.is_first else "/sys/fs/cgroup"
        own = base + paths["memory" if self.is_first else ""]
        parent = own if os.path.isdir(own) else base
        if not self.is_first:
            with open(parent + "/cgroup.subtree_control", "w") as file:
                file.write("+memory")
        self.path = tempfile.mkdtemp(prefix="ddp-offload-", dir=parent)

    def write(self, name, value):
        with open(f"{self.path}/{name}", "w") as file:
            file.write(str(value))

    def limit(self, size):
        if not self.is_first:
            self.write("memory.swap.max", 0)
            self.write("memory.max", size)
            return
        self.write("memory.limit_in_bytes", size)
        if os.path.exists(self.path + "/memory.memsw.limit_in_bytes"):
            self.write("memory.memsw.limit_in_bytes", size)

    def peak(self):
        name = "memory.max_usage_in_bytes" if self.is_first else "memory.peak"
        with open(f"{self.path}/{name}") as file:
            return int(file.read())

    def run(self, command):
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: self.write("cgroup.procs", os.getpid()))

    def close(self):
        os.rmdir(self.path)


def run(command, limit=None):
    """The ended process, and its peak of memory."""
    group = MemoryGroup()
    try:
        if limit:
            group.limit(limit)
        ended = group.run(command)
        return ended, group.peak()
    finally:
        group.close()


def expect(is_right, text, ended):
    if not is_right:
        sys.exit(f"FAILED: {text}: exit code {ended.returncode}\n{ended.stdout}")


def values_of(ended):
    return ended.stdout[ended.stdout.find("values"):]


def full_disk(world, folder):
    """An error before the first step where the disk is full, and no SIGBUS in it."""
    script = 'mount -t tmpfs -o size=8m tmpfs "$2" && exec "$1" 64 2 "$2/state"'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "-", world, folder],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    expect(ended.returncode == 1 and "No space left on device" in ended.stdout, "a full disk", ended)
    expect("67108864 bytes for the optimizer's state" in ended.stdout, "a full disk", ended)


def main():
    world, folder = sys.argv[1:]
    command = [world, str(STATE_MIB), str(STEPS)]
    try:
        MemoryGroup().close()
    except (OSError, KeyError) as error:
        print("skipped: cannot limit memory:", error)
        return 77
    run(command)  # so that the next run finds the libraries in memory
    whole, peak = run(command)
    expect(whole.returncode == 0, "without a limit", whole)
    limit = peak - STATE_MIB * 2**20 * 3 // 4
    killed, _ = run(command, limit)
    expect(killed.returncode == -signal.SIGKILL, "without a file it has to be killed", killed)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        in_file, _ = run(command + [scratch + "/state"], limit)
        expect(in_file.returncode == 0, f"in a file, under {limit} bytes", in_file)
        expect(values_of(in_file) == values_of(whole) != "", whole.stdout, in_file)
        expect(os.listdir(scratch) == [], "files that are left", in_file)
        full_disk(world, scratch)
    print(f"peak {peak >> 20} MiB, limit {limit >> 20} MiB:", in_file.stdout.strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
