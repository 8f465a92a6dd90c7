"""Checks a case of the fault matrix against the expected outcome."""

import re

from cases import RANKS
from world import GRACE, GROUP_TIMEOUT, needs_group_timeout

ERROR_WITHIN = 5  # seconds
ERROR_AFTER_TIMEOUT = 2  # seconds from the end of the timeout, where that shows the fault
LAUNCHER_WITHIN = 3  # beyond the grace period of the survivors
TORCHRUN_GRACE = 30  # seconds between its SIGTERM and its SIGKILL

# The operations in which a survivor of each phase may notice the fault: a wait, or an error.
WAITED_IN = {
    "before": r"init_process_group",
    "constructor": r"DistributedDataParallel|init_process_group|starting|reading|broadcast",
    "forward": r"reducing|forward|backward|counting",
    "backward": r"reducing|backward|forward",
    "collective": r"gather|barrier",
    "pipeline": r"\b[FB]\d of stage \d",
    "gather": r"\(FullyShardedDataParallel was gathering",
    "reduction": r"\(FullyShardedDataParallel was (gathering|reducing)",
    "join": r"join|reducing|learning what the ranks will do",
    "between": r"reducing|forward|backward",
    "save": r"Checkpoint|checkpoint|gather",
    "destroy": r"",
}


def survivors(case):
    return [rank for rank in range(RANKS) if rank != case.victim]


def names(text, rank):
    """Whether a text names that rank: "rank 2 of 3", "ranks 0, 2"."""
    return re.search(rf"\branks? (?:\d+, )*{rank}\b", text) is not None


def error_within(case, slack):
    """The allowed seconds from the fault to a survivor's error."""
    if needs_group_timeout(case):
        return GROUP_TIMEOUT + ERROR_AFTER_TIMEOUT + slack
    return ERROR_WITHIN + slack


def end_within(case, slack):
    """The allowed seconds from the fault to the launcher's end."""
    allowed = error_within(case, slack) + LAUNCHER_WITHIN
    if case.launcher == "ddprun":
        return allowed + GRACE
    return allowed + (TORCHRUN_GRACE if case.launcher == "torchrun" else 0)


def misses_of_stage(case, rank, text):
    """What a survivor's text of a pipeline lacks: a coordinate, and of an exception its action.

    Rank 0 takes the store with it, in which its exception's text is.
    """
    if not re.search(r"\(pp \d, dp 0, tp 0\)", text):
        yield f"rank {rank} did not say a coordinate: {text}"
    if case.fault == "throw" and case.victim > 0 and f"B2 of stage {case.victim} failed" not in text:
        yield f"rank {rank} did not name the victim's action: {text}"


def misses_of_survivors(case, observed, slack):
    allowed = error_within(case, slack) * 1000
    for rank in survivors(case):
        if rank not in observed.left:
            yield f"rank {rank} did not leave its group"
        if case.phase == "destroy":
            # Not a collective: no rank waits there for the lost rank.
            if rank in observed.learned:
                yield f"rank {rank} threw: {observed.learned[rank][1]}"
            elif observed.left.get(rank, 0) > (ERROR_WITHIN + slack) * 1000:
                yield f"rank {rank} left after {observed.left[rank]} ms"
            continue
        if rank not in observed.learned:
            yield f"rank {rank} did not throw"
            continue
        after, text = observed.learned[rank]
        if after > allowed:
            yield f"rank {rank} threw after {after} ms"
        if not names(text, case.victim):
            yield f"rank {rank} did not name rank {case.victim}: {text}"
        elif not re.search(WAITED_IN[case.phase], text):
            yield f"rank {rank} did not say where: {text}"
        elif case.phase == "pipeline":
            yield from misses_of_stage(case, rank, text)


def misses_of_launcher(case, observed):
    if case.launcher == "plain":
        for code in observed.codes:
            if code != (0 if case.phase == "destroy" else 1):
                yield f"a survivor ended with exit code {code}"
        return
    if observed.codes == [0]:
        yield "the launcher ended with exit code 0"
    # The launcher's output includes the survivors' lines; lines in these formats are its own.
    own = "\n".join(line for line in observed.output.splitlines()
                    if re.search(r"ddprun:|\(pid|rank\s+: ", line))
    named = names(own, case.victim) or re.search(rf"rank\s*: {case.victim}\b", own)
    if not named and not (case.launcher == "torchrun" and case.fault == "stop"):
        yield f"the launcher did not name rank {case.victim}"


def misses(case, observed, slack=0):
    """Lists the differences from the expected outcome of a case.

    slack: seconds that each bound gets beyond docs/faults.md, for a machine with other work.
    """
    if not observed.struck_at:
        return ["the fault did not come: " + observed.output[-500:]]
    found = []
    if observed.hung:
        found.append("hung")
    elif observed.ended_after > end_within(case, slack):
        found.append(f"ended after {observed.ended_after:.1f} s")
    found += misses_of_survivors(case, observed, slack)
    if not observed.hung:
        found += misses_of_launcher(case, observed)
    found += [f"left behind: {what}" for what in observed.left_behind]
    return found
