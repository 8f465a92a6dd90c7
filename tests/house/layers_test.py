#!/usr/bin/env python3
"""comm's folders include only their own and lower ones. The check itself runs on faulty trees."""

import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from layers import Comm, crowded, ill_sized, spelled_out, without_subject  # noqa: E402

ROOT = HERE.parents[1]
CONTRIBUTING = "| folder of `comm` | |\n|---|---|\n| `base` | texts |\n| `store` | keys |\n\nEnd.\n"


class House(unittest.TestCase):
    def test_no_include_points_up(self):
        comm = Comm(ROOT)
        self.assertGreater(len(comm.files), 100)
        self.assertGreater(len(comm.order), 5)
        self.assertEqual(list(comm.faults()), [])

    def test_no_folder_is_crowded(self):
        self.assertEqual(list(crowded(ROOT)), [])

    def test_collectives_have_one_form(self):
        self.assertEqual(list(spelled_out(ROOT)), [])

    def test_files_are_neither_long_nor_splinters(self):
        self.assertEqual(list(ill_sized(ROOT)), [])

    def test_private_comments_name_their_subject(self):
        self.assertEqual(list(without_subject(ROOT)), [])


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        self.write("CONTRIBUTING.md", CONTRIBUTING)
        self.write("comm/base/text.cpp", '#include "base/text.h"\n')
        self.write("comm/base/text.h", "")
        self.write("comm/store/store.cpp", '#include "base/text.h"\n#include <ddp/store.h>\n')
        self.write("comm/include/ddp/store.h", "")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def faults(self):
        return "\n".join(Comm(self.root).faults())

    def test_a_tree_in_order_has_no_fault(self):
        self.assertEqual(self.faults(), "")

    def test_an_include_that_points_up_is_one(self):
        self.write("comm/base/text.h", '#include "store/store.h"\n')
        self.write("comm/store/store.h", "")
        self.assertIn("comm/base/text.h (base) includes store/store.h (store)", self.faults())

    def test_so_is_one_of_a_public_header(self):
        self.write("comm/base/text.h", "#include <ddp/store.h>\n")
        self.assertIn("includes ddp/store.h (store)", self.faults())

    def test_a_file_belongs_into_a_folder_of_the_list(self):
        self.write("comm/other.cpp", "")
        self.write("comm/extra/other.cpp", "")
        self.write("comm/internal/ddp/internal/unknown.h", "")
        for name in ("comm/other.cpp", "comm/extra/other.cpp", "unknown.h"):
            self.assertIn(f"{name} is in no folder", self.faults())

    def test_26_files_are_a_crowd(self):
        for i in range(25):
            self.write(f"reducer/part/{i}.h", "")
        self.assertEqual(list(crowded(self.root)), [])
        self.write("reducer/part/25.h", "")
        self.assertEqual(list(crowded(self.root)), ["reducer/part has 26 files, 25 at most"])

    def test_a_backend_that_overrides_a_collective_is_found(self):
        self.write("tests/double.h", "WorkPtr allreduce(\n    Tensors& t, const Options&) override {\n}\n")
        self.assertIn("tests/double.h overrides allreduce()", "\n".join(spelled_out(self.root)))

    def test_long_files_and_splinters_are_found(self):
        self.write("comm/CMakeLists.txt", "")
        self.write("comm/base/long.cpp", 501 * "\n")
        self.assertEqual(list(ill_sized(self.root)), [
            "comm/base/long.cpp has 501 lines, 500 at most",
            "comm/base/text.h has 1 lines with its source, and 1 user; 60, or a second user"])
        self.write("comm/store/other.cpp", '#include "base/text.h"\n')
        self.write("comm/base/long.cpp", 500 * "\n")
        self.assertEqual(list(ill_sized(self.root)), [])

    def test_a_comment_without_a_subject_is_found(self):
        self.write("comm/store/store.cpp", "int a;\n\n  /// What a store keeps.\nint b;  // Whatever\n")
        self.write("comm/include/ddp/store.h", "/// What users read.\n")
        self.assertEqual(list(without_subject(self.root)), ["comm/store/store.cpp:3: /// What a store keeps."])


if __name__ == "__main__":
    unittest.main()
