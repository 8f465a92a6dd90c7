#!/usr/bin/env python3
"""The fault matrix's driver reports each of the mistakes of a stand-in that makes one mistake at a
time, and nothing for a stand-in without mistakes."""

import os
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import world  # noqa: E402
from cases import Case, all_cases, drawn_by, part_of  # noqa: E402
from judge import misses, names  # noqa: E402

STAND_IN = str(HERE / "stand_in.py")
PROGRAMS = world.Programs(STAND_IN, STAND_IN, "")


def misses_with(twin, launcher, slack=0):
    os.environ["DDP_TWIN"] = twin
    case = Case("backward", "exit", 2, "gloo", launcher)
    return " ".join(misses(case, world.Run(case, PROGRAMS).observe(), slack))


class Judgement(unittest.TestCase):
    def setUp(self):
        world.PATIENCE = dict.fromkeys(world.PATIENCE, 15)

    def test_nothing_is_missed_where_all_is_right(self):
        for launcher in ("plain", "ddprun"):
            self.assertEqual(misses_with("", launcher), "")

    def test_each_fault_of_a_survivor_is_reported(self):
        for twin, miss in (
            ("no fault", "the fault did not come"),
            ("survivor that sleeps", "rank 0 threw after 6"),
            ("survivor that names nobody", "rank 0 did not name rank 2"),
            ("survivor that does not say where", "rank 0 did not say where"),
            ("survivor that does not throw", "rank 0 did not throw"),
            ("survivor that ends with 0", "a survivor ended with exit code 0"),
            ("survivor that hangs", "hung"),
            ("stray file", "left behind: file tmp/stray"),
            ("stray process", "left behind: process"),
        ):
            with self.subTest(twin):
                self.assertIn(miss, misses_with(twin, "plain"))

    def test_slack_forgives_seconds_alone(self):
        self.assertEqual(misses_with("survivor that sleeps", "plain", slack=5), "")
        self.assertIn("did not name", misses_with("survivor that names nobody", "plain", slack=5))

    def test_each_fault_of_a_launcher_is_reported(self):
        for twin, miss in (
            ("launcher that returns 0", "the launcher ended with exit code 0"),
            ("launcher that names nobody", "the launcher did not name rank 2"),
        ):
            with self.subTest(twin):
                self.assertIn(miss, misses_with(twin, "ddprun"))

    def test_a_text_of_a_pipeline_has_the_action_and_a_coordinate(self):
        def missed(text):
            observed = world.Observed(
                codes=[1, 1], struck_at=1, learned={0: (9, text), 1: (9, text)},
                left={0: 9, 1: 9})
            return " ".join(misses(Case("pipeline", "throw", 2, "gloo", "plain"), observed))

        said = "B2 of stage 2 failed on rank 2 of 3 (pp 2, dp 0, tp 0): user boom"
        self.assertEqual(missed(said), "")
        self.assertIn("did not say where", missed(said.replace("B2 of stage 2", "step")))
        self.assertIn("did not say a coordinate", missed(said.replace("pp", "of 3")))
        self.assertIn("did not name the victim's action", missed(said.replace("B2", "F3")))

    def test_the_name_of_a_rank_is_no_other_number(self):
        self.assertTrue(names("ranks 0, 2 had not", 2))
        self.assertFalse(names("rank 12 of 20 and 2 of 3 buckets", 2))


class Cases(unittest.TestCase):
    def test_the_parts_are_all_cases(self):
        parts = [part_of(all_cases(), n, 7) for n in range(1, 8)]
        self.assertEqual(set().union(*parts), set(all_cases()))
        self.assertEqual(sum(map(len, parts)), len(set(all_cases())))
        self.assertEqual(len(all_cases()), 1080)

    def test_a_commit_draws_the_same_part_each_time(self):
        drawn = {drawn_by(f"commit {i}", 10) for i in range(200)}
        self.assertEqual(drawn, set(range(1, 11)))
        self.assertEqual(drawn_by("a commit", 10), drawn_by("a commit", 10))


if __name__ == "__main__":
    unittest.main()
