"""TensorBoard and Prometheus' client read what ddp::Metrics writes.
usage: metrics_files_test.py <ddprun> <metrics_world> <a folder for packages of PyPI>

Ends with 77 where the packages cannot be installed.
"""

import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from pypi_packages import use_packages  # noqa: E402

STEPS = 1000
PACKAGES = ["tensorboard", "prometheus-client"]
ODD = 'état "\\'


def expect(what, got, expected):
    if got != expected:
        sys.exit(f"{what}: expected {expected}, got {got}")


def expected_points(first):
    """Yields step, name and value of every call of the program."""
    for step in range(first, first + STEPS):
        yield step, "train/loss", step + 0.25
        yield step, ODD, 1e-30
        if step % 100 == 0:
            yield step, "odd", math.nan if step % 200 == 0 else -math.inf


def text_of(value):
    """The spelling by which numbers that are no number compare equal, too."""
    return repr(float(value))


def check_tensorboard(folder, firsts, since):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    expect("file_version", events.file_version, 2.0)
    expect("tags", sorted(events.Tags()["scalars"]), sorted(["train/loss", ODD, "odd"]))
    for tag in events.Tags()["scalars"]:
        got = [(event.step, text_of(event.value)) for event in events.Scalars(tag)]
        expected = []
        for first in firsts:
            for step, name, value in expected_points(first):
                if name == tag:
                    as_float = struct.unpack("<f", struct.pack("<f", value))[0]
                    expected.append((step, text_of(as_float)))
        expect(f"scalars of {tag}", got, expected)
        for event in events.Scalars(tag):
            assert since - 1 <= event.wall_time <= time.time() + 1, event


def refuse(constant):
    sys.exit(f"JSON: expected no {constant}")


def check_json_lines(path, firsts):
    got = []
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line, parse_constant=refuse)
        expect("keys", list(one), ["step", "time", "name", "value"])
        got.append((one["step"], one["name"], text_of(one["value"])))
    expected = [
        (step, name, text_of(value)) for first in firsts for step, name, value in expected_points(first)
    ]
    expect("JSON lines", got, expected)


def check_prometheus(path, first):
    from prometheus_client.parser import text_string_to_metric_families

    got = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        expect(f"type of {family.name}", family.type, "gauge")
        for sample in family.samples:
            got[sample.name, *sorted(sample.labels.items())] = text_of(sample.value)
    last = float(first + STEPS - 1)
    expected = {
        ("train_loss", ("name", "train/loss")): text_of(last + 0.25),
        ("_tat___", ("name", ODD)): text_of(1e-30),
        ("odd",): text_of(-math.inf),
        ("ddp_metric_step", ("metric", "train/loss")): text_of(last),
        ("ddp_metric_step", ("metric", ODD)): text_of(last),
        ("ddp_metric_step", ("metric", "odd")): text_of(first + STEPS - 100),
    }
    expect("Prometheus", got, expected)


def main():
    ddprun, program, packages = sys.argv[1:]
    use_packages(packages, PACKAGES)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "runs" / "a"
        since = time.time()
        firsts = []
        for first in (0, STEPS):  # a run, and its continuation
            firsts.append(first)
            subprocess.run([ddprun, "-n", "2", program, str(folder), str(first)], check=True, timeout=120)
            check_tensorboard(folder, firsts, since)
            check_json_lines(folder / "metrics.jsonl", firsts)
            check_prometheus(folder / "metrics.prom", first)
    print(f"{len(firsts)} runs of {STEPS} steps are read as they were written")


main()
