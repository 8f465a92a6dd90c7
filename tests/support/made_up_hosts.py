"""Made-up hosts on one machine: a network, UTS and mount namespace each, with shared memory of its own.

All of them live in namespaces of this test alone, with process numbers of their own: when the test ends, by
whatever end, the kernel ends each process of each host, and no file, link or mount is left. As root.
"""

import os
import pathlib
import shutil
import subprocess
import sys

NETWORK = "10.86.0"
SKIPPED = 77


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def in_namespaces_of_our_own():
    """Runs this script again as the first process of new namespaces, and ends as it does."""
    if os.environ.pop("DDP_IN_NAMESPACES", None):
        return
    # unshare outlives a parent that is killed, if nothing tells it.
    unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc",
               "--net", "--uts"]
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare", "nsenter", "ip"))) or subprocess.run(
            [*unshare, "ip", "link", "add", "probe", "type", "bridge"], capture_output=True).returncode:
        skip("no network namespaces here")
    environment = {**os.environ, "DDP_IN_NAMESPACES": "yes"}
    sys.exit(subprocess.run([*unshare, sys.executable, "-B", *sys.argv], env=environment).returncode)


class Hosts:
    """Hosts by name, which reach each other by their names over eth0. They have a folder in common.

    on(host, *command) is the command that runs `command` there, in the process that is started.
    """

    def __init__(self, *names, aliases=None):
        self.names = names
        self.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        self.folder = pathlib.Path("/run/ddp_hosts")
        self.folder.mkdir()
        table = self.folder / "hosts"
        lines = ["127.0.0.1 localhost"]
        lines += [" ".join([self.address(name), name, *(aliases or {}).get(name, [])]) for name in names]
        table.write_text("\n".join(lines) + "\n")
        self.run("mount", "--bind", table, "/etc/hosts")
        self.run("ip", "link", "add", "bridge0", "type", "bridge")
        self.run("ip", "link", "set", "bridge0", "up")
        self.run("ip", "link", "set", "lo", "up")
        for name in names:
            self.run("ip", "netns", "add", name)
            self.run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"to_{name}")
            self.run("ip", "link", "set", f"to_{name}", "master", "bridge0", "up")
            self.run("ip", "-n", name, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                self.run("ip", "-n", name, "link", "set", link, "up")

    def address(self, name):
        return f"{NETWORK}.{10 + self.names.index(name)}"

    def on(self, name, *command):
        enter = 'hostname "$0" && mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", enter, name,
                *map(str, command)]

    @staticmethod
    def run(*command, **options):
        """Runs a command on this test's own side, which must succeed."""
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
        if ended.returncode:
            raise RuntimeError(f"{command}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended.stdout


def pids_of(predicate):
    """The processes of this test whose (arguments, environment) fulfil the predicate."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            environment = dict(
                pair.split("=", 1)
                for pair in (entry / "environ").read_bytes().decode(errors="replace").split("\0") if "=" in pair)
        except OSError:
            continue  # it has ended
        if arguments and predicate(arguments, environment):
            found.append(int(entry.name))
    return found
