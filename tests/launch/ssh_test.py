"""ddprun -H over a real sshd: two names of this host, with the test's own keys and configuration.

ssh_test.py DDPRUN. Exit code 77: skipped, OpenSSH's server or client is missing.
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

PATIENCE = 200  # seconds
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
KEYGEN = shutil.which("ssh-keygen")
ODD = "naïve 'quoted' \"two\" $HOME `pwd` \\ 雪\nline"  # as an argument, to arrive as it is
ddprun = sys.argv[1]
started = time.monotonic()


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def check(condition, *shown):
    if not condition:
        sys.exit("FAILED:\n" + "\n".join(str(one) for one in shown))


class Server:
    """Starts an sshd for each connection to a port that the kernel chose."""

    def __init__(self, folder):
        self.folder = folder
        self.servers = []
        for name in ("host_key", "user_key"):
            subprocess.run(
                [KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "authorized").write_text((folder / "user_key.pub").read_text())
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
            "PidFile none\nUsePAM no\nPermitRootLogin yes\n")
        self.listener = socket.create_server(("127.0.0.1", 0))
        (folder / "ssh_config").write_text(
            f"Host *\nHostName 127.0.0.1\nPort {self.listener.getsockname()[1]}\n"
            f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nBatchMode yes\n"
            "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n")
        # ddprun's own line for ssh, without the configuration of who runs the test.
        client = folder / "ssh"
        client.write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/ssh_config "$@"\n')
        client.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # closed
            with connection:
                self.servers.append(subprocess.Popen(
                    [SSHD, "-i", "-f", self.folder / "sshd_config"], stdin=connection,
                    stdout=connection, stderr=subprocess.DEVNULL))

    def end(self):
        self.listener.close()
        for server in self.servers:
            server.kill()
            server.wait()


def run(arguments, script, *words, stderr=subprocess.STDOUT):
    """Starts two ranks on one host and one on the other, with a shell script as the program."""
    return subprocess.Popen(
        [ddprun, "-H", "127.0.0.1:2,localhost:1", *arguments, "sh", "-c", script, *words],
        env=server.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=stderr, encoding="utf8", cwd=server.folder)


def lines_until(job, count, marker):
    lines = []
    while sum(marker in line for line in lines) < count:
        line = job.stdout.readline()
        check(line, f"the job ended before {count} lines with {marker!r}:", *lines)
        lines.append(line.rstrip("\n"))
    return lines


def is_gone(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf8")
        return stat.rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pids):
    while not all(is_gone(pid) for pid in pids):
        check(time.monotonic() - started < PATIENCE, "these ranks still run:", pids)
        time.sleep(0.05)


def children_of(pid):
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = pathlib.Path(f"/proc/{entry}/stat").read_text(encoding="utf8")
            name = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
            yield int(entry), os.path.basename(name.decode())


def clients_of(job):
    """The ssh processes, below ddprun's supervisor."""
    (supervisor, _), = children_of(job.pid)
    return [pid for pid, name in children_of(supervisor) if name == "ssh"]


def ranks_see_the_job():
    job = run(
        ["-x", "OWN=a  b", "-np", "3"],
        'printf "%s\\n" "rank $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR '
        '[$OWN] $PWD"; [ "$1" = "$2" ] && echo same', "sh", ODD, ODD)
    out, _ = job.communicate(timeout=PATIENCE)
    check(job.returncode == 0, out)
    where = f"127.0.0.1 [a  b] {server.folder}"
    wanted = [
        f"[0] rank 0/3 0/2 0 {where}", f"[1] rank 1/3 1/2 0 {where}", f"[2] rank 2/3 0/1 1 {where}",
        *(f"[{rank}] same" for rank in range(3))]
    check(sorted(out.splitlines()) == sorted(wanted), out)


def streams_are_one_with_a_terminal():
    for rsh, apart in (([], False), (["--rsh", "ssh -T -o LogLevel=ERROR"], True)):
        out, err = run(rsh, "echo problem >&2", stderr=subprocess.PIPE).communicate(timeout=PATIENCE)
        check("] problem" in (err if apart else out), rsh, out, err)
        check("] problem" not in (out if apart else err), rsh, out, err)


def failure_ends_all():
    job = run([], "echo pid $$; [ $RANK = 2 ] && exit 7; exec sleep 1000")
    out, _ = job.communicate(timeout=PATIENCE)
    check(job.returncode == 7, out)
    check("host localhost (node 1): ssh exited with code 7; ending 1 host" in out, out)
    wait_until_gone([int(line.split()[-1]) for line in out.splitlines() if " pid " in line[:8]])


def nothing_is_left(end, code):
    """`end` takes the job; its ranks are no descendants of it."""
    job = run([], "echo pid $$; exec sleep 1000")
    lines = lines_until(job, 3, "] pid ")
    pids = [int(line.split()[-1]) for line in lines if "] pid " in line]
    end(job)
    out, _ = job.communicate(timeout=PATIENCE)
    check(job.returncode == code, f"expected code {code}, got {job.returncode}", *lines, out)
    wait_until_gone(pids)


for program, name in ((SSHD, "sshd"), (SSH, "ssh"), (KEYGEN, "ssh-keygen")):
    if program is None:
        skip(f"no {name}")
if os.getuid() == 0:
    os.makedirs("/run/sshd", exist_ok=True)  # sshd's, which its service makes
with tempfile.TemporaryDirectory() as folder:
    server = Server(pathlib.Path(folder))
    try:
        ranks_see_the_job()
        streams_are_one_with_a_terminal()
        failure_ends_all()
        nothing_is_left(lambda job: job.send_signal(signal.SIGINT), 130)
        nothing_is_left(lambda job: job.send_signal(signal.SIGTERM), 143)
        nothing_is_left(lambda job: os.kill(clients_of(job)[0], signal.SIGKILL), 137)
        nothing_is_left(lambda job: os.kill(clients_of(job)[1], signal.SIGKILL), 137)
        nothing_is_left(lambda job: job.kill(), -signal.SIGKILL)
    finally:
        server.end()
