"""Writes the table of docs/faults.md from results of the fault matrix."""

import collections
import json
import pathlib
import re

from cases import FAULTS, PHASES

BEGIN = "<!-- measured: written by scripts/faults.sh -->"
END = "<!-- end -->"
LONGEST = 170  # characters of a quotation
# Every text of a failed group ends with this.
REMEDY = " The process group is aborted: end the job, or make a new process group and wrapper."


def read_results(path):
    """Returns the last result of each case."""
    latest = {}
    for line in pathlib.Path(path).read_text().splitlines():
        record = json.loads(line)
        key = tuple(record[k] for k in ("phase", "fault", "victim", "transport", "launcher"))
        latest[key] = record
    return list(latest.values())


def generalized(text, record):
    """Returns a survivor's text without the parts that differ from case to case."""
    text = text.replace(REMEDY, "")
    text = re.sub(rf"\brank {record['victim']}\b", "rank V", text)
    text = re.sub(r"\brank \d\b", "rank S", text)
    text = re.sub(r"\b\d+ ms\b", "N ms", text)
    text = re.sub(r"port \d+", "port N", text)
    text = re.sub(r"\|", "/", text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def most_common_text(records):
    texts = collections.Counter(
        generalized(text, record) for record in records for _, text in record["learned"].values())
    if not texts:
        return "nothing: they had not to wait"
    return texts.most_common(1)[0][0]


def slowest(records):
    times = [after for record in records
             for after, _ in (record["learned"] or {0: (max(record["left"].values(), default=0), "")})
             .values()]
    return f"{max(times) / 1000:.1f} s" if times else "-"


def row(phase, fault, records):
    launched = [r["ended_after"] for r in records if r["launcher"] == "ddprun"]
    missed = sum(bool(r["misses"]) for r in records)
    end = f"{max(launched):.1f} s" if launched else "-"
    return (f"| {phase} | {fault} | {len(records)} | {slowest(records)} | {end} | {missed} | "
            f"{most_common_text(records)} |")


def table_of(records):
    records = [r for r in records if not r["skipped"]]
    lines = [
        "| phase | fault | cases | slowest survivor | slowest `ddprun` | misses | "
        "what most survivors said |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase in PHASES:
        for fault in FAULTS:
            cell = [r for r in records if (r["phase"], r["fault"]) == (phase, fault)]
            if cell:
                lines.append(row(phase, fault, cell))
    missed = [r for r in records if r["misses"]]
    lines += ["", f"{len(records)} cases, {len(missed)} with misses."]
    for r in missed:
        name = f"{r['phase']}/{r['fault']}/rank{r['victim']}/{r['transport']}/{r['launcher']}"
        lines.append(f"- {name}: {r['misses'][0][:LONGEST]}")
    return "\n".join(lines)


def write_table(page, results):
    page = pathlib.Path(page)
    text = page.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.write_text(f"{head}{BEGIN}\n{table_of(read_results(results))}\n{END}{tail}")
