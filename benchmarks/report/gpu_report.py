"""Prints the step times that scripts/gpu_check.sh measured, and compares them with their targets.

usage: gpu_report.py FOLDER

FOLDER holds a file of JSON lines for each model and language: "<model>-<dtype>-x<batch>-cpp.jsonl" is
what ddp_bench printed in one process, "...-py.jsonl" what ddp_peer.py did.

Exit code: 0; 1 when a target was missed, or could not be judged.
"""

import pathlib
import re
import sys

import tables

MOST_OVER_NONE = 1.03  # of mode ddp
MOST_OF_PYTHON = 0.5  # of what py_ddp adds to its own `none`, in ms


def label_of(path):
    """Such as "resnet18, float32, batch x 16", of "resnet18-float32-x16-cpp.jsonl"."""
    parts = pathlib.Path(path).stem.split("-")[:-1]
    return ", ".join(re.sub(r"^x(?=[0-9]+$)", "batch x ", part) for part in parts)


def read(folder):
    """The lines of all files, each under its file's name instead of its model's."""
    lines = tables.read_lines(folder)
    for record in lines:
        record["model"] = label_of(record["process"])
    return lines


def added_ms(row):
    """The time that a mode adds to a step of `none` in the same process."""
    return (row.ratio() - 1) * row.median("compute_ms")


def target_rows(lines):
    """A row for each model, and the models that miss a target."""
    rows, missed = [], []
    for model in tables.models_of(lines):
        by_mode = {row.mode: row for row in tables.rows_of(lines, model)}
        ours, peers = by_mode.get("ddp"), by_mode.get("py_ddp")
        if ours is None or peers is None:
            rows.append([model, "-", "", "not measured", "-", "-", "not measured"])
            missed.append(model)
            continue
        ratio, interval = ours.over_none()
        adds, peer_adds = added_ms(ours), added_ms(peers)
        within_none = tables.verdict(ratio, MOST_OVER_NONE)
        is_half = adds <= max(MOST_OF_PYTHON * peer_adds, 0)
        if within_none != "met" or not is_half:
            missed.append(model)
        rows.append([
            model, f"{ratio:.3f} x none", tables.interval_cell(interval), within_none,
            f"{adds:.3f}", f"{peer_adds:.3f}", "met" if is_half else "missed",
        ])
    return rows, missed


def main():
    lines = read(sys.argv[1])
    rows, missed = target_rows(lines)
    columns = [
        "model", "ddp", "95%", f"at most {MOST_OVER_NONE}", "ddp adds ms", "py_ddp adds ms",
        f"at most {MOST_OF_PYTHON:g} of that",
    ]
    print("## Step time\n\nOne rank over NCCL: nothing is averaged, and the wrappers' work is left. "
          "A step ends when\nthe GPU is done with it.\n")
    print(tables.table(columns, rows))
    if missed:
        print("\nMissed: " + "; ".join(missed) + ".")
    for model in tables.models_of(lines):
        print(f"\n### {model}\n\n" + tables.step_table(tables.rows_of(lines, model)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
