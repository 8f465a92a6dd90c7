"""The peak memory of this process (benchmarks/ddp_bench/runs/memory_sampler.h), in Python."""

import re
import threading

PAUSE = 0.001  # s
KINDS = {"Pss_Anon": "anonymous_bytes", "Pss_Shmem": "shared_bytes", "Pss_File": "file_bytes"}


def parse_pss(smaps_rollup):
    """Parses the text of /proc/PID/smaps_rollup: bytes by kind; None when a kind is missing."""
    kibibytes = dict(re.findall(r"^(\w+): *(\d+) kB$", smaps_rollup, re.MULTILINE))
    if not KINDS.keys() <= kibibytes.keys():
        return None
    return {kind: 1024 * int(kibibytes[name]) for name, kind in KINDS.items()}


def own_bytes(pss):
    """The memory that depends on the process alone, without the pages of libraries."""
    return pss["anonymous_bytes"] + pss["shared_bytes"]


class MemorySampler:
    """Samples the memory of this process from a thread of its own, and keeps the largest sample."""

    def __init__(self):
        self.peak = self.read()
        self.stops = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    @staticmethod
    def read():
        with open("/proc/self/smaps_rollup") as rollup:
            pss = parse_pss(rollup.read())
        if pss is None:
            raise RuntimeError(f"memory: expected {', '.join(KINDS)} in /proc/self/smaps_rollup.")
        return pss

    def watch(self):
        while not self.stops.wait(PAUSE):
            self.peak = max(self.peak, self.read(), key=own_bytes)

    def stop(self):
        """Returns the sample in which own_bytes() is the largest."""
        self.stops.set()
        self.thread.join()
        return max(self.peak, self.read(), key=own_bytes)
